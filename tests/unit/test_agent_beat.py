"""The agent's state machine: from looks to states, beats and the end of a drain."""

from __future__ import annotations

import msgspec
import pytest
from agent_fakes import FIELDS, config_of, record_of
from beats import AGENT
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.agent.beat import (
    IDLE_LOOKS,
    SLOW_LOOKS,
    BeatNow,
    DrainAsked,
    DrainEnded,
    Event,
    KnownRouter,
    Machine,
    ProbeDone,
    ProbeResult,
    RoleTold,
    UndrainAsked,
    disagreement,
    merge_notes,
)
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.core_steps import CoreSteps
from xpyd_sidecar.contract.demand import MAX_CARRIED, MAX_TOLD, RouterDemand, TenantDemand
from xpyd_sidecar.contract.fingerprint import digest
from xpyd_sidecar.contract.ids import AgentId, HostPort, Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.launch import GroupConfig
from xpyd_sidecar.contract.membership import MAX_POISONS, Heartbeat, Load, Sampling
from xpyd_sidecar.contract.pair_notes import MOST_LINKS, MOST_REFUSED, PairNotes, RefusedPeer
from xpyd_sidecar.contract.speculation import Speculation

IDLE = Load()
BUSY = Load(running=1)


def up(incarnation: str = "a" * 32, load: Load | None = IDLE, problem: str = "") -> ProbeDone:
    return ProbeDone(ProbeResult("up", problem, (record_of(incarnation),), load, "tiny", 2048), ())


def down(problem: str = "GET /health: connection refused") -> ProbeDone:
    return ProbeDone(ProbeResult("down", problem, (record_of(),)), ())


SLOW = ProbeDone(ProbeResult("slow", "GET /health took longer than 3 s", (record_of(),)), ())


UNMADE = ProbeDone(ProbeResult("unmade", "no files left"), ())


def with_routers(event: ProbeDone, *routers: KnownRouter) -> ProbeDone:
    return ProbeDone(event.look, routers)


def ready() -> Machine:
    machine = Machine(config_of(), AGENT)
    machine.handle(up(), 0.0)
    machine.handle(up(), 0.5)
    assert machine.state is State.READY
    return machine


def test_begins_as_starting_and_says_so() -> None:
    beat = Machine(config_of(), AGENT).heartbeat()
    assert (beat.state, beat.seq, beat.incarnation, beat.drained) == (State.STARTING, 1, "", False)
    assert (beat.service, beat.instance, beat.role, beat.http) == ("test", "test-e0", Role.DECODE, ("10.0.0.7:8000",))


def test_what_the_engine_has_found_of_its_peers_is_beaten_at_once_and_goes_with_it() -> None:
    machine = ready()
    peer = RefusedPeer(InstanceName("p0"), Incarnation("1" * 32), "another model")
    look = msgspec.structs.replace(up().look, pairs=PairNotes(Incarnation("a" * 32), (peer,), ("over tcp",)))
    assert machine.handle(ProbeDone(look, ()), 1.0) == (BeatNow("ready"),)
    beat = machine.heartbeat()
    assert (beat.refused, beat.links) == ((peer,), ("over tcp",))
    assert machine.handle(SLOW, 1.5) == ()
    assert machine.heartbeat().refused == (peer,), "a look without news changes nothing"
    words = msgspec.structs.replace(look, pairs=PairNotes(Incarnation("a" * 32), (peer,), ()))
    assert machine.handle(ProbeDone(words, ()), 2.0) == (), "words for people can wait for the next beat"
    assert machine.handle(up(), 3.0) == (BeatNow("ready"),)
    assert machine.heartbeat().refused == ()


def test_what_ranks_have_found_is_put_together_without_what_is_of_another_start() -> None:
    def peer(name: str) -> RefusedPeer:
        return RefusedPeer(InstanceName(name), Incarnation("1"), name)

    ours = Incarnation("a")
    before = PairNotes(Incarnation("b"), (peer("p9"),), ("z",))
    found = merge_notes([PairNotes(ours, (peer("p0"), peer("p1")), ("x", "y")), before,
                      PairNotes(ours, (peer("p1"), peer("p2")), ("y", "w"))], ours)
    assert found == PairNotes(ours, (peer("p0"), peer("p1"), peer("p2")), ("x", "y", "w"))
    many = [PairNotes(ours, tuple(peer(f"p{rank}-{n}") for n in range(MOST_REFUSED)),
                      tuple(f"{rank}-{n}" for n in range(MOST_LINKS))) for rank in range(3)]
    assert (len(merge_notes(many, ours).refused), len(merge_notes(many, ours).links)) == (MOST_REFUSED, MOST_LINKS)


def test_ready_from_the_second_look_that_shows_the_incarnation() -> None:
    machine = Machine(config_of(), AGENT)
    assert machine.handle(up(), 0.0) == (BeatNow("a new incarnation of the engine: to be confirmed by a second look"),)
    assert machine.state is State.STARTING
    assert machine.handle(up(), 0.5) == (BeatNow("ready"),)
    assert machine.problem == ""


def test_a_ready_beat_carries_the_record() -> None:
    beat = ready().heartbeat()
    assert beat.incarnation == "a" * 32
    assert beat.control == ("127.0.0.1:4000",)
    assert beat.fingerprint == f"{digest(FIELDS)}-kv2.5.1"
    assert (beat.model, beat.max_model_len, beat.interval_s) == ("tiny", 2048, 3.0)


@pytest.mark.parametrize(("wanted", "found"), [(3.0, 1.0), (0.5, 0.5)])
def test_the_leader_of_a_group_beats_as_often_as_its_members_say_hello(wanted: float, found: float) -> None:
    config = config_of(heartbeat_s=wanted, group=GroupConfig(0, 2, "x"))
    assert config.agent is not None
    assert Machine(config, AGENT).heartbeat().interval_s == config.agent.beat_s == found


def test_a_beat_tells_what_the_engine_adds_to_requests() -> None:
    told = Sampling((("top_k", 20.0),), ("logits_processors",), 50)
    for sampling in (told, None):
        look = msgspec.structs.replace(up(), look=msgspec.structs.replace(
            up().look, records=(msgspec.structs.replace(record_of(), sampling=sampling),)))
        machine = Machine(config_of(), AGENT)
        machine.handle(look, 0.0)
        machine.handle(look, 0.5)
        beat = machine.heartbeat()
        assert beat.sampling == sampling
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(beat), type=Heartbeat).sampling == sampling
    assert Machine(config_of(), AGENT).heartbeat().sampling is None


def test_seq_grows_by_one() -> None:
    machine = ready()
    assert [machine.heartbeat().seq for _ in range(3)] == [1, 2, 3]


def test_a_refused_engine_is_starting_at_once_and_back_after_one_look() -> None:
    machine = ready()
    assert machine.handle(down(), 1.0) == (BeatNow("GET /health: connection refused"),)
    assert machine.state is State.STARTING
    assert machine.handle(up(), 2.0) == (BeatNow("ready"),)


def test_a_slow_engine_is_starting_after_several_looks_only() -> None:
    machine = ready()
    for _ in range(SLOW_LOOKS - 1):
        assert machine.handle(SLOW, 1.0) == ()
    assert machine.handle(SLOW, 2.0) == (BeatNow("GET /health took longer than 3 s"),)


def test_one_quick_answer_ends_the_count_of_slow_ones() -> None:
    machine = ready()
    for _ in range(3):
        for _ in range(SLOW_LOOKS - 1):
            machine.handle(SLOW, 1.0)
        machine.handle(up(), 1.0)
    assert machine.state is State.READY


def test_a_new_incarnation_passes_through_starting() -> None:
    machine = ready()
    machine.handle(up("b" * 32), 1.0)
    beat = machine.heartbeat()
    assert (beat.state, beat.incarnation) == (State.STARTING, "b" * 32)
    machine.handle(up("b" * 32), 1.5)
    assert machine.state is State.READY


def test_a_healthy_engine_without_a_record_is_not_ready() -> None:
    machine = Machine(config_of(), AGENT)
    for now in range(3):
        machine.handle(ProbeDone(ProbeResult("up"), ()), float(now))
    assert machine.state is State.STARTING
    assert machine.problem == "the engine is up, but its connector has written no record"


def test_a_problem_of_a_healthy_engine_keeps_it_starting() -> None:
    machine = ready()
    machine.handle(up(problem="/v1/models: the engine serves ['x'], not 'y'"), 1.0)
    assert machine.state is State.STARTING
    assert "not 'y'" in machine.problem


def test_ranks_that_disagree_are_named() -> None:
    other = record_of("b" * 32, 1, msgspec.structs.replace(FIELDS, dtype="bfloat16"))
    assert disagreement((record_of(), other)) == "DP ranks 0 and 1 differ: dtype: 'float32' here, 'bfloat16' there"
    machine = Machine(config_of(), AGENT)
    for now in range(3):
        machine.handle(ProbeDone(ProbeResult("up", records=(record_of(), other), load=IDLE), ()), float(now))
    assert machine.state is State.STARTING
    assert "DP ranks" in machine.problem


def test_every_rank_has_its_control_address_in_the_beat() -> None:
    machine = Machine(config_of(), AGENT)
    for now in range(2):
        machine.handle(ProbeDone(ProbeResult("up", records=(record_of(), record_of("b" * 32, 1)), load=IDLE), ()),
                       float(now))
    assert machine.heartbeat().control == ("127.0.0.1:4000", "127.0.0.1:4001")


def test_servers_of_several_members_are_in_the_beat_rank_by_rank() -> None:
    machine = Machine(config_of(), AGENT)
    doors = (HostPort("10.0.0.7:8000"), HostPort("10.0.0.8:8000"))
    look = msgspec.structs.replace(up().look, records=(record_of(), record_of(dp_rank=1)), doors=doors)
    for now in (1.0, 2.0):
        machine.handle(ProbeDone(look, ()), now)
    beat = machine.heartbeat()
    assert (beat.state, beat.http, len(beat.control)) == (State.READY, doors, 2)


def test_load_of_a_dead_engine_is_none() -> None:
    machine = ready()
    machine.handle(up(load=BUSY), 1.0)
    assert machine.heartbeat().load == BUSY
    machine.handle(up(load=None), 2.0)
    assert machine.heartbeat().load == BUSY
    machine.handle(down(), 3.0)
    assert machine.heartbeat().load == Load()


def test_an_idle_engine_without_routers_is_drained_after_two_looks() -> None:
    machine = ready()
    assert machine.handle(DrainAsked(), 1.0) == (BeatNow("draining"),)
    assert machine.handle(DrainAsked(), 1.0) == ()
    assert machine.handle(up(), 1.5) == ()
    assert machine.handle(up(), 2.0) == (DrainEnded(True, "nothing runs, waits or moves"), BeatNow("drained"))
    beat = machine.heartbeat()
    assert (beat.state, beat.drained) == (State.DRAINING, True)
    assert machine.handle(up(load=BUSY), 2.5) == ()
    assert machine.drained


@pytest.mark.parametrize("load", [Load(running=1), Load(waiting=1), Load(transfers=1)])
def test_work_of_any_kind_holds_the_drain_up(load: Load) -> None:
    machine = ready()
    machine.handle(DrainAsked(), 1.0)
    for event in (up(), up(load=load), up()):
        machine.handle(event, 2.0)
        assert not machine.drained
    assert machine.handle(up(), 3.0)[0] == DrainEnded(True, "nothing runs, waits or moves")


def test_a_look_without_load_says_nothing_about_the_drain() -> None:
    machine = ready()
    machine.handle(DrainAsked(), 1.0)
    for now in range(2, 10):
        machine.handle(up(load=None), float(now))
    assert not machine.drained


def test_looks_before_every_router_acked_a_draining_beat_do_not_count() -> None:
    machine = ready()
    last = machine.heartbeat().seq
    machine.handle(DrainAsked(), 1.0)
    old = KnownRouter("10.0.0.1:1", acked=last)
    for _ in range(4):
        machine.handle(with_routers(up(), old), 2.0)
        assert not machine.drained
    assert machine.waits_for((old,), 2.0) == "router 10.0.0.1:1 has not acknowledged"
    told = msgspec.structs.replace(old, acked=machine.heartbeat().seq)
    machine.handle(with_routers(up(), told), 2.5)
    assert not machine.drained
    machine.handle(with_routers(up(), told), 3.0)
    assert machine.drained


def test_a_silent_router_holds_the_drain_up_for_its_bound_only() -> None:
    machine = ready()
    machine.heartbeat()
    machine.handle(DrainAsked(), 1.0)
    silent = KnownRouter("10.0.0.1:1", acked=1)
    machine.handle(with_routers(up(), silent), 6.9)
    machine.handle(with_routers(up(), silent), 7.1)
    assert not machine.drained
    machine.handle(with_routers(up(), silent), 7.6)
    assert machine.drained


def test_legs_in_flight_at_a_router_hold_the_drain_up_though_the_engine_shows_nothing() -> None:
    machine = ready()
    machine.handle(DrainAsked(), 1.0)
    machine.heartbeat()
    router = KnownRouter("10.0.0.1:1", "r0", acked=1, heard=1.1, in_flight=2)
    for now in (1.5, 2.0, 2.5):
        machine.handle(with_routers(up(), msgspec.structs.replace(router, heard=now)), now)
        assert not machine.drained
    assert machine.waits_for((router,), 2.5) == "router r0 has 2 requests in flight"
    done = msgspec.structs.replace(router, heard=3.0, in_flight=0)
    machine.handle(with_routers(up(), done), 3.0)
    machine.handle(with_routers(up(), done), 3.5)
    assert machine.drained


def test_routers_that_have_ejected_the_instance_are_told_to_all_of_them_and_at_once() -> None:
    machine = ready()
    assert machine.heartbeat().ejected_by == ()
    ejects = KnownRouter("10.0.0.1:1", "r1", acked=1, heard=1.0, ejected=True)
    others = (KnownRouter("10.0.0.2:1", "r0", acked=1, heard=1.0), KnownRouter("10.0.0.3:1", acked=-1, ejected=True))
    out = machine.handle(with_routers(up(), ejects, *others), 1.0)
    assert [type(one) for one in out] == [BeatNow]
    assert machine.heartbeat().ejected_by == ("r1",), "not who has no name yet"
    assert machine.handle(with_routers(up(), ejects), 2.0) == ()
    machine.handle(with_routers(up(), ejects), 60.0)
    assert machine.heartbeat().ejected_by == (), "it has been silent for too long to be believed"


def test_what_routers_say_of_tenants_is_told_to_all_of_them_with_the_next_beat() -> None:
    machine, words = ready(), tuple(TenantDemand(f"t{number}", number, 0) for number in range(MAX_TOLD))
    assert machine.heartbeat().demands == ()
    routers = [KnownRouter(f"10.0.0.{number}:1", f"r{number}", acked=1, heard=1.0,
                           demand=RouterDemand(f"r{number}", 5, words)) for number in range(8)]
    without = KnownRouter("10.0.1.1:1", "r9", acked=1, heard=1.0)
    assert machine.handle(with_routers(up(), *routers[:4], without), 1.0) == (), "a beat each time would be many"
    assert machine.heartbeat().demands == tuple(one.demand for one in routers[:4])
    machine.handle(with_routers(up(), *routers), 1.0)
    assert [len(one.tenants) for one in machine.heartbeat().demands] == [MAX_CARRIED // 8] * 8
    assert machine.heartbeat().demands[0].tenants == words[:MAX_CARRIED // 8]
    machine.handle(with_routers(up(), *routers), 60.0)
    assert machine.heartbeat().demands == (), "they have been silent for too long to be believed"


def test_what_routers_refuse_is_told_to_all_of_them_and_at_once() -> None:
    machine, label, one = ready(), "a" * 16, "0" * 32
    first = KnownRouter("10.0.0.1:1", "r1", acked=1, heard=1.0, poisons=(label, one))
    other = KnownRouter("10.0.0.2:1", "r0", acked=1, heard=1.0, poisons=(label,))
    out = machine.handle(with_routers(up(), first, other), 1.0)
    assert [type(each) for each in out] == [BeatNow]
    assert machine.heartbeat().poisons == (one, label)
    assert machine.handle(with_routers(up(), first, other), 2.0) == ()
    machine.handle(with_routers(up(), msgspec.structs.replace(first, poisons=()), other), 2.5)
    assert machine.heartbeat().poisons == (label,)
    many = msgspec.structs.replace(first, heard=3.0, poisons=tuple(f"{number:016x}" for number in range(100)))
    machine.handle(with_routers(up(), many), 3.0)
    assert len(machine.heartbeat().poisons) == MAX_POISONS
    machine.handle(with_routers(up(), first), 60.0)
    assert machine.heartbeat().poisons == (), "it has been silent for too long to be believed"


def test_beats_tell_how_far_the_core_has_got_as_long_as_somebody_looks() -> None:
    machine = ready()
    assert machine.heartbeat().core is None
    for core in (CoreSteps(5, 20.0), CoreSteps(7, 20.0)):
        assert machine.handle(ProbeDone(msgspec.structs.replace(up().look, core=core), ()), 1.0) == ()
        assert machine.heartbeat().core == core
    machine.handle(ProbeDone(ProbeResult("slow", records=up().look.records, core=CoreSteps(8, 20.0)), ()), 2.0)
    assert machine.heartbeat().core == CoreSteps(8, 20.0), "a busy server does not make the core stand still"
    machine.handle(ProbeDone(ProbeResult("unmade"), ()), 2.0)
    assert machine.heartbeat().core is None, "nor does an agent that could not look"


def test_a_router_that_died_with_legs_open_is_not_waited_for_beyond_its_bound() -> None:
    machine = ready()
    machine.handle(DrainAsked(), 1.0)
    machine.heartbeat()
    dead = KnownRouter("10.0.0.1:1", "r0", acked=1, heard=2.0, in_flight=2)
    machine.handle(with_routers(up(), dead), 7.9)
    assert not machine.drained
    machine.handle(with_routers(up(), dead), 8.1)
    machine.handle(with_routers(up(), dead), 8.6)
    assert machine.drained


def test_an_engine_that_dies_in_a_drain_has_nothing_to_finish() -> None:
    machine = ready()
    machine.handle(up(load=BUSY), 0.5)
    machine.handle(DrainAsked(), 1.0)
    machine.handle(down(), 1.5)
    assert machine.state is State.DRAINING
    assert machine.handle(down(), 2.0)[0] == DrainEnded(True, "the engine is down")


def test_a_slow_engine_of_a_group_that_lacks_a_member_is_not_ready_and_its_drain_goes_on() -> None:
    machine = ready()
    unready = ProbeDone(ProbeResult("unready", "member 1 of 2 is silent for 6 s"), ())
    machine.handle(up(load=BUSY), 1.0)
    machine.handle(unready, 2.0)
    assert machine.state is State.STARTING
    machine.handle(up(load=BUSY), 3.0)
    machine.handle(DrainAsked(), 3.5)
    for at in (6.0, 9.5, 13.0):
        machine.handle(unready, at)
        assert not machine.drained


def test_undrain_goes_back_to_what_the_engine_is() -> None:
    machine = ready()
    machine.handle(DrainAsked(), 1.0)
    assert machine.handle(UndrainAsked(), 2.0) == (DrainEnded(False, "the drain was taken back"), BeatNow("ready"))
    assert machine.handle(UndrainAsked(), 2.0) == ()
    machine.handle(down(), 3.0)
    machine.handle(DrainAsked(), 4.0)
    machine.handle(UndrainAsked(), 5.0)
    assert machine.state is State.STARTING


def test_beats_and_the_goodbye_say_which_process_speaks() -> None:
    machine = Machine(config_of(), AgentId("a" * 20))
    assert (machine.heartbeat().agent, machine.last_message().agent) == ("a" * 20, "a" * 20)


def test_goodbye_names_the_incarnation() -> None:
    assert ready().last_message().incarnation == "a" * 32


EVENTS = st.one_of(
    st.just(DrainAsked()), st.just(UndrainAsked()), st.just(down()), st.just(SLOW),
    st.builds(up, st.sampled_from(["a" * 32, "b" * 32]), st.sampled_from([None, IDLE, BUSY]), st.sampled_from(["", "bad"])),
)


@given(st.lists(EVENTS, max_size=30))
def test_the_laws_hold_after_any_events(events: list[Event]) -> None:
    machine = Machine(config_of(), AGENT)
    asked, incarnation, idle = False, "", 0
    for now, event in enumerate(events):
        was_drained, was_ready = machine.drained, machine.state is State.READY
        instructions = machine.handle(event, float(now))
        asked = True if isinstance(event, DrainAsked) else False if isinstance(event, UndrainAsked) else asked
        assert (machine.state is State.DRAINING) == asked
        if isinstance(event, ProbeDone):
            look = event.look
            if look.health == "down":
                idle += 1
            elif look.load is not None:
                idle = idle + 1 if look.load == IDLE else 0
            if machine.state is State.READY:
                assert look.health == "slow" or (look.health == "up" and not look.problem)
            if machine.incarnation != incarnation:
                assert machine.state is not State.READY
            if machine.drained and not was_drained:
                assert idle >= IDLE_LOOKS
                assert any(isinstance(one, DrainEnded) and one.drained for one in instructions)
        elif isinstance(event, DrainAsked) and not was_drained and was_ready:
            idle = 0
        assert asked or not machine.drained
        assert not (was_drained and asked) or machine.drained
        incarnation = machine.incarnation


def test_a_role_of_a_higher_epoch_is_beaten_at_once_and_nothing_else_changes() -> None:
    machine = ready()
    before = machine.heartbeat()
    assert machine.handle(RoleTold(Assignment(Role.PREFILL, 2)), 1.0) == (BeatNow("prefill from epoch 2 on"),)
    after = machine.heartbeat()
    assert (after.role, after.epoch, machine.role, machine.epoch) == (Role.PREFILL, 2, Role.PREFILL, 2)
    assert msgspec.structs.replace(after, role=before.role, epoch=before.epoch, seq=before.seq) == before


def test_a_role_of_an_epoch_that_is_not_higher_changes_nothing() -> None:
    machine = ready()
    machine.handle(RoleTold(Assignment(Role.PREFILL, 3)), 1.0)
    for told in (Assignment(Role.DECODE, 3), Assignment(Role.DECODE, 2), Assignment(Role.PREFILL, 3)):
        assert machine.handle(RoleTold(told), 2.0) == ()
    assert (machine.role, machine.epoch) == (Role.PREFILL, 3)


def test_streams_are_asked_to_move_before_the_time_of_the_drain_is_over() -> None:
    machine = ready()
    machine.handle(DrainAsked(), 0.0)
    machine.handle(up(load=BUSY), 594.9)
    assert not machine.heartbeat().leaving
    assert machine.handle(up(load=BUSY), 595.0) == (BeatNow("draining"),)
    assert machine.heartbeat().leaving
    machine.handle(UndrainAsked(), 596.0)
    assert not machine.heartbeat().leaving


def test_of_a_short_drain_half_is_left_for_moving() -> None:
    machine = Machine(config_of(drain_timeout_s=4.0), AGENT)
    machine.handle(up(), 0.0)
    machine.handle(DrainAsked(), 1.0)
    machine.handle(up(load=BUSY), 2.9)
    assert not machine.heartbeat().leaving
    machine.handle(up(load=BUSY), 3.0)
    assert machine.heartbeat().leaving
    for now in range(4, 5 + IDLE_LOOKS):
        machine.handle(up(load=IDLE), float(now))
    beat = machine.heartbeat()
    assert (beat.drained, beat.leaving) == (True, False)


def test_an_engine_that_is_started_again_has_the_role_that_its_agent_was_told() -> None:
    machine = ready()
    machine.handle(RoleTold(Assignment(Role.PREFILL, 2)), 1.0)
    machine.handle(down(), 2.0)
    for now in (3.0, 4.0):
        machine.handle(up("b" * 32), now)
    beat = machine.heartbeat()
    assert (beat.role, beat.epoch, beat.state, beat.incarnation) == (Role.PREFILL, 2, State.READY, "b" * 32)


def test_looks_that_could_not_be_made_change_nothing_however_many() -> None:
    machine = ready()
    for second in range(100):
        assert machine.handle(UNMADE, 1.0 + second) == ()
    assert (machine.state, machine.problem, machine.heartbeat().incarnation) == (State.READY, "", "a" * 32)
    machine.handle(down(), 200.0)
    machine.handle(UNMADE, 201.0)
    assert (machine.state, machine.problem) == (State.STARTING, "GET /health: connection refused")


def test_a_look_that_could_not_be_made_counts_neither_for_nor_against_a_drain_or_a_slow_engine() -> None:
    machine = ready()
    for look in (SLOW, UNMADE, SLOW, UNMADE):
        machine.handle(look, 1.0)
    assert machine.state is State.READY
    machine.handle(SLOW, 2.0)
    assert machine.state is State.STARTING, "the third slow one in a row"
    machine = ready()
    machine.handle(DrainAsked(), 1.0)
    for _ in range(10):
        machine.handle(UNMADE, 2.0)
    assert not machine.drained
    machine.handle(up(), 3.0)
    machine.handle(UNMADE, 3.5)
    machine.handle(up(), 4.0)
    assert machine.drained


def test_the_fingerprint_says_under_which_key_it_is() -> None:
    """So that a router that hears of engines under two keys pairs within one."""
    config = config_of()
    assert config.agent is not None
    agent = msgspec.structs.replace(config.agent, key_mark="1a2b3c4d")
    marked = Machine(msgspec.structs.replace(config, agent=agent), AGENT)
    assert marked.heartbeat().fingerprint == ""
    for now in (0.0, 0.5):
        marked.handle(up(), now)
    assert marked.heartbeat().fingerprint == f"{digest(FIELDS)}-kv2.5.1-1a2b3c4d"
    assert ready().heartbeat().fingerprint == f"{digest(FIELDS)}-kv2.5.1"


def test_the_fingerprint_says_which_versions_of_the_kv_plane_are_spoken() -> None:
    """So that a router never pairs engines of which one would refuse what the other says."""
    spoken = {}
    for versions in ("1.3.1", "1.4.1"):
        machine = Machine(config_of(), AGENT)
        look = msgspec.structs.replace(up(), look=msgspec.structs.replace(
            up().look, records=(msgspec.structs.replace(record_of(), kv=versions),)))
        for now in (0.0, 0.5):
            machine.handle(look, now)
        spoken[versions] = machine.heartbeat().fingerprint
    assert spoken == {"1.3.1": f"{digest(FIELDS)}-kv1.3.1", "1.4.1": f"{digest(FIELDS)}-kv1.4.1"}


def test_speculation_tells_engines_apart_only_where_states_are_laid_out_by_it() -> None:
    def heard(speculation: Speculation) -> str:
        machine = Machine(config_of(), AGENT)
        record = msgspec.structs.replace(record_of(), speculation=speculation)
        look = msgspec.structs.replace(up(), look=msgspec.structs.replace(up().look, records=(record,)))
        for now in (0.0, 0.5):
            machine.handle(look, now)
        return machine.heartbeat().fingerprint

    two, three = (Speculation("mtp", "h", num_speculative_tokens=n) for n in (2, 3))
    plain = f"{digest(FIELDS)}-kv2.5.1"
    assert heard(two) == heard(three) == heard(Speculation()) == heard(Speculation(states=True)) == plain
    with_states = [heard(msgspec.structs.replace(each, states=True)) for each in (two, three)]
    assert len(set(with_states)) == 2
    assert all(each.startswith(f"{plain}-s") for each in with_states)
