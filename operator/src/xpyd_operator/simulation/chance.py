"""Chance from a seed: the same numbers for the same seed, on every version of Python.

SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import math

_GAMMA, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Chance:
    """A stream of numbers."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed * 0xD1342543DE82EF95 & _MASK

    def random(self) -> float:
        """From 0 to below 1, evenly."""
        self._state = state = self._state + _GAMMA & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        return ((state ^ state >> 31) >> 11) / (1 << 53)

    def exponential(self, mean: float) -> float:
        """From 0 on."""
        return -mean * math.log(1 - self.random())

    def normal(self) -> float:
        """Around 0, with a deviation of 1 (Box and Muller 1958)."""
        return math.sqrt(self.exponential(2.0)) * math.cos(2 * math.pi * self.random())


def spread(number: int) -> float:
    """Evenly spread from 0 to 1, the same each time: multiples of the golden ratio, without their whole part."""
    return number * 0.6180339887498949 % 1.0
