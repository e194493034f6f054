import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.dp.look_ahead import LookAhead


@pytest.mark.parametrize(("budget", "run", "steps"), [
    (1, 0, 0), (1, 1000, 0), (2, 0, 1), (2, 1000, 1), (100, 0, 1), (100, 7, 1), (100, 8, 2), (100, 1000, 4),
    (4, 1000, 3)])
def test_a_rank_asks_for_what_its_requests_can_use(budget: int, run: int, steps: int) -> None:
    assert LookAhead().steps(budget, run) == steps


def test_the_literal_number_is_an_option() -> None:
    assert LookAhead(24).steps(1, 0) == 24


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_nothing_beyond_the_budget_is_asked_for(budget: int, run: int) -> None:
    assert LookAhead().steps(budget, run) <= min(4, budget - 1)


@given(st.integers(1, 2000))
def test_an_early_end_wastes_at_most_a_fifth_and_one(run: int) -> None:
    asked = LookAhead().steps(10_000, run)
    assert asked <= max(1, run / 4)
