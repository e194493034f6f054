"""What is known of requests that went their straight course, and the measures of many of them at a time.

Belongs here: the formulas of ``summary`` where prefill and decode answered well at once, which nearly all requests are; a
test holds both against each other. Does not belong here: counting.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId
from xpyd_sidecar.contract.totals import buckets_of
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.observing.record import LegRecord, Record

Pair = tuple[InstanceName, InstanceName]


class StraightRecord(msgspec.Struct, eq=False):
    """One request; times are those of ``Record``."""

    request_id: str
    transfer: TransferId
    api: Api
    prefill: InstanceName
    decode: InstanceName
    arrived: float
    arrived_unix: float
    opened: float
    """When both legs were sent."""
    prefilled: float
    begun: float
    ended: float
    """Decode's leg, and with it the request."""
    tokens: int
    prompt_tokens: int
    prompt_size: int
    sent: int
    """``Record.bytes``"""

    @property
    def ended_unix(self) -> float:
        """When it ended, on the clock of ``arrived_unix``."""
        return self.arrived_unix + self.ended - self.arrived

    def record(self) -> Record:
        """All of it, as of any request."""
        legs = [LegRecord(Role.PREFILL, self.prefill, 1, self.opened, self.prefilled, self.prefilled, "2xx"),
                LegRecord(Role.DECODE, self.decode, 1, self.opened, self.begun, self.ended, "2xx")]
        return Record(
            self.request_id, self.transfer, self.api, True, self.arrived, self.arrived_unix, "ok", 200, first_at=self.begun,
            last_at=self.ended, tokens=self.tokens, prompt_tokens=self.prompt_tokens, prompt_size=self.prompt_size,
            attempt=1, bytes=self.sent, legs=legs)


class Batch:
    """Several of them, of one API, by measure. Times are seconds."""

    def __init__(self, api: Api, those: Sequence[StraightRecord]) -> None:
        self.api = api
        self.those = those
        self.seconds = [one.ended - one.arrived for one in those]
        self.ttft = [one.begun - one.arrived for one in those]
        self.tpot = [max(0.0, one.ended - one.begun) / (one.tokens - 1) for one in those if one.tokens >= 2]
        self.handover = [max(0.0, one.begun - one.prefilled) for one in those]
        self.prefill = [one.prefilled - one.opened for one in those]
        self.decode = [one.ended - one.opened for one in those]
        self.tokens = sum([one.tokens for one in those if one.tokens > 0])
        self.bytes = sum([one.sent for one in those])
        self.seconds_buckets = buckets_of(self.seconds)
        self.ttft_buckets = buckets_of(self.ttft)
        self.tpot_buckets = buckets_of(self.tpot)
        self.handover_buckets = buckets_of(self.handover)
        self.pairs: dict[Pair, list[float]] = {}
        """Hand-overs by prefill and decode."""
        for one, seconds in zip(those, self.handover, strict=True):
            self.pairs.setdefault((one.prefill, one.decode), []).append(seconds)

    def __len__(self) -> int:
        """How many they are."""
        return len(self.those)
