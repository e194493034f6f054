"""How many steps beyond its next one a rank asks for.

A granted step is run by every rank, whether anybody has tokens for it or not. Asking for many saves announcements and,
when a request ends early, wastes forwards on all ranks. So a rank never promises more than its running requests can use,
and no more than a quarter of what it has run since it was idle: of every busy time, at most a fifth is wasted. Nor more
than 4: most answers end before their budget, anywhere in a lease, so that half of one is wasted; waves waste half of 16.

    asked = min(4, budget - 1, max(1, run / 4))        budget 1: 0
"""

from __future__ import annotations

from typing import Final, NamedTuple

CEILING: Final = 4
RAMP: Final = 4


class LookAhead(NamedTuple):
    """How a rank asks."""

    fixed: int | None = None
    """Always so many steps, whatever is left to do; None: by the formula above."""

    def steps(self, budget: int, run: int) -> int:
        """Steps to ask for beyond the one that begins.

        Args:
            budget: the most tokens that a running request may still make, this forward's included; at least 1.
            run: forwards begun since the rank was last idle.
        """
        if self.fixed is not None:
            return self.fixed
        return max(0, min(CEILING, budget - 1, max(1, run // RAMP)))
