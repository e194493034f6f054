"""The floor that would have saved an hour, and its price."""

from __future__ import annotations

import msgspec

from xpyd_operator.plan.planner import hindsight
from xpyd_operator.plan.planner.hindsight import Floor, Interval

CALM = Interval(60.0, 100, late=False, needed=(2, 1), ready=(2, 1), wanted=(2, 1))
SPIKE = msgspec.structs.replace(CALM, arrivals=400, late=True, needed=(6, 1))
RANGES = ((1, 10), (1, 10))


def test_the_floor_is_what_was_needed_and_its_price_what_it_adds_to_the_hour() -> None:
    assert hindsight.floor((CALM,) * 57 + (SPIKE,) * 3, RANGES) == Floor(0, 6, 1200, 4.0)


def test_a_floor_is_no_higher_than_the_bounds() -> None:
    found = hindsight.floor((CALM,) * 57 + (SPIKE,) * 3, ((1, 4), (1, 10)))
    assert found is not None
    assert found.count == 4
    assert hindsight.floor((CALM,) * 57 + (SPIKE,) * 3, ((4, 4), (1, 10))) is None, "nothing is to choose"


def test_little_and_what_instances_would_not_have_helped_are_not_told() -> None:
    few = msgspec.structs.replace(SPIKE, arrivals=9)
    assert hindsight.floor((CALM,) * 59 + (few,), RANGES) is None
    enough = msgspec.structs.replace(SPIKE, needed=(2, 1))
    assert hindsight.floor((CALM,) * 57 + (enough,) * 3, RANGES) is None
    in_time = msgspec.structs.replace(SPIKE, late=False)
    assert hindsight.floor((CALM,) * 57 + (in_time,) * 3, RANGES) is None
    assert hindsight.floor((), RANGES) is None


def test_an_hour_is_remembered_and_no_more() -> None:
    past: tuple[Interval, ...] = ()
    for _ in range(200):
        past = hindsight.append_interval(past, CALM)
    assert len(past) == 60
    quick = msgspec.structs.replace(CALM, over_s=1.0)
    for _ in range(2 * hindsight.MOST):
        past = hindsight.append_interval(past, quick)
    assert len(past) == hindsight.MOST
