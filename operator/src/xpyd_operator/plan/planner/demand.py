"""What is asked of both roles, from what arrives; what waits is a backlog apart.

Prefill and decode are a tandem: while prompts wait for prefill, decode writes less than what will be asked of it, and more
while that backlog drains. So decode's demand is the requests that arrive, times the mean answer of those that ended.
Where nothing waits, what decode writes may tell more (answers became longer); it is believed up to ``BELIEVED`` times what
arrives.
"""

from __future__ import annotations

import math

import msgspec

from xpyd_operator.plan.planner import worth
from xpyd_operator.plan.planner.capacity import NO_ROOM_S, Capacity
from xpyd_operator.plan.planner.figures import Figures
from xpyd_operator.plan.planner.forecast import Series

SHORTEST_S = 1e-6
"""A decode step that is shorter is no measurement."""
BELIEVED = 1.5
Rates = tuple[float, float]
"""Of prefill and of decode: prompt tokens a second, generated tokens a second."""


class Demand(msgspec.Struct, frozen=True):
    """What was asked for, and what waits. Tokens and tokens a second."""

    prompts: Series = Series()
    outputs: Series = Series()
    queued: int = 0
    """Requests that wait for prefill, as seen last."""
    backlog: Rates = (0.0, 0.0)
    """Prompt tokens that wait for prefill, and tokens that those are to get whose KV waits for room at decode."""
    looks: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Of each interval, the latest last."""

    def with_interval(self, figures: Figures, known: Capacity, ahead_s: float) -> Demand:
        """The demand after one more interval; ``known`` has learned from it already. Forecasts look ``ahead_s`` ahead."""
        rate = figures.arrivals / figures.over_s
        mean = figures.arrived_tokens / figures.arrivals if figures.arrivals else known.prompt
        read = figures.arrived_tokens / figures.over_s
        written = self._written(figures, known, rate * known.output)
        chance = math.sqrt(figures.arrivals) / figures.over_s
        return Demand(
            prompts=self.prompts.with_value(read, mean * chance * math.sqrt(1 + known.spread), figures.over_s, ahead_s),
            # Lengths of answers spread about as exponential ones: their squared variation is 1.
            outputs=self.outputs.with_value(written, known.output * chance * math.sqrt(2), figures.over_s, ahead_s),
            queued=figures.queued,
            backlog=(figures.queued * known.prompt, max(0.0, figures.parked - rate * NO_ROOM_S) * known.output),
            looks=(worth.append_demand(self.looks[0], read), worth.append_demand(self.looks[1], written)),
        )

    def _written(self, figures: Figures, known: Capacity, came: float) -> float:
        token_s = known.token(figures.decode.batch)
        now = figures.decode.running / token_s if token_s > SHORTEST_S else figures.output_tokens / figures.over_s
        if not known.output:
            return now
        waited = max(figures.queued, self.queued) > max(1, figures.prefill.ready)
        return came if waited else max(came, min(now, BELIEVED * came))

    @property
    def level(self) -> Rates:
        """The demand of the present, on prefill and on decode."""
        return self.prompts.now.level, self.outputs.now.level

    def forecast(self, seconds: float) -> Rates:
        """The demand ``seconds`` from now, tokens a second, reserve included."""
        return self.prompts.forecast(seconds), self.outputs.forecast(seconds)

    def grown_rates(self, steps: int, late_cost: float) -> Rates:
        """What the demand may rise to within ``steps`` intervals, tokens a second, for all that is worth keeping ready."""
        prompts, outputs = (worth.growth(looks, steps, late_cost) for looks in self.looks)
        return self.level[0] + prompts, self.level[1] + outputs
