"""How the benchmark of the hand-over makes figures of what was seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import load

from xpyd_sidecar.contract.timeline import Event

figures = load(Path(__file__).parents[2] / "lab" / "bench" / "handover" / "figures.py")
STEPS = [Event("p", "prefill forward", 0.0, 0.4), Event("p", "prefill forward", 0.4, 0.6),
         Event("d", "first decode forward", 1.05, 0.01)]


def test_a_hand_over_is_from_prefills_last_forward_to_decodes_first() -> None:
    assert figures.handover(STEPS) == pytest.approx(0.05)


def test_decodes_other_forwards_in_between_count_only_as_far_as_they_are_in_between() -> None:
    others = [Event("d", "forward of others", 0.99, 0.02), Event("d", "forward of others", 1.02, 0.01),
              Event("d", "forward of others", 0.5, 0.1)]
    assert figures.handover([*STEPS, *others]) == pytest.approx(0.05 - 0.01 - 0.01)


@pytest.mark.parametrize("missing", [slice(0, 2), slice(2, 3)])
def test_without_one_of_the_two_there_is_none(missing: slice) -> None:
    left = list(STEPS)
    del left[missing]
    assert figures.handover(left) is None


def test_the_last_kv_may_be_there_before_prefill_has_ended() -> None:
    early = [*STEPS[:2], Event("p", "push", 0.3, 0.1), Event("p", "push", 0.9, 0.02),
             Event("d", "first decode forward", 0.97, 0.01), Event("d", "forward of others", 0.91, 0.02)]
    assert figures.handover(early) == pytest.approx(-0.03)
    assert figures.last_kv(early) == pytest.approx(0.07 - 0.02)
    assert figures.last_kv(STEPS) is None


def test_ratios_are_taken_within_a_round() -> None:
    assert figures.ratios([2.0, 30.0, 4.0], [1.0, 10.0, 1.0])["median"] == 3.0


def test_the_interval_of_a_median_narrows_with_the_rounds_and_holds_it() -> None:
    few = [0.9, 1.0, 1.1, 1.2, 0.8]
    narrow, wide = figures.interval(few * 20), figures.interval(few)
    assert wide[0] <= narrow[0] <= 1.0 <= narrow[1] <= wide[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]
    assert figures.interval(few) == wide
    assert figures.interval([2.0], [4.0]) == [0.5, 0.5]
