from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from beats import SERVICE, beat, bye

from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Heartbeat, Load
from xpyd_sidecar.routing import roster as ro
from xpyd_sidecar.routing.roster import Changed, Leaving, Lost, Probe, Probed, Refused, Roster

D0 = InstanceName("d0")
I0 = Incarnation("i-d0")


def make(**options: Any) -> Roster:
    return Roster(SERVICE, **({"started": 0.0, "settle_s": 8.0, "missed_beats": 3} | options))


def names(roster: Roster, role: Role = Role.DECODE) -> list[str]:
    return [member.name for member in roster.pickable(role)]


def probes(out: list[ro.Instruction]) -> list[Probe]:
    return [i for i in out if isinstance(i, Probe)]


def losts(out: list[ro.Instruction]) -> list[str]:
    return [i.incarnation for i in out if isinstance(i, Lost)]


def test_a_ready_beat_makes_an_instance_pickable_for_its_role() -> None:
    roster = make()
    assert [type(i) for i in roster.on_message(1.0, beat("d0"))] == [Changed]
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
    assert roster.on_probe(2.5, D0, I0, Probed.DEAD, "old") == [], "a probe of the old one says nothing of the new one"
    assert names(roster) == ["d0"]


def test_a_probe_of_the_old_incarnation_does_not_keep_the_new_one_from_being_probed() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    assert len(probes(roster.on_doubt(1.1, D0, I0))) == 1
    new = Incarnation("new")
    roster.on_message(1.2, beat("d0", incarnation=new))
    assert probes(roster.on_refused(1.3, D0, new, "refused")) == [Probe(D0, new, HostPort("127.0.0.1:1"))]


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
    with pytest.raises(Refused, match="epoch 1 is older than 2"):
        roster.on_message(2.0, beat("e0", Role.PREFILL, epoch=1))
    with pytest.raises(Refused, match="without a new epoch"):
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
    with pytest.raises(Refused, match=words):
        make().on_message(1.0, message)


def test_the_roster_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ro, "MAX_INSTANCES", 2)
    roster = make()
    roster.on_message(1.0, beat("d0"))
    roster.on_message(1.0, beat("d1"))
    with pytest.raises(Refused, match="full"):
        roster.on_message(1.0, beat("d2"))
    roster.on_message(2.0, beat("d1"))


def test_silence_alone_evicts_nobody_a_failed_probe_does() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", interval_s=3.0))
    assert roster.on_tick(9.0) == []
    assert probes(roster.on_tick(9.1)) == [Probe(D0, I0, HostPort("127.0.0.1:1"))]
    assert roster.on_tick(9.2) == [], "one probe at a time"
    assert roster.on_probe(9.5, D0, I0, Probed.HEALTHY, "") == []
    assert names(roster) == ["d0"]
    assert len(probes(roster.on_tick(10.2))) == 1
    out = roster.on_probe(10.3, D0, I0, Probed.DEAD, "refused")
    assert losts(out) == [I0]
    assert roster.members() == []


def test_a_silent_instance_whose_probe_is_not_answered_is_suspended_and_a_second_one_evicts() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    for second in range(5):
        assert len(probes(roster.on_tick(9.1 + second))) == (second == 0)
    assert losts(roster.on_probe(14.1, D0, I0, Probed.SILENT, "no answer")) == [], "its legs may still be served"
    assert names(roster) == []
    assert len(probes(roster.on_tick(14.2))) == 1
    assert losts(roster.on_probe(19.2, D0, I0, Probed.SILENT, "no answer")) == [I0]
    assert roster.members() == []


def test_a_beat_between_two_unanswered_probes_begins_the_count_anew() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    roster.on_tick(9.1)
    roster.on_probe(14.1, D0, I0, Probed.SILENT, "no answer")
    roster.on_message(14.2, beat("d0", seq=2))
    roster.on_tick(23.3)
    assert losts(roster.on_probe(28.3, D0, I0, Probed.SILENT, "no answer")) == []
    assert [m.name for m in roster.members()] == ["d0"]
    roster.on_tick(28.4)
    roster.on_probe(28.5, D0, I0, Probed.HEALTHY, "")
    assert names(roster) == ["d0"]


def test_a_router_that_stood_still_does_not_take_it_for_the_agents_silence() -> None:
    """The process was stopped, or its machine slept: what was sent meanwhile waits in its socket."""
    roster = make(beside_engine=True)
    for second in range(12):
        roster.on_message(float(second), beat("d0", interval_s=1.0))
        roster.on_tick(float(second))
    assert roster.settled(11.0)
    assert roster.on_tick(11.0 + 3600.0) == []
    assert roster.settled(3611.0)
    assert roster.on_tick(3614.0) == []
    assert len(probes(roster.on_tick(3614.1))) == 1, "but who stays silent is found"


def test_a_tick_opens_a_bounded_number_of_probes_and_all_get_their_turn() -> None:
    roster = make()
    count = 3 * ro.PROBES_OPEN
    for i in range(count):
        roster.on_message(0.0, beat(f"d{i}"))
    asked: set[str] = set()
    for turn in range(3):
        new = probes(roster.on_tick(10.0 + turn))
        assert len(new) == ro.PROBES_OPEN
        assert probes(roster.on_tick(10.5 + turn)) == []
        for each in new:
            roster.on_probe(10.6 + turn, each.instance, each.incarnation, Probed.HEALTHY, "")
            asked.add(each.instance)
    assert len(asked) == count


def test_one_live_entry_does_not_shield_dead_ones() -> None:
    roster = make()
    for name in ("d0", "d1", "d2", "p0"):
        roster.on_message(0.0, beat(name, Role.PREFILL if name == "p0" else Role.DECODE))
    roster.on_message(9.0, beat("d0"))
    dead = [p.instance for p in probes(roster.on_tick(10.0))]
    assert dead == ["d1", "d2", "p0"]
    for name in dead:
        roster.on_probe(10.1, name, Incarnation(f"i-{name}"), Probed.DEAD, "refused")
    assert [m.name for m in roster.members()] == ["d0"]


def test_silent_without_an_address_is_evicted_without_a_probe() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", http=(), state=State.STARTING))
    assert [type(i) for i in roster.on_tick(9.5)] == [Changed]
    assert roster.members() == []


def test_a_refused_connection_suspends_at_once_until_a_good_probe() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    assert len(probes(roster.on_refused(1.0, D0, I0, "connection refused"))) == 1
    assert names(roster) == []
    assert "suspended: connection refused" in roster.why_not(Role.DECODE)
    assert roster.on_refused(1.1, D0, I0, "connection refused") == []
    assert [type(i) for i in roster.on_probe(1.3, D0, I0, Probed.HEALTHY, "")] == [Changed]
    assert names(roster) == ["d0"]


def test_a_dead_instance_takes_no_new_request_after_its_first_failure_whatever_its_agent_says() -> None:
    """The agent looks once a second: for so long it may call an engine ready that has just died."""
    roster = make()
    roster.on_message(0.0, beat("d0"))
    roster.leg_opened(roster.members()[0])
    roster.on_refused(1.0, D0, I0, "connection refused")
    roster.on_message(1.05, beat("d0", seq=2))
    assert names(roster) == []
    assert losts(roster.on_probe(1.1, D0, I0, Probed.DEAD, "refused")) == [I0]
    roster.on_message(1.2, beat("d0", seq=3))
    assert names(roster) == []
    assert roster.on_tick(1.5) == [], "probes keep a distance"
    assert len(probes(roster.on_tick(2.1))) == 1
    roster.on_probe(7.1, D0, I0, Probed.SILENT, "no answer")
    roster.on_message(7.2, beat("d0", seq=4))
    assert names(roster) == []
    assert len(probes(roster.on_tick(7.3))) == 1
    roster.on_probe(7.4, D0, I0, Probed.HEALTHY, "")
    assert names(roster) == ["d0"]


def test_a_doubt_that_comes_right_after_a_probe_is_not_forgotten() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    roster.on_doubt(1.0, D0, I0)
    roster.on_probe(1.1, D0, I0, Probed.HEALTHY, "")
    assert roster.on_doubt(1.2, D0, I0) == [], "probes keep a distance"
    assert len(probes(roster.on_tick(2.1))) == 1
    roster.on_probe(2.2, D0, I0, Probed.HEALTHY, "")
    assert roster.on_tick(4.0) == []


def test_doubt_asks_but_goes_on_picking() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    assert len(probes(roster.on_doubt(1.0, D0, I0))) == 1
    assert names(roster) == ["d0"]
    assert roster.on_probe(6.0, D0, I0, Probed.SILENT, "busy") == [], "busy is not dead"
    assert names(roster) == ["d0"]
    roster.on_doubt(7.5, D0, I0)
    assert losts(roster.on_probe(7.6, D0, I0, Probed.DEAD, "GET /health answered 503")) == [I0]
    assert names(roster) == []


def stuck(roster: Roster, role: Role = Role.DECODE, other: Role = Role.DECODE) -> list[str]:
    """An engine stands still with a leg on it, and its agent, which gets no answer, says so. Legs given up by probe."""
    roster.on_message(0.0, beat("d0", role))
    roster.on_message(0.0, beat("d1", other))
    assert roster.open_leg(D0, I0) is not None
    roster.on_doubt(3.0, D0, I0)
    assert roster.on_probe(8.0, D0, I0, Probed.SILENT, "no answer") == [], "its agent calls it ready: busy"
    out = []
    for second in (10, 16, 22):
        roster.on_message(second, beat("d0", role, seq=second, state=State.STARTING))
        roster.on_message(second, beat("d1", other, seq=second))
        roster.on_doubt(second, D0, I0)
        out.append(",".join(losts(roster.on_probe(second + 5, D0, I0, Probed.SILENT, "no answer"))))
    return out


def test_legs_of_an_engine_that_answers_neither_probes_nor_its_agent_go_on_elsewhere() -> None:
    roster = make()
    assert stuck(roster)[:2] == ["", I0]
    assert names(roster) == ["d1"]
    assert [m.name for m in roster.members()] == ["d0", "d1"], "it may come to itself"
    roster.on_message(28.0, beat("d0", seq=99))
    assert names(roster) == ["d1"], "after a good probe"
    roster.on_tick(29.0)
    roster.on_probe(29.1, D0, I0, Probed.HEALTHY, "")
    assert names(roster) == ["d0", "d1"]


def test_legs_that_nobody_could_go_on_with_wait_for_an_engine_that_stands_still() -> None:
    assert stuck(make(), other=Role.PREFILL) == ["", "", ""]


@pytest.mark.parametrize("other", list(Role))
def test_legs_of_a_prefill_that_stands_still_are_given_up_where_decode_can_do_without(other: Role) -> None:
    assert stuck(make(), Role.PREFILL, other)[:2] == ["", I0]


def test_an_engine_that_comes_to_itself_between_two_probes_keeps_its_legs() -> None:
    roster = make()
    assert stuck(roster)[0] == ""
    roster = make()
    roster.on_message(0.0, beat("d0"))
    roster.on_message(0.0, beat("d1"))
    roster.open_leg(D0, I0)
    for second, state in ((10, State.STARTING), (16, State.READY), (22, State.STARTING)):
        roster.on_message(second, beat("d0", seq=second, state=state))
        roster.on_doubt(second, D0, I0)
        assert losts(roster.on_probe(second + 5, D0, I0, Probed.SILENT, "no answer")) == []


def test_an_engine_that_starts_has_no_legs_to_give_up() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", state=State.STARTING))
    roster.on_message(0.0, beat("d1"))
    for second in (1, 7, 13):
        roster.on_message(second, beat("d0", seq=second, state=State.STARTING))
        roster.on_doubt(second, D0, I0)
        assert roster.on_probe(second + 5, D0, I0, Probed.SILENT, "no answer") == []


def test_events_of_unknown_instances_change_nothing() -> None:
    roster = make()
    assert roster.on_refused(1.0, D0, I0, "x") == []
    assert roster.on_doubt(1.0, D0, I0) == []
    assert roster.on_probe(1.0, D0, I0, Probed.DEAD, "x") == []
    assert roster.on_message(1.0, bye("d0")) == []


def test_goodbye_stops_picking_at_once_but_its_legs_run_on() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    assert losts(roster.on_message(1.0, bye("d0"))) == []
    assert roster.members() == []


def test_a_late_goodbye_of_an_old_incarnation_does_not_remove_the_new_one() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", incarnation=Incarnation("new")))
    with pytest.raises(Refused, match="replaced"):
        roster.on_message(1.0, bye("d0"))
    assert names(roster) == ["d0"]


def test_settled_after_the_time_that_agents_need() -> None:
    roster = make(started=100.0)
    assert not roster.settled(107.9)
    assert roster.settled(108.0)


def test_beside_an_engine_settled_after_the_first_beat_that_was_not_followed_by_silence() -> None:
    """Agents are told of such a router at some time; all of them come within one look-up and one beat of the first."""
    roster = make(started=100.0, beside_engine=True)
    assert (roster.listened(107.9), roster.listened(108.0)) == (False, True)
    assert not roster.settled(500.0), "nobody beats"
    roster.on_message(500.0, beat("d0"))
    roster.on_message(503.0, beat("d0", seq=2))
    assert not roster.settled(507.9)
    roster.on_message(506.0, beat("d1"))
    assert roster.settled(508.0)
    assert not roster.settled(514.0), "silence: agents were told that this router is none any more"
    roster.on_message(600.0, beat("d0", seq=3))
    assert not roster.settled(600.0)
    roster.on_message(605.0, beat("d0", seq=4))
    assert roster.settled(608.0)


def test_a_beats_interval_is_bounded() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", interval_s=1e9))
    assert len(probes(roster.on_tick(181.0))) == 1


def test_the_fleet_shows_what_is_known() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0", model="m", drained=True))
    roster.leg_opened(roster.members()[0])
    roster.on_refused(2.0, D0, I0, "gone")
    [shown] = roster.fleet(3.5)
    assert (shown.instance, shown.in_flight, shown.beat_age_s, shown.suspended, shown.drained) == ("d0", 1, 2.5, "gone",
                                                                                                   True)
    roster.leg_closed(roster.members()[0])
    assert roster.fleet(3.5)[0].in_flight == 0
    assert roster.models() == ["m"]


def test_an_adapter_is_known_while_all_that_take_legs_serve_it() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", also=("fluent", "terse")))
    assert roster.models() == ["tiny", "fluent", "terse"]
    roster.on_message(0.0, beat("p0", Role.PREFILL, also=("fluent",)))
    assert roster.models() == ["tiny", "fluent"]
    roster.on_message(1.0, beat("d1", state=State.STARTING))
    assert roster.models() == ["tiny", "fluent"], "it takes no legs yet"
    roster.on_refused(2.0, D0, I0, "gone")
    roster.on_refused(2.0, InstanceName("p0"), Incarnation("i-p0"), "gone")
    assert roster.models() == ["tiny"], "nobody takes legs, and one of them does not have it"
    roster.on_message(3.0, beat("d1", also=("terse",)))
    assert roster.models() == ["tiny", "terse"]


OLD, NEW = AgentId("0" * 19 + "1"), AgentId("0" * 19 + "2")


def test_of_two_agents_with_one_name_the_one_that_began_later_is_heard_by_every_router() -> None:
    """Without a rule the entry would flap between two incarnations, and each change gives up legs."""
    one, other = Incarnation("one"), Incarnation("other")
    beats = [beat("d0", agent=OLD, incarnation=one), beat("d0", agent=NEW, incarnation=other)]
    for order in (beats, beats[::-1]):
        roster, lost = make(), 0
        for turn in range(10):
            for each in order:
                with contextlib.suppress(Refused):
                    lost += len(losts(roster.on_message(3.0 * turn, msgspec.structs.replace(each, seq=turn))))
        assert roster.members()[0].incarnation == other
        assert lost <= 1
        with pytest.raises(Refused, match=f"two agents speak as 'd0': {OLD} .*incarnation one.*{NEW} .*incarnation other"):
            roster.on_message(28.0, beats[0])


def test_the_other_agent_is_heard_once_the_later_one_is_silent_or_gone() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", agent=NEW, incarnation=Incarnation("new")))
    with pytest.raises(Refused):
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
    with pytest.raises(Refused, match="goodbye of agent"):
        roster.on_message(1.1, bye("d0", agent=OLD))
    assert names(roster) == ["d0"]


def test_a_beat_that_was_overtaken_changes_nothing() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", agent=OLD, seq=5, state=State.DRAINING))
    with pytest.raises(Refused, match="late: beat 4 came after beat 5"):
        roster.on_message(0.1, beat("d0", agent=OLD, seq=4))
    roster.on_message(0.2, beat("d0", agent=OLD, seq=5, state=State.DRAINING))
    assert names(roster) == []


def test_agents_that_do_not_say_who_they_are_replace_each_other_as_before() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", agent=NEW))
    assert losts(roster.on_message(1.0, beat("d0", incarnation=Incarnation("n-1"), seq=0))) == [I0]
    assert names(roster) == ["d0"]


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
    with pytest.raises(Refused, match=words):
        roster.on_message(0.0, beat("d0", **fields))
    assert roster.members() == []
    roster.on_message(0.0, beat("d0"))
    if "http" in fields:
        with pytest.raises(Refused, match=words):
            roster.on_message(1.0, beat("d0", **fields))
        assert names(roster) == ["d0"]
        assert roster.members()[0].beat_at == 0.0


def test_a_beat_that_says_nothing_new_keeps_what_was_made_of_it() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    picks = roster.pickable(Role.DECODE)
    roster.leg_opened(picks[0])
    assert roster.on_message(3.0, beat("d0", seq=2, load=Load(running=7), interval_s=1.0, drained=True)) == []
    assert roster.pickable(Role.DECODE) is picks
    member = picks[0]
    assert (member.load.running, member.interval_s, member.drained, member.beat_at, member.in_flight_at_beat) == \
        (7, 1.0, True, 3.0, 1)


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
    roster.leg_opened(member)
    [changed] = roster.on_message(2.0, beat("d0", Role.PREFILL, epoch=2, seq=2))
    assert isinstance(changed, Changed)
    assert changed.kind == "role"
    assert (names(roster), names(roster, Role.PREFILL)) == (["d1"], ["d0"])
    assert member.in_flight == 1
    with pytest.raises(Refused, match="epoch 1 is older than 2"):
        roster.on_message(3.0, beat("d0", seq=3))
    assert names(roster, Role.PREFILL) == ["d0"], "an agent that knows nothing of the switch changes nothing"
    roster.leg_closed(member)
    assert roster.find(D0, I0) is member


def test_each_beat_of_who_leaves_says_that_streams_should_move() -> None:
    roster = make()
    roster.on_message(1.0, beat("d0"))
    draining = {"state": State.DRAINING, "seq": 2}
    assert not any(isinstance(i, Leaving) for i in roster.on_message(2.0, beat("d0", **draining)))
    for seq in (3, 4):
        out = roster.on_message(3.0, beat("d0", **(draining | {"seq": seq, "leaving": True})))
        assert out == [Leaving(D0, I0, "d0 drains and ends soon")]
