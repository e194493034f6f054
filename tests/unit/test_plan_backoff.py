from __future__ import annotations

from xpyd_operator.plan import backoff


def test_delays_double_up_to_a_minute() -> None:
    assert [backoff.delay_s(n) for n in (0, 1, 2, 3, 6, 7, 8, 10_000)] == [0, 1, 2, 4, 32, 60, 60, 60]


def test_a_healthy_run_starts_the_row_anew() -> None:
    assert backoff.count_crash(7, 299.9) == 8
    assert backoff.count_crash(7, 300.0) == 1


def test_a_process_alive_for_long_has_no_crashes_left() -> None:
    assert backoff.crashes_in_a_row(3, 299.0) == 3
    assert backoff.crashes_in_a_row(3, 300.0) == 0
    assert backoff.crashes_in_a_row(3, None) == 3


def test_due_after_the_delay_and_at_once_if_the_clock_went_back() -> None:
    assert backoff.due(2, 100.0, 100.5) == 102.0
    assert backoff.due(2, 5000.0, 100.0) == 100.0
