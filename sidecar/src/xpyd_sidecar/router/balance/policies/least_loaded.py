"""least_loaded: the least loaded of a few drawn at random."""

from __future__ import annotations

from typing import Annotated

import msgspec

from xpyd_sidecar.router.balance.draw import Draw
from xpyd_sidecar.router.balance.load import score
from xpyd_sidecar.router.balance.policies import Query, register


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its options."""

    choices: Annotated[int, msgspec.Meta(ge=2, le=16)] = 2
    """Instances that are compared."""


@register("least_loaded", Options)
class LeastLoaded:
    """Power of two choices (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).

    Taking the least loaded of all would send every router's next requests to the same instance until the next beat (a
    herd); two random ones keep the load almost as even without that. Ties go to the first drawn, which is random.
    """

    holds = False

    def __init__(self, seed: int, options: Options) -> None:
        self._draw = Draw(seed)
        self._more = options.choices - 2

    def choose(self, query: Query) -> int:
        """Index of the chosen one."""
        candidates = query.candidates
        n = len(candidates)
        if n == 1:
            return 0
        best, other = self._draw.two_below(n)
        if score(candidates[other]) < score(candidates[best]):
            best = other
        for _ in range(min(self._more, n - 2)):  # with repetition: a repeated one costs a choice, not its rightness
            other = self._draw.below(n)
            if score(candidates[other]) < score(candidates[best]):
                best = other
        return best
