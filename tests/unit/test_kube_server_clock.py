"""The API server's time, from headers in whole seconds and answers that take a while."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_operator.kube.client.server_clock import LONGEST_S, ServerClock

BEGAN = 1_790_000_000.0


class Stage:
    """This machine's time by hand, and a server that is ``ahead_s`` of it."""

    def __init__(self, ahead_s: float) -> None:
        self.now, self.ahead_s = BEGAN, ahead_s
        self.clock = ServerClock(lambda: self.now)

    def ask(self, there_s: float = 0.01, back_s: float = 0.01) -> None:
        asked = self.now
        self.now += there_s
        date = formatdate(int(self.now + self.ahead_s), usegmt=True)
        self.now += back_s
        self.clock.on_answer(date, asked)


def test_before_an_answer_and_between_clocks_that_agree_ours_is_the_servers() -> None:
    stage = Stage(0.0)
    assert stage.clock.time() == BEGAN
    for _ in range(50):
        stage.now += 0.37
        stage.ask()
    assert stage.clock.ahead_s == 0.0


@pytest.mark.parametrize("ahead_s", [-600.0, -60.0, -2.5, 2.5, 60.0, 600.0])
def test_a_clock_that_is_wrong_by_minutes_is_known_to_the_second_at_once_and_better_soon(ahead_s: float) -> None:
    stage = Stage(ahead_s)
    stage.ask()
    assert abs(stage.clock.ahead_s - ahead_s) <= 1.02
    for _ in range(200):
        stage.now += 0.37
        stage.ask()
    assert abs(stage.clock.ahead_s - ahead_s) < 0.1


def test_a_clock_that_is_set_is_followed() -> None:
    stage = Stage(60.0)
    for _ in range(20):
        stage.now += 0.37
        stage.ask()
    stage.ahead_s = 0.0
    stage.ask()
    assert stage.clock.ahead_s <= 1.02
    stage.now += 0.37
    stage.ask()
    assert abs(stage.clock.ahead_s) <= 1.02


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sun, 99 Nov 2026 18:35:29 GMT"])
def test_what_is_no_date_says_nothing(date: str | None) -> None:
    stage = Stage(60.0)
    stage.clock.on_answer(date, stage.now)
    assert stage.clock.ahead_s == 0.0


def test_an_answer_that_took_long_says_nothing() -> None:
    stage = Stage(60.0)
    stage.ask(LONGEST_S)
    assert stage.clock.ahead_s == 0.0


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(*[st.floats(0.0, 4.0)] * 3), min_size=1, max_size=40))
def test_it_is_never_wrong_by_more_than_a_second_and_an_answers_time(
        ahead_s: float, asked: list[tuple[float, float, float]]) -> None:
    stage, best = Stage(ahead_s), float("inf")
    for pause_s, there_s, back_s in asked:
        stage.now += pause_s
        stage.ask(there_s, back_s)
        best = min(best, 1.0 + there_s + back_s)
        assert abs(stage.clock.ahead_s - ahead_s) <= best + 1e-3
        assert abs(stage.clock.ahead_s) <= abs(ahead_s) + 1e-3, "it is not moved beyond what answers prove"
