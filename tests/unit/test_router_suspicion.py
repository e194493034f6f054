"""Who is silent, refuses, or stands still: probes, suspension, eviction, and legs that are given up."""

from __future__ import annotations

import pytest
from beats import beat
from rosters import D0, I0, losts, make, names, probes

from xpyd_sidecar.contract.ids import HostPort, Incarnation, Role, State
from xpyd_sidecar.router.fleet import roster as ro
from xpyd_sidecar.router.fleet.member import HealthResult, ProbeInstance, RosterChange
from xpyd_sidecar.router.fleet.roster import Roster


def test_silence_alone_evicts_nobody_a_failed_probe_does() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", interval_s=3.0))
    assert roster.on_tick(9.0) == []
    assert probes(roster.on_tick(9.1)) == [ProbeInstance(D0, I0, HostPort("127.0.0.1:1"))]
    assert roster.on_tick(9.2) == [], "one probe at a time"
    assert roster.on_probe(9.5, D0, I0, HealthResult.HEALTHY, "") == []
    assert names(roster) == ["d0"]
    assert len(probes(roster.on_tick(10.2))) == 1
    out = roster.on_probe(10.3, D0, I0, HealthResult.DEAD, "refused")
    assert losts(out) == [I0]
    assert roster.members() == []


def test_a_silent_instance_whose_probe_is_not_answered_is_suspended_and_a_second_one_evicts() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    for second in range(5):
        assert len(probes(roster.on_tick(9.1 + second))) == (second == 0)
    assert losts(roster.on_probe(14.1, D0, I0, HealthResult.SILENT, "no answer")) == [], "its legs may still be served"
    assert names(roster) == []
    assert len(probes(roster.on_tick(14.2))) == 1
    assert losts(roster.on_probe(19.2, D0, I0, HealthResult.SILENT, "no answer")) == [I0]
    assert roster.members() == []


@pytest.mark.parametrize(("interval_s", "first_s", "next_s"), [(0.05, 2, 8), (1, 2, 8), (2, 4, 6), (3, 5, 5), (60, 5, 5)])
def test_of_who_beats_often_an_unanswered_probe_suspends_sooner_and_evicts_as_late_as_of_others(
        interval_s: float, first_s: float, next_s: float) -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", interval_s=interval_s))
    assert [each.patience_s for each in probes(roster.on_doubt(0.01, D0, I0))] == [5.0], "it beats"
    roster.on_probe(0.02, D0, I0, HealthResult.HEALTHY, "")
    roster.on_message(2.0, beat("d0", interval_s=interval_s, seq=2))
    now = 2.0 + 3 * interval_s + 0.1
    assert [each.patience_s for each in probes(roster.on_tick(now))] == [first_s]
    assert roster.on_tick(now + 1) == []
    roster.on_probe(now + first_s, D0, I0, HealthResult.SILENT, "no answer")
    assert names(roster) == []
    assert [each.patience_s for each in probes(roster.on_tick(now + first_s))] == [next_s]
    assert roster.on_tick(now + first_s + next_s / 2) == []
    assert losts(roster.on_probe(now + first_s + next_s, D0, I0, HealthResult.SILENT, "no answer")) == [I0]


def test_a_beat_between_two_unanswered_probes_begins_the_count_anew() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    roster.on_tick(9.1)
    roster.on_probe(14.1, D0, I0, HealthResult.SILENT, "no answer")
    roster.on_message(14.2, beat("d0", seq=2))
    roster.on_tick(23.3)
    assert losts(roster.on_probe(28.3, D0, I0, HealthResult.SILENT, "no answer")) == []
    assert [m.name for m in roster.members()] == ["d0"]
    roster.on_tick(28.4)
    roster.on_probe(28.5, D0, I0, HealthResult.HEALTHY, "")
    assert names(roster) == ["d0"]


def test_a_router_that_stood_still_does_not_take_it_for_the_agents_silence() -> None:
    """The process was stopped, or its machine slept: what was sent meanwhile waits in its socket."""
    roster = make(beside_engine=True)
    for second in range(12):
        roster.on_message(float(second), beat("d0", interval_s=1.0))
        roster.on_tick(float(second))
    assert roster.is_settled(11.0)
    assert roster.on_tick(11.0 + 3600.0) == []
    assert roster.is_settled(3611.0)
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
            roster.on_probe(10.6 + turn, each.instance, each.incarnation, HealthResult.HEALTHY, "")
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
        roster.on_probe(10.1, name, Incarnation(f"i-{name}"), HealthResult.DEAD, "refused")
    assert [m.name for m in roster.members()] == ["d0"]


def test_silent_without_an_address_is_evicted_without_a_probe() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", http=(), state=State.STARTING))
    assert [type(i) for i in roster.on_tick(9.5)] == [RosterChange]
    assert roster.members() == []


def test_a_refused_connection_suspends_at_once_until_a_good_probe() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    assert len(probes(roster.on_refused(1.0, D0, I0, "connection refused"))) == 1
    assert names(roster) == []
    assert roster.why_not(Role.DECODE) == "no decode instance is ready (d0 suspended)"
    assert roster.fleet(1.0)[0].suspended == "connection refused", "its reason is not for clients"
    assert roster.on_refused(1.1, D0, I0, "connection refused") == []
    assert [type(i) for i in roster.on_probe(1.3, D0, I0, HealthResult.HEALTHY, "")] == [RosterChange]
    assert names(roster) == ["d0"]


def test_a_dead_instance_takes_no_new_request_after_its_first_failure_whatever_its_agent_says() -> None:
    """The agent looks once a second: for so long it may call an engine ready that has just died."""
    roster = make()
    roster.on_message(0.0, beat("d0"))
    roster.members()[0].in_flight += 1
    roster.on_refused(1.0, D0, I0, "connection refused")
    roster.on_message(1.05, beat("d0", seq=2))
    assert names(roster) == []
    assert losts(roster.on_probe(1.1, D0, I0, HealthResult.DEAD, "refused")) == [I0]
    roster.on_message(1.2, beat("d0", seq=3))
    assert names(roster) == []
    assert roster.on_tick(1.5) == [], "probes keep a distance"
    assert len(probes(roster.on_tick(2.1))) == 1
    roster.on_probe(7.1, D0, I0, HealthResult.SILENT, "no answer")
    roster.on_message(7.2, beat("d0", seq=4))
    assert names(roster) == []
    assert len(probes(roster.on_tick(7.3))) == 1
    roster.on_probe(7.4, D0, I0, HealthResult.HEALTHY, "")
    assert names(roster) == ["d0"]


def test_a_doubt_that_comes_right_after_a_probe_is_not_forgotten() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    roster.on_doubt(1.0, D0, I0)
    roster.on_probe(1.1, D0, I0, HealthResult.HEALTHY, "")
    assert roster.on_doubt(1.2, D0, I0) == [], "probes keep a distance"
    assert len(probes(roster.on_tick(2.1))) == 1
    roster.on_probe(2.2, D0, I0, HealthResult.HEALTHY, "")
    assert roster.on_tick(4.0) == []


def test_doubt_asks_but_goes_on_picking() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0"))
    assert len(probes(roster.on_doubt(1.0, D0, I0))) == 1
    assert names(roster) == ["d0"]
    assert roster.on_probe(6.0, D0, I0, HealthResult.SILENT, "busy") == [], "busy is not dead"
    assert names(roster) == ["d0"]
    roster.on_doubt(7.5, D0, I0)
    assert losts(roster.on_probe(7.6, D0, I0, HealthResult.DEAD, "GET /health answered 503")) == [I0]
    assert names(roster) == []


def stuck(roster: Roster, role: Role = Role.DECODE, other: Role = Role.DECODE) -> list[str]:
    """An engine stands still with a leg on it, and its agent, which gets no answer, says so. Legs given up by probe."""
    roster.on_message(0.0, beat("d0", role))
    roster.on_message(0.0, beat("d1", other))
    roster.find(D0, I0).in_flight += 1
    roster.on_doubt(3.0, D0, I0)
    assert roster.on_probe(8.0, D0, I0, HealthResult.SILENT, "no answer") == [], "its agent calls it ready: busy"
    out = []
    for second in (10, 16, 22):
        roster.on_message(second, beat("d0", role, seq=second, state=State.STARTING))
        roster.on_message(second, beat("d1", other, seq=second))
        roster.on_doubt(second, D0, I0)
        out.append(",".join(losts(roster.on_probe(second + 5, D0, I0, HealthResult.SILENT, "no answer"))))
    return out


def test_legs_of_an_engine_that_answers_neither_probes_nor_its_agent_go_on_elsewhere() -> None:
    roster = make()
    assert stuck(roster)[:2] == ["", I0]
    assert names(roster) == ["d1"]
    assert [m.name for m in roster.members()] == ["d0", "d1"], "it may come to itself"
    roster.on_message(28.0, beat("d0", seq=99))
    assert names(roster) == ["d1"], "after a good probe"
    roster.on_tick(29.0)
    roster.on_probe(29.1, D0, I0, HealthResult.HEALTHY, "")
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
    roster.find(D0, I0).in_flight += 1
    for second, state in ((10, State.STARTING), (16, State.READY), (22, State.STARTING)):
        roster.on_message(second, beat("d0", seq=second, state=state))
        roster.on_doubt(second, D0, I0)
        assert losts(roster.on_probe(second + 5, D0, I0, HealthResult.SILENT, "no answer")) == []


def test_an_engine_that_starts_has_no_legs_to_give_up() -> None:
    roster = make()
    roster.on_message(0.0, beat("d0", state=State.STARTING))
    roster.on_message(0.0, beat("d1"))
    for second in (1, 7, 13):
        roster.on_message(second, beat("d0", seq=second, state=State.STARTING))
        roster.on_doubt(second, D0, I0)
        assert roster.on_probe(second + 5, D0, I0, HealthResult.SILENT, "no answer") == []
