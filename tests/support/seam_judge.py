"""Whether streams that went on elsewhere have the distribution of streams that nothing happened to.

    judge(samples)   → Verdict: the p value of every test, and whether the worst one rejects

Of each stream a place is known where it was cut, or where it would have been: half of the streams are really cut there.
Over all streams, cut ones are compared with whole ones: the token at each position, and the pair (token before the
seam, token behind it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from chi_square import p_of

ALPHA: Final = 1e-6
"""Of all tests of a verdict together (Bonferroni)."""
OVER: Final = -1
"""Stands for the token at a position that an answer does not have."""


@dataclass(frozen=True)
class Sample:
    """One stream, as its client has it."""

    tokens: tuple[int, ...]
    seam: int | None
    """Tokens that had come when it was, or would have been, cut; None: it ended before that."""
    cut: bool


@dataclass(frozen=True)
class Verdict:
    """Of all streams."""

    p: dict[str, float]
    """Of each test."""

    @property
    def worst(self) -> tuple[str, float]:
        """The test with the least p value."""
        name = min(self.p, key=lambda one: self.p[one])
        return name, self.p[name]

    @property
    def rejects(self) -> bool:
        """Whether the two are not of one distribution."""
        return self.worst[1] < ALPHA / len(self.p)


def judge(samples: Iterable[Sample], positions: int) -> Verdict:
    """``positions``: most tokens of an answer."""
    cut: list[Sample] = []
    whole: list[Sample] = []
    for sample in samples:
        (cut if sample.cut else whole).append(sample)
    tests = {f"position {at}": p_of(*(Counter(_at(one.tokens, at) for one in group) for group in (cut, whole)))
             for at in range(positions)}
    tests["around the seam"] = p_of(*(Counter(_around(one) for one in group) for group in (cut, whole)))
    return Verdict(tests)


def _at(tokens: tuple[int, ...], at: int) -> int:
    return tokens[at] if at < len(tokens) else OVER


def _around(one: Sample) -> Hashable:
    if one.seam is None:
        return "it ended before"
    return _at(one.tokens, one.seam - 1) if one.seam else "it had not begun", _at(one.tokens, one.seam)
