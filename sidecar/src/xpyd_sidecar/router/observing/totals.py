"""Counters since the start, for who asks now and then and wants to know what happened in between (``contract.totals``).

Prompts are counted twice: by their size when a request comes, so that a change of traffic shows at once, and by their
tokens when it ends. Requests whose answer's tokens the router does not follow are unmeasured.
"""

from __future__ import annotations

from msgspec.structs import replace

from xpyd_sidecar.contract.totals import Totals, add_buckets
from xpyd_sidecar.router.observing.batch import Batch


class Counting:
    """Of one router."""

    def __init__(self, since: float) -> None:
        self._totals = Totals(since=since)

    def opened(self, tokens: int, requests: int = 1) -> None:
        """Requests came, whose prompts have about so many tokens together."""
        self._add(arrivals=requests, arrived_tokens=tokens)

    def closed(self, batch: Batch) -> None:
        """Requests are over."""
        prompts = [prompt for prompt, _, _ in batch.measured]
        self._add(measured=len(prompts), prompt_tokens=sum(prompts), prompt_squares=sum(prompt ** 2 for prompt in prompts),
                  measured_size=sum(size for _, size, _ in batch.measured),
                  output_tokens=sum(output for _, _, output in batch.measured),
                  handovers=len(batch.handover), handover_s=sum(batch.handover))
        add_buckets(self._totals.ttft, batch.ttft_buckets)
        add_buckets(self._totals.tpot, batch.tpot_buckets)

    def _add(self, **more: float) -> None:
        told = self._totals
        self._totals = replace(told, **{name: getattr(told, name) + value for name, value in more.items()})

    def told(self) -> Totals:
        """As it is now."""
        told = self._totals
        return replace(told, handover_s=round(told.handover_s, 6), ttft=dict(told.ttft), tpot=dict(told.tpot))
