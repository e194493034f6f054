"""Kubernetes quantities."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from xpyd_operator.api.base import QUANTITY_PATTERN, SIZE_PATTERN
from xpyd_operator.api.quantity import size, value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", 2), (3, 3), ("500m", "0.5"), ("1k", 1000), ("2Gi", 2 * 1024**3), ("1.5Gi", 3 * 512 * 1024**2),
        ("1e3", 1000), ("2E2", 200), ("1E", 10**18), ("1Ei", 1024**6), ("0", 0), ("1Mi", 1024**2), ("1M", 10**6),
    ],
)  # fmt: skip
def test_value_is_exact(text: str | int, expected: int | str) -> None:
    assert value(text) == Decimal(expected)
    assert re.fullmatch(QUANTITY_PATTERN, str(text))


@pytest.mark.parametrize("text", ["", "Gi", "2GB", "2 Gi", "-1", "+1", "1e", "1i", "0x10", "1Gi\n", "1,5", "10%"])
def test_what_is_no_quantity_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"e\.g\. 500m, 2 or 16Gi"):
        value(text)
    assert not re.fullmatch(QUANTITY_PATTERN, text)


def test_size_is_whole_bytes_rounded_up() -> None:
    assert size("2Gi") == 2147483648
    assert size("1500m") == 2


@pytest.mark.parametrize("text", ["10%", "500m", "1e3", "1E"])
def test_a_size_in_bytes_knows_no_percent_and_no_milli(text: str) -> None:
    assert not re.fullmatch(SIZE_PATTERN, text)


@pytest.mark.parametrize("text", ["1", "0.5Gi", "00.05Gi", "10", "100.0M", "2Gi", "1.5Gi"])
def test_a_size_is_above_nothing(text: str) -> None:
    assert re.fullmatch(SIZE_PATTERN, text)
    assert size(text) > 0


@pytest.mark.parametrize("text", ["0", "0Gi", "0.0Gi", "00", "0.00"])
def test_no_bytes_are_no_size(text: str) -> None:
    assert not re.fullmatch(SIZE_PATTERN, text)
    assert size(text) == 0
