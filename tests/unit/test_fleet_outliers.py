"""Who is ejected, for how long, and who never is: the machine alone, with members and times by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from beats import beat

from xpyd_sidecar.contract.core_steps import CoreSteps
from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName, Role, State
from xpyd_sidecar.router.fleet import outliers as ou
from xpyd_sidecar.router.fleet.first_bytes import FLOOR_S, KEPT, FirstBytes
from xpyd_sidecar.router.fleet.member import FleetMember
from xpyd_sidecar.router.fleet.outliers import CanaryResult, EjectInstance, Outliers, ReadmitInstance, SendCanary


def member(name: str, role: Role = Role.DECODE) -> FleetMember:
    return FleetMember(InstanceName(name), role=role, state=State.READY, incarnation=Incarnation(f"i-{name}"),
                       http=(HostPort(f"{name}:1"),))


class Stage:
    """A machine, its members, and a roster's part: who is ejected is marked."""

    def __init__(self, decodes: int = 2, prefills: int = 0, router: str = "r0") -> None:
        self.members = [member(f"d{i}") for i in range(decodes)] + [member(f"p{i}", Role.PREFILL) for i in range(prefills)]
        self.machine = Outliers(router, lambda: self.members)
        self.now = 0.0
        self.sent: list[SendCanary] = []

    def __getitem__(self, name: str) -> FleetMember:
        return next(one for one in self.members if one.name == name)

    def do(self, out: list[ou.OutlierInstruction]) -> list[str]:
        said = []
        for one in out:
            match one:
                case EjectInstance(instance=name, reason=reason, hung=hung):
                    said.append(f"{'hung' if self[name].ejected else 'eject'} {name}")
                    self[name].ejected, self[name].hung = reason, hung
                case ReadmitInstance(instance=name):
                    self[name].ejected, self[name].hung = "", False
                    said.append(f"readmit {name}")
                case SendCanary(instance=name, reference=reference):
                    self.sent.append(one)
                    said.append(f"canary {name}" + (f" beside {reference}" if reference else ""))
        return said

    def fault(self, name: str, who: object) -> list[str]:
        return self.do(self.machine.on_fault(self.now, self[name], who, "it answered 500"))

    def canary(self, name: str, result: CanaryResult, *, answered: bool = True) -> list[str]:
        return self.do(self.machine.on_canary(self.now, self[name], result, "no byte of a canary", answered=answered))

    def tick(self, seconds: float = 1.0) -> list[str]:
        said, end = [], self.now + seconds
        while self.now < end:
            self.now += min(1.0, end - self.now)
            said += self.do(self.machine.on_tick(self.now))
        return said

    def eject(self, name: str) -> None:
        said = [each for i in range(ou.FAULTS) for each in self.fault(name, ("eject", self.now, i))]
        assert said == [f"eject {name}"]


def test_three_faults_of_three_requests_eject_and_two_do_not() -> None:
    stage = Stage()
    assert stage.fault("d0", "a") == []
    assert stage.fault("d0", "b") == []
    assert not stage["d0"].ejected
    assert stage.fault("d0", "c") == ["eject d0"]
    assert not stage["d0"].pickable
    assert stage["d1"].pickable


def test_one_body_key_and_source_counts_once_however_often_it_fails() -> None:
    stage = Stage()
    for _ in range(50):
        assert stage.fault("d0", ("body", "key", "10.0.0.1")) == []
        stage.tick()
    assert stage.fault("d0", ("body", "key", "10.0.0.2")) == []


def test_faults_are_forgotten_after_the_window() -> None:
    stage = Stage()
    stage.fault("d0", "a")
    stage.fault("d0", "b")
    stage.tick(ou.WINDOW_S + 1)
    assert stage.fault("d0", "c") == []


def test_few_faults_among_many_legs_that_ended_well_eject_nobody() -> None:
    stage = Stage()
    stage["d0"].well = 100
    assert [stage.fault("d0", i) for i in range(20)] == [[]] * 20, "a fifth of what ends is not reached"
    assert [each for i in range(20, 40) for each in stage.fault("d0", i)] == ["eject d0"]


def test_legs_that_ended_well_long_ago_do_not_shield() -> None:
    stage = Stage()
    stage["d0"].well = 10_000
    stage.tick(10 * ou.WINDOW_S)
    assert [each for i in range(3) for each in stage.fault("d0", i)] == ["eject d0"]


def test_an_only_instance_is_never_ejected_nor_asked() -> None:
    stage = Stage(decodes=1, prefills=2)
    for i in range(20):
        assert stage.fault("d0", i) == []
    stage.machine.on_suspected(stage.now, stage["d0"])
    assert stage.tick(20.0) == []


@pytest.mark.parametrize(("decodes", "most"), [(2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_at_most_half_of_a_role_is_ejected(decodes: int, most: int) -> None:
    stage = Stage(decodes)
    said = [each for n in range(decodes) for i in range(3) for each in stage.fault(f"d{n}", i)]
    assert said == [f"eject d{n}" for n in range(most)]


def test_what_other_routers_say_counts_for_the_half() -> None:
    stage = Stage(4)
    stage["d2"].ejected_by = stage["d3"].ejected_by = ("r1",)
    for i in range(5):
        assert stage.fault("d0", i) == [], "r1 has ejected half of the role already"
    assert [each for i in range(5) for each in stage.fault("d3", i)] == ["eject d3"], "that one is counted already"


def test_who_cannot_be_picked_anyway_is_no_part_of_the_half() -> None:
    stage = Stage(3)
    stage["d1"].suspended = stage["d2"].suspended = "refused"
    for i in range(5):
        assert stage.fault("d0", i) == [], "it is the only one left"
    stage["d1"].suspended = ""
    assert stage.fault("d0", "more") == ["eject d0"]
    stage["d1"].state = State.DRAINING
    assert stage.tick() == ["readmit d0"], "it is the only one left again"


def test_routers_whose_verdicts_exceed_half_together_keep_the_same_ones() -> None:
    one, other = Stage(4, router="r0"), Stage(4, router="r1")
    for name in ("d0", "d2"):
        one.eject(name)
    for name in ("d1", "d2"):
        other.eject(name)
    for name in ("d0", "d1", "d2", "d3"):
        by = tuple(router for router, stage in (("r0", one), ("r1", other)) if stage[name].ejected)
        one[name].ejected_by = other[name].ejected_by = by
    one.tick()
    other.tick()
    out = [[m.name for m in stage.members if m.ejected] for stage in (one, other)]
    assert out == [["d0", "d2"], ["d2"]], "d2 has two routers, d0 comes first of those with one"


def test_another_routers_verdict_makes_suspected_and_no_more() -> None:
    stage = Stage()
    stage["d0"].ejected_by = ("r1", "r2")
    assert stage.tick() == ["canary d0 beside d1"]
    assert stage["d0"].pickable
    assert stage.canary("d0", CanaryResult.ANSWERED) == []
    assert stage.tick(200.0) == [], "it was looked at once"


def test_its_own_verdict_that_comes_back_is_none_of_another_router() -> None:
    stage = Stage()
    stage["d0"].ejected_by = ("r0",)
    assert stage.tick(10.0) == []


def test_a_canary_convicts_where_another_instance_answered_the_same() -> None:
    for result, answered, said in ((CanaryResult.SILENT, True, ["eject d0"]), (CanaryResult.FAILED, True, ["eject d0"]),
                                   (CanaryResult.SILENT, False, []), (CanaryResult.ANSWERED, True, []),
                                   (CanaryResult.UNMADE, True, [])):
        stage = Stage()
        stage.machine.on_suspected(stage.now, stage["d0"])
        assert stage.tick() == ["canary d0 beside d1"]
        assert stage.canary("d0", result, answered=answered) == said


def test_of_who_is_ejected_for_faults_it_may_be_found_later_that_it_hangs() -> None:
    stage = Stage()
    stage.eject("d0")
    assert not stage["d0"].hung
    assert stage.tick(5.0) == ["canary d0"]
    assert stage.canary("d0", CanaryResult.SILENT, answered=False) == ["hung d0"]
    assert stage.tick(ou.CANARY_S) == ["canary d0"]
    assert stage.canary("d0", CanaryResult.SILENT, answered=False) == [], "it is known"


def test_who_gave_a_byte_since_its_canary_was_sent_is_not_convicted() -> None:
    stage = Stage()
    stage["d0"].heard_at = 0.5
    stage.machine.on_suspected(stage.now, stage["d0"])
    stage.tick()
    stage["d0"].heard_at = 1.5
    assert stage.canary("d0", CanaryResult.SILENT) == []


def test_a_suspect_that_is_acquitted_is_asked_later_and_later() -> None:
    stage = Stage()
    asked = []
    for _ in range(300):
        stage.machine.on_suspected(stage.now, stage["d0"])
        if stage.tick():
            asked.append(stage.now)
            stage.canary("d0", CanaryResult.ANSWERED)
    gaps = [round(b - a) for a, b in pairwise(asked)]
    assert gaps == [10, 20, 40, 60, 60, 60]


def test_the_reference_is_who_was_heard_last_and_is_picked() -> None:
    stage = Stage(4)
    stage["d1"].heard_at, stage["d2"].heard_at, stage["d3"].heard_at = 1.0, 3.0, 9.0
    stage["d3"].ejected = "it hangs"
    stage.machine.on_suspected(stage.now, stage["d0"])
    assert stage.tick() == ["canary d0 beside d2"]


def test_ejections_grow_and_end_with_a_canary_that_is_answered_and_not_before() -> None:
    stage, lasted = Stage(), []
    for _ in range(5):
        stage.eject("d0")
        began = stage.now
        while stage["d0"].ejected:
            if "canary d0" in stage.tick():
                stage.canary("d0", CanaryResult.ANSWERED)
        lasted.append(stage.now - began)
        stage.tick(ou.TRIAL_S)
    assert lasted == [5.0, 10.0, 20.0, 25.0, 25.0]
    stage.tick(ou.FORGOTTEN_S + 1)
    stage.eject("d0")
    assert stage.tick(5.0) == ["canary d0"], "after quiet minutes it is the first one again"


@pytest.mark.parametrize("ejections", [1, 2, 3, 6])
def test_canaries_go_on_every_15_s_and_who_is_well_is_back_within_30_s(ejections: int) -> None:
    for well_after in (0.0, 1.0, 7.0, 14.5, 40.0, 100.0):
        stage = Stage()
        for _ in range(ejections - 1):
            stage.eject("d0")
            while stage["d0"].ejected:
                if stage.tick():
                    stage.canary("d0", CanaryResult.ANSWERED)
            stage.tick(ou.TRIAL_S)
        stage.eject("d0")
        well_at, asked = stage.now + well_after, [stage.now]
        while stage["d0"].ejected:
            assert stage.now < well_at + 30.0
            if stage.tick():
                asked.append(stage.now)
                well = stage.now >= well_at
                stage.canary("d0", CanaryResult.ANSWERED if well else CanaryResult.SILENT, answered=False)
        gaps = [b - a for a, b in pairwise(asked)]
        assert max(gaps) <= ou.CANARY_S + 1.0


def test_on_trial_one_fault_is_enough_but_not_one_among_many_that_end_well() -> None:
    stage = Stage()
    stage.eject("d0")
    while stage["d0"].ejected:
        if stage.tick():
            stage.canary("d0", CanaryResult.ANSWERED)
    stage["d0"].well = 50
    stage.tick()
    assert stage.fault("d0", "rare") == []
    stage = Stage()
    stage.eject("d0")
    while stage["d0"].ejected:
        if stage.tick():
            stage.canary("d0", CanaryResult.ANSWERED)
    assert stage.fault("d0", "again") == ["eject d0"]


def test_a_restart_or_another_role_begins_with_a_clean_slate() -> None:
    stage = Stage()
    stage.fault("d0", "a")
    stage.fault("d0", "b")
    stage["d0"].incarnation = Incarnation("another")
    assert stage.fault("d0", "c") == []
    stage.fault("d0", "d")
    stage["d0"].role = Role.PREFILL
    assert stage.fault("d0", "e") == []


def test_a_canary_of_the_life_before_says_nothing() -> None:
    stage = Stage()
    stage.machine.on_suspected(stage.now, stage["d0"])
    stage.tick()
    stage["d0"].incarnation = Incarnation("another")
    assert stage.canary("d0", CanaryResult.SILENT) == []


def test_a_canary_that_nobody_reports_on_is_made_again() -> None:
    stage = Stage()
    stage.eject("d0")
    assert stage.tick(5.0) == ["canary d0"]
    assert stage.tick(ou.CANARY_LOST_S + 20.0) == ["canary d0"]


def test_a_failed_leg_counts_as_load_for_some_seconds() -> None:
    stage = Stage()
    for _ in range(3):
        stage.machine.on_failed(stage.now, stage["d0"])
    assert stage["d0"].failed == 3
    stage.tick(ou.LOAD_S)
    assert stage["d0"].failed == 3
    stage.tick()
    assert stage["d0"].failed == 0


def test_what_grows_is_bounded() -> None:
    stage = Stage(64)
    for i in range(2 * ou.MOST_FAILED):
        stage.machine.on_failed(stage.now, stage["d0"])
        stage["d0"].well = 100_000
        stage.fault("d0", i)
    conduct = stage.machine._conducts[InstanceName("d0")]
    assert (len(conduct.faults), len(conduct.failed)) == (ou.MOST_FAULTS, ou.MOST_FAILED)
    for one in stage.members:
        stage.machine.on_suspected(stage.now, one)
    assert len(stage.tick()) == ou.CANARIES_OPEN
    stage.members = stage.members[:2]
    stage.tick()
    assert len(stage.machine._conducts) <= 2


@pytest.mark.parametrize("seed", range(20))
def test_the_laws_hold_after_any_events(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(rng.randrange(1, 7), rng.randrange(1, 4))
    for _ in range(600):
        one = rng.choice(stage.members)
        match rng.randrange(8):
            case 0 | 1:
                stage.fault(one.name, rng.random())
            case 2:
                stage.machine.on_suspected(stage.now, one)
            case 3:
                one.well += rng.randrange(4)
            case 4:
                one.ejected_by = tuple(rng.sample(("r0", "r1", "r2"), rng.randrange(3)))
                stage.tick()
            case 5:
                one.suspended = rng.choice(("", "", "refused"))
                stage.tick()
            case 6:
                stage.canary(one.name, rng.choice(list(CanaryResult)), answered=rng.random() < 0.8)
            case _:
                stage.tick(rng.choice((0.1, 1.0, 20.0)))
        for role in Role:
            able = [m for m in stage.members if m.role is role and m.able]
            own = [m for m in able if m.ejected]
            if rng.random() < 0.2:
                stage.tick(0.1)
                own = [m for m in able if m.ejected]
                assert len(own) <= len(able) // 2, "more than half of a role is ejected"
            assert not able or len(own) < len(able) or stage.tick(0.1), "nobody of a role is picked for longer than a tick"


def test_a_bound_is_learned_from_first_bytes_and_grows_with_what_waits() -> None:
    times = FirstBytes()
    assert times.bound_s(0) == pytest.approx(40.96), "nothing is known: an engine may still compile"
    for _ in range(3):
        times.add(0.1, 100)
    assert times.bound_s(100) == FLOOR_S
    for _ in range(KEPT):
        times.add(2.0, 1000)
    assert times.bound_s(1000) == pytest.approx(8.0)
    assert times.bound_s(100_000) > 300.0
    assert times.usual_tokens == 1000
    for _ in range(KEPT):
        times.add(0.05, 1000)
    assert times.bound_s(1000) == FLOOR_S, "what was long ago is forgotten"


def test_one_slow_leg_among_many_does_not_make_the_bound() -> None:
    times = FirstBytes()
    for i in range(KEPT):
        times.add(3600.0 if i == 0 else 0.1, 100)
    assert times.bound_s(100) == FLOOR_S


def still(stage: Stage, name: str, seconds: float, turns: int = 7) -> list[str]:
    """Beats and ticks of so long, in which the core says the same."""
    said = []
    for _ in range(int(seconds)):
        one = stage[name]
        one.take_beat(stage.now, beat(name, interval_s=1.0, core=CoreSteps(turns, 20.0)))
        said += stage.tick()
    return said


def test_a_core_that_has_requests_and_does_not_step_is_stalled() -> None:
    stage = Stage()
    stage["d0"].work_since = 0.0
    assert still(stage, "d0", 20) == []
    assert still(stage, "d0", 4) == ["eject d0"]
    assert stage["d0"].hung
    assert stage["d0"].ejected.startswith("stalled: its core has requests and has not stepped for 2")
    assert stage["d0"].stalled_s > 20.0


def test_a_core_that_steps_or_has_no_requests_or_gives_bytes_is_not_stalled() -> None:
    stage = Stage()
    assert still(stage, "d0", 200) == [], "it has no requests"
    stage["d0"].work_since = stage.now
    assert still(stage, "d0", 19) == [], "it has them since then alone"
    assert still(stage, "d0", 1, turns=8) == []
    assert still(stage, "d0", 19, turns=8) == []
    stage["d0"].heard_at = stage.now
    assert still(stage, "d0", 19, turns=8) == []


def test_a_core_of_which_nothing_is_known_is_not_stalled() -> None:
    stage = Stage()
    stage["d0"].work_since = 0.0
    for _ in range(100):
        stage["d0"].take_beat(stage.now, beat("d0", interval_s=1.0))
        assert stage.tick() == []


def test_an_agent_that_says_nothing_for_long_says_nothing_of_the_core() -> None:
    stage = Stage()
    stage["d0"].work_since = 0.0
    assert still(stage, "d0", 10) == []
    stage.tick(300.0)
    assert still(stage, "d0", 2) == [], "the time without beats proves nothing"


def test_an_only_instance_that_is_stalled_is_shown_and_stays() -> None:
    stage = Stage(decodes=1)
    stage["d0"].work_since = 0.0
    assert still(stage, "d0", 60) == []
    assert stage["d0"].stalled_s > 20.0
    assert still(stage, "d0", 2, turns=8) == []
    assert stage["d0"].stalled_s == 0.0


def test_of_who_is_ejected_already_a_stall_says_that_it_hangs() -> None:
    stage = Stage()
    stage["d0"].work_since = 0.0
    stage.eject("d0")
    assert "hung d0" in still(stage, "d0", 24)
