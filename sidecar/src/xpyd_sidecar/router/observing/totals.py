"""Counters since the start, for who asks now and then and wants to know what happened in between (``contract.totals``).

Prompts are counted twice: by their size when a request comes, so that a change of traffic shows at once, and by their
tokens when it ends. Requests whose answer's tokens the router does not follow are unmeasured.
"""

from __future__ import annotations

from xpyd_sidecar.contract.totals import Buckets, Totals, add_buckets
from xpyd_sidecar.router.observing.batch import Batch


class Counting:
    """Of one router."""

    def __init__(self, since: float) -> None:
        self._since = since
        self._arrivals = self._arrived_tokens = self._measured = 0
        self._prompts = self._sizes = self._squares = self._outputs = self._handovers = 0
        self._handover_s = 0.0
        self._ttft: Buckets = {}
        self._tpot: Buckets = {}

    def opened(self, tokens: int, requests: int = 1) -> None:
        """Requests came, whose prompts have about so many tokens together."""
        self._arrivals += requests
        self._arrived_tokens += tokens

    def closed(self, batch: Batch) -> None:
        """Requests are over."""
        for prompt, size, output in batch.measured:
            self._measured += 1
            self._prompts += prompt
            self._sizes += size
            self._squares += prompt * prompt
            self._outputs += output
        add_buckets(self._ttft, batch.ttft_buckets)
        add_buckets(self._tpot, batch.tpot_buckets)
        self._handovers += len(batch.handover)
        self._handover_s += sum(batch.handover)

    def told(self) -> Totals:
        """As it is now."""
        return Totals(
            since=self._since, arrivals=self._arrivals, arrived_tokens=self._arrived_tokens, measured=self._measured,
            prompt_tokens=self._prompts, measured_size=self._sizes,
            prompt_squares=self._squares, output_tokens=self._outputs,
            handovers=self._handovers, handover_s=round(self._handover_s, 6), ttft=dict(self._ttft), tpot=dict(self._tpot),
        )
