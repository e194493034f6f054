"""Durations read what CEL's duration() reads."""

from __future__ import annotations

import re

import celpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_operator.api.base import DURATION_PATTERN
from xpyd_operator.api.durations import seconds

PARTS = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["h", "m", "s", "ms"])), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30s", 30), ("500ms", 0.5), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("0s", 0), ("1m1ms", 60.001), ("2m3m", 300)],
)
def test_seconds(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "30", "s", "-5s", "1 s", "5 minutes", "1d", "1s2", "1s\n", ".5s", "1e3s"])
def test_what_is_no_duration_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match="a number and a unit"):
        seconds(text)
    assert not re.fullmatch(DURATION_PATTERN, text)


@settings(deadline=None)
@given(PARTS)
def test_cel_reads_the_same(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert re.fullmatch(DURATION_PATTERN, text)
    assert celpy.celtypes.DurationType(text).total_seconds() == pytest.approx(seconds(text))
