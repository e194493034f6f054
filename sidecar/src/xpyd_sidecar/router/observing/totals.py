"""Counters since the start, for who asks now and then and wants to know what happened in between (``contract.totals``).

Prompts are counted twice: by their size when a request comes, so that a change of traffic shows at once, and by their
tokens when it ends. Requests whose answer's tokens the router does not follow are unmeasured.
"""

from __future__ import annotations

from xpyd_sidecar.contract.totals import Buckets, Totals, add_buckets, bucket_of
from xpyd_sidecar.router.observing.fast_record import Batch
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.observing.summary import Summary


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

    def closed(self, record: Record, told: Summary) -> None:
        """A request is over."""
        prompt, output = record.prompt_tokens, record.tokens
        if record.outcome == "ok" and prompt >= 0 and output >= 0:
            self._measured += 1
            self._prompts += prompt
            self._sizes += record.prompt_size
            self._squares += prompt * prompt
            self._outputs += output
        if told.ttft is not None:
            _count(self._ttft, told.ttft)
        if told.tpot is not None:
            _count(self._tpot, told.tpot)
        for handover in told.handovers:
            self._handovers += 1
            self._handover_s += handover.seconds

    def closed_straight(self, batch: Batch) -> None:
        """Requests that ended straightly: as ``closed`` of each."""
        for one in batch.those:
            prompt, output = one.prompt_tokens, one.tokens
            if prompt >= 0 and output >= 0:
                self._measured += 1
                self._prompts += prompt
                self._sizes += one.prompt_size
                self._squares += prompt * prompt
                self._outputs += output
        add_buckets(self._ttft, batch.ttft_buckets)
        add_buckets(self._tpot, batch.tpot_buckets)
        self._handovers += len(batch)
        self._handover_s += sum(batch.handover)

    def told(self) -> Totals:
        """As it is now."""
        return Totals(
            since=self._since, arrivals=self._arrivals, arrived_tokens=self._arrived_tokens, measured=self._measured,
            prompt_tokens=self._prompts, measured_size=self._sizes,
            prompt_squares=self._squares, output_tokens=self._outputs,
            handovers=self._handovers, handover_s=round(self._handover_s, 6), ttft=dict(self._ttft), tpot=dict(self._tpot),
        )


def _count(buckets: Buckets, seconds: float) -> None:
    bucket = bucket_of(seconds)
    buckets[bucket] = buckets.get(bucket, 0) + 1
