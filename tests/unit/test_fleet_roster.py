"""Who is there, in which role and state, by what beats and goodbyes say."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from beats import beat, bye
from rosters import D0, I0, losts, make, names, probes

from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Heartbeat, Load, Sampling
from xpyd_sidecar.contract.pair_notes import RefusedPeer
from xpyd_sidecar.router.fleet import roster as ro
from xpyd_sidecar.router.fleet.member import BeatRefused, HealthResult, InstanceLeaves, ProbeInstance, RosterChange


def test_a_ready_beat_makes_an_instance_pickable_for_its_role() -> None:
    roster = make()
    assert [type(i) for i in roster.on_message(1.0, beat("d0"))] == [RosterChange]
    roster.on_message(1.0, beat("p0", Role.PREFILL))
    assert (names(roster), names(roster, Role.PREFILL)) == (["d0"], ["p0"])
    assert roster.on_message(4.0, beat("d0", seq=2)) == []


@pytest.mark.parametrize("fields", [{"state": State.STARTING}, {"state": State.DRAINING}, {"http": ()},
                                    {"incarnation": Incarnation("")}])
def test_who_is_not_ready_is_not_picked(fields: dict[str, Any]) -> None:
    roster = make()
    roster.on_message(1.0, beat("d0", **fields))
    assert names(roster) == []
    assert "d0" in roster.why_not(Role.DECODE)


def test_what_an_instance_cannot_take_kv_from_is_said_when_it_changes_and_shown() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    refused = (RefusedPeer(InstanceName("p0"), I0, "another model"),)
    assert roster.on_message(2.0, beat("d0", seq=2, refused=refused, links=("over tcp",))) == [
        RosterChange(D0, "cannot take KV from p0 (another model)", "pairs")]
    assert roster.on_message(3.0, beat("d0", seq=3, refused=refused, links=("over tcp",))) == []
    [shown] = roster.fleet(3.0)
    assert (shown.refused, shown.links) == (refused, ("over tcp",))
    assert roster.on_message(4.0, beat("d0", seq=4)) == [RosterChange(D0, "may take KV from all again", "pairs")]
    [shown] = roster.fleet(4.0)
    assert (shown.refused, shown.links) == ((), ())


def test_why_not_names_what_is_missing() -> None:
    roster = make()
    assert roster.why_not(Role.DECODE) == "no decode instance is known"
    for i in range(6):
        roster.on_message(1.0, beat(f"d{i}", state=State.STARTING))
    assert roster.why_not(Role.DECODE) == \
        "no decode instance is ready (d0 starting, d1 starting, d2 starting, d3 starting, …)"


def test_a_new_incarnation_replaces_the_old_one_and_its_legs_are_lost() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    roster.on_refused(1.5, D0, I0, "refused")
    out = roster.on_message(2.0, beat("d0", incarnation=Incarnation("new")))
    assert losts(out) == [I0]
    assert names(roster) == ["d0"]
    assert roster.find(D0, I0) is None
    assert roster.on_probe(2.5, D0, I0, HealthResult.DEAD, "old") == [], "a probe of the old says nothing of the new one"
    assert names(roster) == ["d0"]


def test_a_probe_of_the_old_incarnation_does_not_keep_the_new_one_from_being_probed() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    assert len(probes(roster.on_doubt(1.1, D0, I0))) == 1
    new = Incarnation("new")
    roster.on_message(1.2, beat("d0", incarnation=new))
    assert probes(roster.on_refused(1.3, D0, new, "refused")) == [ProbeInstance(D0, new, HostPort("127.0.0.1:1"))]


def test_all_servers_of_an_instance_are_probed_each_once() -> None:
    roster = make()
    doors = tuple(HostPort(f"h{rank // 2}:8000") for rank in range(6))
    roster.on_message(1.0, beat("d0", http=doors, control=tuple(HostPort(f"h:{rank + 1}") for rank in range(6))))
    (probe,) = probes(roster.on_doubt(2.0, D0, I0))
    assert (probe.address, probe.others) == ("h0:8000", ("h1:8000", "h2:8000"))


def test_a_probe_that_nobody_reports_on_is_made_again() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0", interval_s=60.0))
    assert len(probes(roster.on_doubt(2.0, D0, I0))) == 1
    assert probes(roster.on_doubt(31.0, D0, I0)) == []
    assert len(probes(roster.on_doubt(32.0, D0, I0))) == 1


def test_an_engine_that_vanishes_behind_a_living_agent_loses_its_legs() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    out = roster.on_message(2.0, beat("d0", incarnation=Incarnation(""), state=State.STARTING))
    assert losts(out) == [I0]
    assert names(roster) == []


def test_the_higher_epoch_wins_and_a_role_changes_only_with_one() -> None:
    roster = make()
    roster.on_message(1.0, beat("e0", epoch=2))
    with pytest.raises(BeatRefused, match="epoch 1 is older than 2"):
        roster.on_message(2.0, beat("e0", Role.PREFILL, epoch=1))
    with pytest.raises(BeatRefused, match="without a new epoch"):
        roster.on_message(2.0, beat("e0", Role.PREFILL, epoch=2))
    assert names(roster) == ["e0"]
    roster.on_message(3.0, beat("e0", Role.PREFILL, epoch=3))
    assert (names(roster), names(roster, Role.PREFILL)) == ([], ["e0"])


@pytest.mark.parametrize(("message", "words"), [
    (beat("d0", v=2), "version 2 is not understood here"),
    (bye("d0", v=9), "version 9"),
    (beat("d0", service=ServiceName("other")), "serves 'test', not 'other'"),
])
def test_foreign_messages_are_refused_with_a_reason(message: Heartbeat, words: str) -> None:
    with pytest.raises(BeatRefused, match=words):
        make().on_message(1.0, message)


def test_the_roster_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ro, "MAX_INSTANCES", 2)
    roster = make()
    roster.on_message(1.0, beat("d0"))
    roster.on_message(1.0, beat("d1"))
    with pytest.raises(BeatRefused, match="full"):
        roster.on_message(1.0, beat("d2"))
    roster.on_message(2.0, beat("d1"))


def test_events_of_unknown_instances_change_nothing() -> None:
    roster = make()
    assert roster.on_refused(1.0, D0, I0, "x") == []
    assert roster.on_doubt(1.0, D0, I0) == []
    assert roster.on_probe(1.0, D0, I0, HealthResult.DEAD, "x") == []
    assert roster.on_message(1.0, bye("d0")) == []


def test_goodbye_stops_picking_at_once_but_its_legs_run_on() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    assert losts(roster.on_message(1.0, bye("d0"))) == []
    assert roster.members() == []


def test_a_late_goodbye_of_an_old_incarnation_does_not_remove_the_new_one() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", incarnation=Incarnation("new")))
    with pytest.raises(BeatRefused, match="replaced"):
        roster.on_message(1.0, bye("d0"))
    assert names(roster) == ["d0"]


def test_settled_after_the_time_that_agents_need() -> None:
    roster = make(started=100.0)
    assert not roster.is_settled(107.9)
    assert roster.is_settled(108.0)


def test_beside_an_engine_settled_after_the_first_beat_that_was_not_followed_by_silence() -> None:
    """Agents are told of such a router at some time; all of them come within one look-up and one beat of the first."""
    roster = make(started=100.0, beside_engine=True)
    assert (roster.has_waited_for_agents(107.9), roster.has_waited_for_agents(108.0)) == (False, True)
    assert not roster.is_settled(500.0), "nobody beats"
    roster.on_message(500.0, beat("d0"))
    roster.on_message(503.0, beat("d0", seq=2))
    assert not roster.is_settled(507.9)
    roster.on_message(506.0, beat("d1"))
    assert roster.is_settled(508.0)
    assert not roster.is_settled(514.0), "silence: agents were told that this router is none any more"
    roster.on_message(600.0, beat("d0", seq=3))
    assert not roster.is_settled(600.0)
    roster.on_message(605.0, beat("d0", seq=4))
    assert roster.is_settled(608.0)


def test_a_beats_interval_is_bounded() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", interval_s=1e9))
    assert len(probes(roster.on_tick(181.0))) == 1


def test_the_fleet_shows_what_is_known() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0", model="m", drained=True))
    roster.members()[0].in_flight += 1
    roster.on_refused(2.0, D0, I0, "gone")
    [shown] = roster.fleet(3.5)
    assert (shown.instance, shown.in_flight, shown.beat_age_s, shown.suspended, shown.drained) == ("d0", 1, 2.5, "gone",
                                                                                                   True)
    roster.members()[0].in_flight -= 1
    assert roster.fleet(3.5)[0].in_flight == 0
    assert roster.names().listed == ("m",)


def test_an_adapter_is_known_while_a_pair_has_it() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", also=("fluent", "terse")))
    assert roster.names().listed == ("tiny", "fluent", "terse"), "there is no prefill, so decode alone serves it"
    roster.on_message(0.0, beat("p0", Role.PREFILL, also=("fluent",)))
    assert roster.names().listed == ("tiny", "fluent")
    roster.on_message(1.0, beat("d1", state=State.STARTING))
    assert roster.names().listed == ("tiny", "fluent"), "it takes no legs yet"
    assert not roster.names().partly("fluent")
    roster.on_message(1.0, beat("d2"))
    assert roster.names().partly("fluent"), "a pair has it, and d2 does not"
    assert not roster.names().partly("tiny")
    assert not roster.names().partly("terse"), "nobody can be paired for it"


def test_adapters_of_engines_that_cannot_pair_are_not_known() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", also=("fluent",)))
    roster.on_message(0.0, beat("p0", Role.PREFILL, also=("fluent",), fingerprint=Fingerprint("another")))
    assert roster.names().listed == ("tiny",)


def test_while_nobody_takes_legs_all_are_asked_for_names() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", also=("fluent",)))
    roster.on_refused(2.0, D0, I0, "gone")
    assert roster.names().listed == ("tiny", "fluent")


def test_what_decode_engines_add_to_requests_is_the_same_object_until_it_changes() -> None:
    roster, plain = make(), Sampling()
    assert roster.engine_defaults().alike is False
    roster.on_message(0.0, beat("d0", sampling=plain))
    told = roster.engine_defaults()
    assert told.alike
    roster.on_message(0.0, beat("p0", Role.PREFILL))
    roster.on_message(0.0, beat("d1", sampling=plain))
    assert roster.engine_defaults() is told, "nothing new of decode"
    roster.on_message(1.0, beat("d1", seq=2, sampling=Sampling((("top_p", 0.9),))))
    assert not roster.engine_defaults().alike
    roster.on_message(1.0, beat("d1", seq=3, sampling=Sampling((("top_p", 0.9),)), state=State.DRAINING))
    assert roster.engine_defaults() == told, "it takes no new legs"
    roster.on_message(2.0, beat("d2"))
    assert not roster.engine_defaults().alike, "one does not tell"


OLD, NEW = AgentId("0" * 19 + "1"), AgentId("0" * 19 + "2")


def test_of_two_agents_with_one_name_the_one_that_began_later_is_heard_by_every_router() -> None:
    """Without a rule the entry would flap between two incarnations, and each change gives up legs."""
    one, other = Incarnation("one"), Incarnation("other")
    beats = [beat("d0", agent=OLD, incarnation=one), beat("d0", agent=NEW, incarnation=other)]
    for order in (beats, beats[::-1]):
        roster, lost = make(), 0
        for turn in range(10):
            for each in order:
                with contextlib.suppress(BeatRefused):
                    lost += len(losts(roster.on_message(3.0 * turn, msgspec.structs.replace(each, seq=turn))))
        assert roster.members()[0].incarnation == other
        assert lost <= 1
        words = f"two agents speak as 'd0': {OLD} .*incarnation one.*{NEW} .*incarnation other"
        with pytest.raises(BeatRefused, match=words):
            roster.on_message(28.0, beats[0])


def test_the_other_agent_is_heard_once_the_later_one_is_silent_or_gone() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", agent=NEW, incarnation=Incarnation("new")))
    with pytest.raises(BeatRefused):
        roster.on_message(9.0, beat("d0", agent=OLD))
    roster.on_message(9.1, beat("d0", agent=OLD))
    assert roster.members()[0].incarnation == I0
    roster.on_message(9.2, beat("d0", agent=NEW, incarnation=Incarnation("new")))
    roster.on_message(9.3, bye("d0", agent=NEW, incarnation=Incarnation("new")))
    roster.on_message(9.4, beat("d0", agent=OLD))
    assert names(roster) == ["d0"]


def test_an_agent_that_comes_back_beside_its_engine_costs_no_leg() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", agent=OLD, seq=99))
    out = roster.on_message(1.0, beat("d0", agent=NEW, seq=1))
    assert losts(out) == []
    assert names(roster) == ["d0"]
    with pytest.raises(BeatRefused, match="goodbye of agent"):
        roster.on_message(1.1, bye("d0", agent=OLD))
    assert names(roster) == ["d0"]


def test_a_beat_that_was_overtaken_changes_nothing() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", agent=OLD, seq=5, state=State.DRAINING))
    with pytest.raises(BeatRefused, match="late: beat 4 came after beat 5"):
        roster.on_message(0.1, beat("d0", agent=OLD, seq=4))
    roster.on_message(0.2, beat("d0", agent=OLD, seq=5, state=State.DRAINING))
    assert names(roster) == []


@pytest.mark.parametrize(("fields", "words"), [
    ({"http": ("10.0.0.1",)}, r"'10.0.0.1' is not host:port - at `\$.http\[0\]`"),
    ({"http": ("10.0.0.1:1", "10.0.0.1:0")}, r"`\$.http\[1\]`"),
    ({"control": ("c:1", "c")}, r"'c' is not host:port - at `\$.control\[1\]`"),
    ({"instance": InstanceName("")}, r"not a name .* - at `\$.instance`"),
    ({"instance": InstanceName("d\n0")}, r"not a name .* - at `\$.instance`"),
    ({"instance": InstanceName("d" * 254)}, r"not a name .* - at `\$.instance`"),
])
def test_a_beat_that_cannot_be_used_is_refused_with_its_field_and_changes_nothing(fields: dict[str, Any],
                                                                                   words: str) -> None:
    roster = make()
    with pytest.raises(BeatRefused, match=words):
        roster.on_message(0.0, beat("d0", **fields))
    assert roster.members() == []
    roster.on_message(0.0, beat("d0"))
    if "http" in fields:
        with pytest.raises(BeatRefused, match=words):
            roster.on_message(1.0, beat("d0", **fields))
        assert names(roster) == ["d0"]
        assert roster.members()[0].beat_at == 0.0


def test_a_beat_that_says_nothing_new_keeps_what_was_made_of_it() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    picks = roster.pickable(Role.DECODE)
    picks[0].in_flight += 1
    assert roster.on_message(3.0, beat("d0", seq=2, load=Load(running=7), interval_s=1.0, drained=True)) == []
    assert roster.pickable(Role.DECODE) is picks
    member = picks[0]
    assert (member.load.running, member.interval_s, member.drained, member.beat_at, member.in_flight_at_beat) == \
        (7, 1.0, True, 3.0, 1)


@pytest.mark.parametrize("fields", [
    {"instance": InstanceName("d9")}, {"seq": 1}, {"service": ServiceName("other")}, {"v": 2}, {"leaving": True},
    {"state": State.DRAINING}, {"agent": NEW}, {"epoch": 2}, {"also": ("adapter",)},
])
def test_a_beat_that_needs_more_than_to_be_heard_changes_nothing_there(fields: dict[str, Any]) -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", seq=2))
    before = roster.fleet(3.0)
    changed = msgspec.structs.replace(beat("d0", seq=3, load=Load(running=7)), **fields)
    assert roster.take_unchanged_beat(3.0, changed) is None
    assert roster.fleet(3.0) == before
    assert roster.take_unchanged_beat(3.0, beat("d0", seq=3, load=Load(running=7))) is roster.members()[0]


@pytest.mark.parametrize("fields", [
    {"state": State.DRAINING}, {"incarnation": Incarnation("new")}, {"http": ("127.0.0.1:2",)},
    {"control": ("127.0.0.1:3",)}, {"model": "other"}, {"fingerprint": Fingerprint("e" * 32)}, {"epoch": 2},
    {"epoch": 2, "role": Role.PREFILL},
    {"max_model_len": 1}, {"agent": NEW},
])
def test_a_beat_that_says_anything_new_is_taken_whole(fields: dict[str, Any]) -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    picks = roster.pickable(Role.DECODE)
    roster.on_message(3.0, beat("d0", seq=2, **fields))
    assert roster.pickable(Role.DECODE) is not picks
    for name, value in fields.items():
        assert getattr(roster.members()[0], name) == value


def test_after_a_switch_was_heard_nothing_is_picked_for_the_old_role_and_its_legs_run_on() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    roster.on_message(1.0, beat("d1"))
    member = roster.find(D0, I0)
    assert member is not None
    member.in_flight += 1
    [changed] = roster.on_message(2.0, beat("d0", Role.PREFILL, epoch=2, seq=2))
    assert isinstance(changed, RosterChange)
    assert changed.kind == "role"
    assert (names(roster), names(roster, Role.PREFILL)) == (["d1"], ["d0"])
    assert member.in_flight == 1
    with pytest.raises(BeatRefused, match="epoch 1 is older than 2"):
        roster.on_message(3.0, beat("d0", seq=3))
    assert names(roster, Role.PREFILL) == ["d0"], "an agent that knows nothing of the switch changes nothing"
    member.in_flight -= 1
    assert roster.find(D0, I0) is member


def test_each_beat_of_who_leaves_says_that_streams_should_move() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    draining = {"state": State.DRAINING, "seq": 2}
    assert not any(isinstance(i, InstanceLeaves) for i in roster.on_message(2.0, beat("d0", **draining)))
    for seq in (3, 4):
        out = roster.on_message(3.0, beat("d0", **(draining | {"seq": seq, "leaving": True})))
        assert out == [InstanceLeaves(D0, I0)]
