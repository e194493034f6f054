"""Every state of a group's rounds within small bounds; larger ones are explored by ``campaign-groups``."""

import random

import pytest
from group_model import Bounds, Broken, explore, walk

BROKEN: dict[Broken, tuple[str, int, set[str]]] = {
    "no promise": ("a life begins while an engine runs", 2, {"late", "pod"}),
    "no turn": ("a life begins while an engine runs", 1, {"agent"}),
    "begun twice": ("a life begins twice", 1, {"launcher"}),
    "ready without all": ("ready with a hole", 0, set()),
}
"""What is found, and the faults that it takes."""


@pytest.mark.parametrize("bounds", [Bounds(2, 0), Bounds(2, 1), Bounds(3, 0)], ids=["two", "two, a fault", "three"])
def test_no_state_has_two_lives_or_serves_with_a_hole_or_is_stuck(bounds: Bounds) -> None:
    found = explore(bounds)
    print(f"{bounds}: {found.states} states, {found.transitions} transitions")
    assert found.verdict == "ok", found.trace
    assert found.states > 200


@pytest.mark.parametrize("broken", BROKEN)
def test_without_one_rule_it_goes_wrong(broken: Broken) -> None:
    wanted, faults, kinds = BROKEN[broken]
    found = explore(Bounds(2, faults, broken, frozenset(kinds)), check_every=10**9)
    print(f"{broken}: {found.verdict} after {' > '.join(found.trace)}")
    assert found.verdict == wanted


@pytest.mark.parametrize("size", [2, 3])
def test_random_ways_with_many_faults_end_with_a_group_that_serves(size: int) -> None:
    rng = random.Random(size)
    found = [walk(Bounds(size, faults=6), rng) for _ in range(15)]
    assert {one.verdict for one in found} == {"ok"}, next(one.trace for one in found if one.verdict != "ok")
