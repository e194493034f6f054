"""random: any of them, all with the same chance. Needs no state, so several routers never fall into step."""

from __future__ import annotations

from xpyd_sidecar.router.balance.draw import Draw
from xpyd_sidecar.router.balance.policies import NoOptions, Query, register


@register("random")
class RandomChoice:
    """Uniform."""

    holds = False

    def __init__(self, seed: int, _: NoOptions) -> None:
        self._draw = Draw(seed)

    def choose(self, query: Query) -> int:
        """Index of the drawn one."""
        return self._draw.below(len(query.candidates))
