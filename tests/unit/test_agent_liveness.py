"""When an engine that stands still is to be restarted: looks and words of routers by hand, then any of them at all."""

from __future__ import annotations

import itertools

import pytest
from agent_fakes import record_of
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.agent.beat import SLOW_LOOKS, KnownRouter, ProbeResult
from xpyd_sidecar.agent.liveness import LOOK_MOST_S, Liveness
from xpyd_sidecar.contract.core_steps import CoreSteps
from xpyd_sidecar.contract.liveness import STACKS_SIGNAL, RestartWish, catches

FRESH_S = 6.0
STARTUP_S = 600.0
PATIENCE_S = 20.0


class Stage:
    """An engine that is looked at once a second."""

    def __init__(self, *, server: bool = True) -> None:
        self.one = Liveness(STARTUP_S, FRESH_S, server=server)
        self.now = 1000.0
        self.health, self.incarnation = "up", "a" * 32
        self.turns: int | None = 100
        self.patience_s = PATIENCE_S
        self.stalled = self.hold = False
        self.heard = True
        self.serves, self.draining = True, False
        self.answered = False

    def look(self, passed: float = 1.0) -> RestartWish:
        self.now += passed
        records = (record_of(self.incarnation),) if self.incarnation else ()
        core = None if self.turns is None or self.health == "unmade" else CoreSteps(self.turns, self.patience_s)
        look = ProbeResult(self.health, "GET /health: refused", records, core=core,
                    answered=self.answered)  # type: ignore[arg-type]
        router = KnownRouter("r", "r0", heard=self.now if self.heard else self.now - 2 * FRESH_S, stalled=self.stalled,
                             hold=self.hold)
        self.one.on_probe(self.now, look, (router,), serves=self.serves, draining=self.draining)
        return self.one.restart

    def looks(self, seconds: int) -> list[RestartWish]:
        """What each said, once for those that follow each other."""
        return [said for said, _ in itertools.groupby(self.look() for _ in range(seconds))]

    def hangs(self) -> None:
        """From now on, until it is to be restarted."""
        self.stalled = True
        assert self.looks(40) == [RestartWish.NONE, RestartWish.WANTED, RestartWish.BEGUN]
        assert "has not stepped for" in self.one.problem


def test_a_core_that_has_requests_and_does_not_step_is_restarted() -> None:
    stage = Stage()
    stage.stalled = True
    assert stage.looks(int(PATIENCE_S) + 1) == [RestartWish.NONE]
    assert stage.look() is RestartWish.WANTED
    assert stage.one.problem == "", "routers must hear of it first"
    assert stage.looks(int(FRESH_S)) == [RestartWish.WANTED, RestartWish.BEGUN]
    assert stage.one.problem == "its core has requests and has not stepped for 27 s"


def test_a_first_compilation_is_given_its_time() -> None:
    stage = Stage()
    stage.stalled, stage.patience_s = True, 300.0
    assert stage.looks(300) == [RestartWish.NONE]


def test_a_core_of_which_no_router_says_that_it_waits_is_idle() -> None:
    stage = Stage()
    assert stage.looks(3600) == [RestartWish.NONE]


def test_a_router_that_is_not_heard_says_nothing() -> None:
    stage = Stage()
    stage.stalled, stage.heard = True, False
    assert stage.looks(3600) == [RestartWish.NONE]


def test_its_requests_may_be_moved_or_given_up_once_it_is_known_to_stand_still() -> None:
    stage = Stage()
    stage.stalled = True
    stage.looks(22)
    stage.stalled = False
    assert stage.looks(20) == [RestartWish.WANTED, RestartWish.BEGUN]


@pytest.mark.parametrize("at", [21, 24, 60])
def test_one_step_takes_everything_back(at: int) -> None:
    stage = Stage()
    stage.stalled = True
    stage.looks(at)
    stage.stalled, stage.turns = False, 101
    assert stage.look() is RestartWish.NONE
    assert stage.one.problem == stage.one.reason == ""
    assert stage.looks(600) == [RestartWish.NONE], "words of before are no longer said"


def test_what_nobody_looked_at_did_not_stand_still() -> None:
    stage = Stage()
    stage.stalled = True
    stage.looks(10)
    stage.look(3600.0)
    assert stage.looks(int(PATIENCE_S - 10 - LOOK_MOST_S)) == [RestartWish.NONE], "this process stood still itself"
    for health, turns in (("unmade", 100), ("up", None)):
        stage.looks(5)
        stage.health, stage.turns = health, turns
        assert stage.look() is RestartWish.NONE
        stage.health, stage.turns = "up", 100
        assert stage.looks(20) == [RestartWish.NONE]


def test_a_router_that_holds_it_is_waited_for() -> None:
    stage = Stage()
    stage.stalled = stage.hold = True
    assert stage.looks(400) == [RestartWish.NONE, RestartWish.WANTED]
    assert stage.one.problem == ""
    stage.hold = False
    assert stage.looks(10) == [RestartWish.WANTED, RestartWish.BEGUN]
    stage.hold = True
    assert stage.look() is RestartWish.WANTED
    assert stage.one.problem == "", "whoever counts begins anew"


def test_an_engine_that_drains_goes_by_itself() -> None:
    stage = Stage()
    stage.stalled = stage.draining = True
    assert stage.looks(600) == [RestartWish.NONE]


def test_it_is_told_until_the_next_one_serves_and_that_one_is_not_judged_by_it() -> None:
    stage = Stage()
    stage.hangs()
    stage.draining = True  # the hook of a container that is being ended
    assert stage.looks(10) == [RestartWish.BEGUN]
    stage.health, stage.turns, stage.serves = "down", None, False
    assert stage.looks(5) == [RestartWish.BEGUN]
    stage.incarnation, stage.draining = "", False
    assert stage.looks(30) == [RestartWish.BEGUN]
    assert stage.one.problem == ""
    stage.incarnation, stage.health, stage.turns = "b" * 32, "up", 0
    assert stage.look() is RestartWish.BEGUN
    stage.serves = True
    assert stage.look() is RestartWish.NONE
    stage.stalled = False
    assert stage.looks(60) == [RestartWish.NONE]


@pytest.mark.parametrize("every", [0, 50])
def test_one_that_does_not_come_back_holds_nobody_up_for_ever(every: int) -> None:
    """``every``: seconds after which another life of it ends; 0: none begins."""
    stage = Stage(server=False)
    stage.hangs()
    stage.incarnation, stage.health, stage.turns, stage.serves, stage.stalled = "", "down", None, False, False
    for second in range(int(STARTUP_S)):
        stage.incarnation = f"{second // every:032x}" if every else ""
        assert stage.look() is RestartWish.BEGUN
    assert stage.looks(30)[-1] is RestartWish.NONE


def test_one_that_does_not_come_back_has_its_time_to_start_and_is_restarted_again() -> None:
    stage = Stage()
    stage.hangs()
    stage.incarnation, stage.health, stage.turns, stage.serves, stage.stalled = "", "down", None, False, False
    assert stage.looks(int(STARTUP_S)) == [RestartWish.BEGUN]
    assert stage.one.problem == ""
    assert stage.looks(20)[-2:] == [RestartWish.WANTED, RestartWish.BEGUN]
    assert stage.one.problem.startswith("it is not up 600 s")


def test_one_that_nobody_ends_holds_nobody_up_for_ever_and_is_to_be_ended_still() -> None:
    stage = Stage()
    stage.hangs()
    assert stage.looks(int(STARTUP_S) + 10) == [RestartWish.BEGUN, RestartWish.NONE]
    assert stage.one.problem


@pytest.mark.parametrize(("health", "looks"), [("down", 1), ("slow", SLOW_LOOKS)])
def test_a_server_that_was_up_and_is_silent_is_restarted(health: str, looks: int) -> None:
    stage = Stage()
    assert stage.looks(3) == [RestartWish.NONE]
    stage.health = health
    assert [stage.look() for _ in range(looks)][-1] is RestartWish.WANTED
    assert stage.looks(10) == [RestartWish.WANTED, RestartWish.BEGUN]
    assert stage.one.problem == "it was up and does not answer any more (GET /health: refused)"
    stage.health = "up"
    assert stage.look() is RestartWish.NONE


def test_a_server_that_is_slow_with_all_but_its_health_check_is_not_silent() -> None:
    stage = Stage()
    stage.looks(3)
    stage.health, stage.answered = "slow", True
    assert stage.looks(600) == [RestartWish.NONE]
    stage.answered = False
    assert stage.looks(20) == [RestartWish.NONE, RestartWish.WANTED, RestartWish.BEGUN]


def test_a_server_has_its_time_to_start() -> None:
    stage = Stage()
    stage.health, stage.turns, stage.incarnation, stage.serves = "down", None, "", False
    assert stage.looks(int(STARTUP_S)) == [RestartWish.NONE]
    assert stage.looks(20) == [RestartWish.NONE, RestartWish.WANTED, RestartWish.BEGUN]
    assert stage.one.problem.startswith("it is not up 600 s after its beginning")


def test_the_server_of_a_group_is_judged_by_the_group() -> None:
    stage = Stage(server=False)
    stage.looks(3)
    stage.health = "down"
    assert stage.looks(60) == [RestartWish.NONE]


def test_stacks_are_written_once_for_each_time_that_it_stands_still() -> None:
    stage = Stage()
    assert not stage.one.stacks()
    stage.hangs()
    assert [stage.one.stacks() for _ in range(3)] == [True, False, False]
    stage.turns = 101
    stage.look()
    assert not stage.one.stacks()
    stage.hangs()
    assert stage.one.stacks()


def test_who_catches_a_signal_is_told_by_the_kernel() -> None:
    assert catches(f"Name:\tx\nSigIgn:\t{1 << (STACKS_SIGNAL - 1):016x}\nSigCgt:\t{1 << (STACKS_SIGNAL - 1):016x}\n",
                   STACKS_SIGNAL)
    assert not catches(f"SigBlk:\t{(1 << 64) - 1:016x}\nSigCgt:\t{((1 << 64) - 1) ^ 1 << (STACKS_SIGNAL - 1):016x}\n",
                       STACKS_SIGNAL)
    assert not catches("Name:\tx\n", STACKS_SIGNAL)


Step = tuple[float, str, bool, bool, bool, bool, bool]
STEPS = st.lists(st.tuples(
    st.sampled_from([0.5, 1.0, 3.0, 12.0, 100.0]), st.sampled_from(["up", "up", "up", "slow", "down", "unmade"]),
    st.sampled_from([False] * 9 + [True]), st.booleans(), st.sampled_from([False] * 3 + [True]),
    st.sampled_from([True] * 3 + [False]), st.sampled_from([False] * 5 + [True])), min_size=1, max_size=120)


@given(STEPS, st.booleans())
def test_the_laws_hold_after_any_looks(steps: list[Step], server: bool) -> None:
    """Against a history that is read anew each time, without the machine's own counts."""
    stage, history = Stage(server=server), []
    for passed, health, turned, stalled, hold, heard, draining in steps:
        stage.health, stage.stalled, stage.hold, stage.heard, stage.draining = health, stalled, hold, heard, draining
        assert stage.turns is not None
        stage.turns += turned
        before = stage.one.restart
        after = stage.look(passed)
        history.append((passed, health, turned, stalled and heard))
        if heard and hold:
            assert not stage.one.problem, "5: a router that is heard holds it"
        if draining and before is not RestartWish.BEGUN:
            assert not stage.one.problem, "5: it goes by itself"
        still, accused = 0.0, False
        for ago, (seconds, how, moved, said) in enumerate(reversed(history)):
            if how == "unmade" or moved or ago == len(history) - 1:
                break
            still += min(seconds, LOOK_MOST_S)
            accused = accused or said
        silent = server and health in ("slow", "down")
        if stage.one.reason and not silent:
            assert still > PATIENCE_S, "1, 2: seen for longer than its patience"
            assert accused, "1: a router waited meanwhile"
        if (turned and health == "up") or (health == "unmade"):
            assert after is RestartWish.NONE, "3: one turn"
            assert not stage.one.problem
        if silent and not any(how == "up" for _, how, _, _ in history) and not (still > PATIENCE_S and accused):
            assert not stage.one.reason or stage.now - 1000.0 > STARTUP_S, "4: its time to start"
