"""Whether two samples are of one distribution: the chi-square test of two samples of categories, in plain Python.

    p_of({"a": 10, "b": 12}, {"a": 9, "b": 14})       the chance of a difference at least as great, were they of one

    χ² = Σ over samples and categories of (found - expected)² / expected,  with (categories - 1) degrees of freedom
    p  = Q(df / 2, χ² / 2), the regularized upper incomplete gamma function (Abramowitz and Stegun 6.5, 26.4)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Final

LEAST: Final = 5.0
"""Categories of which fewer are expected in either sample are taken together (Cochran's rule)."""
_ENOUGH: Final = 1e-15
_MOST: Final = 10_000


def p_of(first: Mapping[Hashable, int], second: Mapping[Hashable, int]) -> float:
    """The p value; 1.0 where there is nothing to compare."""
    sums = (sum(first.values()), sum(second.values()))
    if not all(sums):
        return 1.0
    kept: list[tuple[int, int]] = []
    rest = [0, 0]
    for category in first.keys() | second.keys():
        pair = (first.get(category, 0), second.get(category, 0))
        if sum(pair) * min(sums) / sum(sums) >= LEAST:
            kept.append(pair)
        else:
            rest = [rest[0] + pair[0], rest[1] + pair[1]]
    if sum(rest) * min(sums) / sum(sums) >= LEAST:
        kept.append((rest[0], rest[1]))
    if len(kept) < 2:
        return 1.0
    totals = [sum(pair[at] for pair in kept) for at in (0, 1)]
    value = 0.0
    for pair in kept:
        for found, total in zip(pair, totals, strict=True):
            expected = sum(pair) * total / sum(totals)
            value += (found - expected) ** 2 / expected
    return upper_gamma((len(kept) - 1) / 2, value / 2)


def upper_gamma(a: float, x: float) -> float:
    """Q(a, x), for a above 0."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:  # 1 - P, by the series of P
        term = total = 1 / a
        for n in range(1, _MOST):
            term *= x / (a + n)
            total += term
            if term < total * _ENOUGH:
                break
        return max(0.0, 1 - scale * total)
    below = 1e-300  # Lentz's continued fraction
    b = x + 1 - a
    c, d = 1 / below, 1 / b
    h = d
    for n in range(1, _MOST):
        an = -n * (n - a)
        b += 2
        d = 1 / (an * d + b or below)
        c = b + an / c or below
        step = d * c
        h *= step
        if abs(step - 1) < _ENOUGH:
            break
    return scale * h
