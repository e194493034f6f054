"""Who is expected of a role that has nobody, and about when."""

from __future__ import annotations

import math
from typing import Any

import pytest
from beats import SERVICE, beat, bye

from xpyd_sidecar.contract.ids import Incarnation, Role, State
from xpyd_sidecar.contract.waking import WakeCall
from xpyd_sidecar.router.fleet.expected import RESUMES_S, RETURN_S, ExpectedInstances
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.fleet.standby import FRESH_S, Standby

LATER = 100.0
"""After the time in which agents that knew the router had come back."""


class Stage:
    """A roster whose time is told."""

    def __init__(self, now: float = LATER) -> None:
        self.roster = Roster(SERVICE, started=0.0, settle_s=8.0, missed_beats=3)
        self.expected = ExpectedInstances(self.roster)
        self.now = now
        self.seq = 0
        self.expected.update(now)

    def at(self, seconds: float) -> Stage:
        """So many seconds later."""
        self.now += seconds
        self.expected.update(self.now)
        return self

    def beat(self, name: str = "d0", role: Role = Role.DECODE, state: State = State.READY, **fields: Any) -> None:
        self.seq += 1
        self.roster.on_message(self.now, beat(name, role, seq=self.seq, state=state, interval_s=3.0, **fields))
        self.expected.update(self.now)

    def leave(self, name: str = "d0", **fields: Any) -> None:
        self.roster.on_message(self.now, bye(name, **fields))
        self.expected.update(self.now)

    def is_expected(self, role: Role = Role.DECODE) -> bool:
        return self.expected.expects(role, self.now)

    def soonest(self, role: Role = Role.DECODE) -> float:
        return self.expected.soonest_s(role, self.now)


def test_nobody_is_expected_where_nobody_is_known() -> None:
    stage = Stage()
    assert not stage.is_expected()
    assert stage.soonest() == math.inf


class ZeroStage(Stage):
    """Of a service that may have no instances."""

    def __init__(self) -> None:
        super().__init__()
        self.standby = Standby(enabled=True)
        self.expected = ExpectedInstances(self.roster, self.standby)

    def tell(self, wanted: int, **words: str) -> None:
        self.standby.on_call(WakeCall(wanted, **words), self.now)


def test_who_cannot_be_picked_though_it_runs_is_no_reason_to_wait_for_a_start() -> None:
    stage = ZeroStage()
    assert stage.is_expected()
    stage.beat(state=State.READY)
    assert not stage.is_expected(Role.PREFILL), "the operator starts nobody while somebody decodes"
    assert stage.standby.why_not(stage.now) == "", "it is not true that no instance runs"
    stage.leave()
    stage.at(RETURN_S + 1)
    assert stage.is_expected(), "nobody is there again"


def test_who_is_wanted_beside_one_that_runs_is_waited_for_as_long_as_the_operator_says_so() -> None:
    stage = ZeroStage()
    stage.beat(state=State.READY)
    stage.tell(1, waits="qwen-e1 waits for a node")
    assert stage.is_expected(Role.PREFILL)
    assert stage.standby.why_not(stage.now).endswith("qwen-e1 waits for a node")
    for _ in range(int(FRESH_S) + 1):
        stage.at(1.0)
        stage.beat(state=State.READY)
    assert not stage.is_expected(Role.PREFILL)


def test_a_refusal_is_over_when_somebody_decodes_and_not_repeated_after_it() -> None:
    stage = ZeroStage()
    stage.tell(1, refused="exceeded quota")
    assert not stage.is_expected()
    stage.beat(state=State.READY)
    stage.leave()
    stage.at(RETURN_S + 1)
    assert stage.is_expected()


def test_what_could_not_be_begun_is_not_called_started() -> None:
    stage = ZeroStage()
    stage.tell(0, waits="pools are forbidden")
    assert stage.standby.why_not(stage.now) == "no instance could be started yet: pools are forbidden"


def test_a_router_that_has_just_begun_expects_who_knew_it() -> None:
    stage = Stage(now=7.9)
    assert stage.is_expected()
    stage.at(0.1)
    assert not stage.is_expected(), "all of them had the time to beat"


def test_who_starts_is_expected_while_its_agent_beats() -> None:
    stage = Stage()
    stage.beat(state=State.STARTING)
    assert stage.is_expected()
    assert not stage.is_expected(Role.PREFILL), "it will not be prefill"
    stage.at(9.0)
    assert stage.is_expected(), "a few beats may be late"
    stage.at(0.1)
    assert not stage.is_expected(), "its agent is silent"
    stage.beat(state=State.STARTING)
    assert stage.is_expected()
    stage.leave()
    assert not stage.is_expected(), "it never took requests: nothing says that it comes back"


def test_who_cannot_be_reached_is_expected_for_a_while_or_until_it_starts() -> None:
    stage = Stage()
    stage.beat()
    stage.roster.on_refused(stage.now, "d0", "i-d0", "refused")  # type: ignore[arg-type]
    assert stage.is_expected(), "before anybody has looked"
    stage.at(0.0)
    assert stage.soonest() == RETURN_S
    stage.at(RETURN_S)
    stage.beat()
    assert not stage.is_expected(), "its agent calls it ready, and nobody knows whether it can be reached again"
    stage.beat(state=State.STARTING)
    assert stage.is_expected(), "its agent has seen it"


def test_who_is_ejected_is_expected_and_who_drains_is_not() -> None:
    stage = Stage()
    stage.beat()
    stage.beat(state=State.DRAINING)
    stage.at(RETURN_S)
    stage.beat(state=State.DRAINING)
    assert not stage.is_expected(), "who drains takes nothing new"
    stage.beat(incarnation=Incarnation("next"))
    stage.roster.on_verdict("d0", "next", "it fails")  # type: ignore[arg-type]
    stage.at(RETURN_S)
    stage.beat(incarnation=Incarnation("next"))
    assert stage.is_expected()
    assert stage.soonest() == RESUMES_S


@pytest.mark.parametrize("how", ["goodbye", "drain"])
def test_after_the_last_one_went_another_one_is_expected_for_a_while(how: str) -> None:
    stage = Stage()
    stage.beat("d0")
    stage.beat("d1")
    stage.leave("d1")
    stage.at(1.0)
    if how == "goodbye":
        stage.leave("d0")
    else:
        stage.beat("d0", state=State.DRAINING)
    assert stage.is_expected()
    stage.at(RETURN_S - 0.1)
    assert stage.is_expected()
    stage.at(0.1)
    assert not stage.is_expected()


def test_a_start_takes_as_long_as_the_one_before() -> None:
    stage = Stage()
    stage.beat(state=State.STARTING)
    stage.at(8.0)
    assert stage.soonest() == 8.0, "as long again, where nothing is known"
    stage.beat(state=State.STARTING)
    stage.at(8.0)
    stage.beat()
    stage.at(1.0)
    stage.beat(state=State.STARTING, incarnation=Incarnation("next"))
    assert stage.soonest() == 16.0
    stage.at(6.0)
    assert stage.soonest() == 10.0
    stage.beat("d1", state=State.STARTING)
    assert stage.soonest() == 10.0, "the soonest of all"
    for _ in range(5):
        stage.at(3.0)
        stage.beat(state=State.STARTING, incarnation=Incarnation("next"))
    assert stage.soonest() == pytest.approx(5.0), "who is late by so much is late by as much again"


def test_nothing_is_kept_of_who_is_gone() -> None:
    stage = Stage()
    for number in range(50):
        stage.beat(f"d{number}", state=State.STARTING)
        stage.leave(f"d{number}")
    assert not stage.expected._starting
