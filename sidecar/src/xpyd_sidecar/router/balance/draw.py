"""Random numbers for policies: small, seeded, the same on every machine.

SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014): one addition and three
mixing steps a number. Good enough to choose instances; never used for keys.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


class Draw:
    """A stream of numbers that depends on nothing but its seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """64 random bits."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """A number in 0..n-1 (bias below n / 2**64)."""
        return (self.bits() * n) >> 64

    def two_below(self, n: int) -> tuple[int, int]:
        """Two different numbers in 0..n-1, for n of at least 2."""
        first = self.below(n)
        second = self.below(n - 1)
        return first, second + (second >= first)
