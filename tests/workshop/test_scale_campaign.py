"""Parts of the campaign of scale steps add up, and go on where they were interrupted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from scripts import load

scale = load(Path(__file__).resolve().parents[2] / "lab/campaigns/scale.py")
real = scale.sys.modules["scale_real"]


def part(seed: int, **more: Any) -> dict[str, Any]:
    figures = dict.fromkeys(real.SUMS, 0) | {"steps": 3, "switches": 10, "requests": 40, "seconds": 12.5}
    return {"seed": seed, "examples": [], "near_ties": [], "idle_switch_s": [], **figures, **more}


def test_parts_add_up() -> None:
    found = real.together([part(1, idle_switch_s=[0.9, 1.2, 0.7]), part(2, failed=1, examples=["why"])])
    assert (found["steps"], found["switches"], found["requests"], found["failed"]) == (6, 20, 80, 1)
    assert (found["idle_switch_s_median"], found["idle_switch_s_max"]) == (0.9, 1.2)
    assert found["examples"] == ["why"]
    assert scale.missed({"real": found}) == ["real.failed"]
    assert scale.missed({"real": real.together([part(1)]), "groups": found}) == ["groups.failed"]
    assert scale.missed({"real": real.together([part(1, idle_switch_s=[2.5])])}) == ["real.idle_switch_s_median"]


def test_the_same_part_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parts with one seed: \[1, 1\]"):
        real.together([part(1), part(1)])


def test_what_is_left_is_what_no_part_did() -> None:
    parts = [part(1), part(2)]
    assert scale._left(parts, 60, 100) == (54, 80)
    assert scale._left(parts, 6, 20) == (0, 0)


@pytest.mark.parametrize("bounds", [real.ENGINES, real.GROUPS])
@pytest.mark.parametrize("seed", range(5))
def test_steps_and_switches_stay_within_what_one_machine_runs(seed: int, bounds: Any) -> None:
    dice, shape = random.Random(seed), bounds.first
    for _ in range(100):
        before, shape = shape, real.next_step(dice, shape, bounds.most)
        assert abs(shape[0] - before[0]) + abs(shape[1] - before[1]) == 1
        assert min(shape) >= 1
        assert sum(shape) <= bounds.most
        if sum(shape) > 2:
            before, shape = shape, real.next_switch(dice, shape)
            assert sum(shape) == sum(before)
            assert shape != before
            assert min(shape) >= 1
