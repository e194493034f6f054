"""What a supervisor makes of agents that say that their engines stand still."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xpyd_operator.local.hangs import END_S, GAP_S, Hangs, HangStep, HungEngine
from xpyd_operator.local.procs import Identity
from xpyd_sidecar.contract.ids import InstanceName

NAME = InstanceName("e0")


def engine(pid: int = 7) -> dict[InstanceName, HungEngine]:
    return {NAME: HungEngine(Identity(pid, 1, "boot"), "its core stands still")}


def looks(hangs: Hangs, began: float, seconds: int, pid: int = 7) -> list[tuple[int, HangStep]]:
    return [(second, step) for second in range(seconds)
            if (step := hangs.next_steps(began + second, engine(pid)).get(NAME)) is not None]


def test_stacks_come_first_and_the_end_when_a_probe_would_have_failed_for_good() -> None:
    assert END_S == 120
    assert looks(Hangs(), 0.0, 121) == [(0, HangStep.DUMP), (120, HangStep.END)]


def test_a_word_for_it_or_a_silent_agent_begins_anew() -> None:
    hangs = Hangs()
    assert looks(hangs, 0.0, 119) == [(0, HangStep.DUMP)]
    assert hangs.next_steps(119.0, {}) == {}
    assert looks(hangs, 120.0, 120) == [(0, HangStep.DUMP)]


def test_another_process_is_another_engine() -> None:
    hangs = Hangs()
    looks(hangs, 0.0, 119)
    assert looks(hangs, 119.0, 120, pid=8) == [(0, HangStep.DUMP)]


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.sampled_from([True] * 9 + [False])), max_size=200))
def test_nobody_is_ended_who_was_not_said_to_stand_still_all_that_time(said: list[tuple[float, bool]]) -> None:
    hangs, now, since, before = Hangs(), 0.0, None, 0.0
    for passed, hung in said:
        now += passed
        step = hangs.next_steps(now, engine() if hung else {}).get(NAME)
        since = None if not hung else now if since is None or now - before > GAP_S else since
        before = now
        if step is HangStep.END:
            assert since is not None
            assert now - since >= END_S
            since = None
        elif since is not None:
            assert now - since < END_S, "it is ended in time"
