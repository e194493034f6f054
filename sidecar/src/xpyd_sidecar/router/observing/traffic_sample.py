"""Times and sizes of the requests of the last hour, in bounded memory and without content. Pure: time is an argument.

Laws
  * At most ``MOST`` requests, 36 bytes each; the oldest make room. Nothing is thinned out: what is there is all that ended
    well within the time that it covers, so that a load played from it is the load that was.
  * Nothing older than ``HOUR_S`` is told.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from xpyd_sidecar.contract.ids import Role, ServiceName
from xpyd_sidecar.contract.sample import COLUMNS, HOUR_S, MOST, PackedSample, pack_numbers
from xpyd_sidecar.router.observing.record import Record


class TrafficSample:
    """Of one router. ``most``: requests that are kept."""

    def __init__(self, since: float, most: int = MOST) -> None:
        """``since``: seconds since 1970."""
        self._most = most
        self._since = since
        self._at = array("d")
        """Arrivals, seconds since 1970; a ring once it is full."""
        self._rest = array("f")
        """What else is known, ``COLUMNS`` for each."""
        self._next = 0
        """Where the next one goes, once it is full."""
        self._lost_at = -math.inf
        """When the last of those that made room arrived."""

    def __len__(self) -> int:
        """Requests that are kept."""
        return len(self._at)

    def add(self, records: Iterable[Record]) -> None:
        """Requests are over; those that did not end well are left out."""
        for record in records:
            if record.outcome != "ok":
                continue
            row = _row(record)
            if len(self._at) < self._most:
                self._at.append(record.arrived_unix)
                self._rest.extend(row)
                continue
            place = self._next
            self._lost_at = max(self._lost_at, self._at[place])
            self._at[place] = record.arrived_unix
            self._rest[place * COLUMNS:(place + 1) * COLUMNS] = array("f", row)
            self._next = (place + 1) % self._most

    def pack(self, service: ServiceName, now: float) -> PackedSample:
        """The sample as it is now, packed. ``now``: seconds since 1970."""
        begins = max(now - HOUR_S, self._since, self._lost_at)
        return PackedSample(service, begins, now, pack_numbers(self._at), pack_numbers(self._rest))


def _row(record: Record) -> tuple[float, ...]:
    total, ttft, _ = record.measures()
    handovers = record.handovers()
    prefill = next((leg.ended - leg.opened for leg in reversed(record.legs)
                    if leg.role is Role.PREFILL and leg.result == "2xx"), -1.0) if handovers else -1.0
    prompt = record.prompt_tokens if record.prompt_tokens >= 0 else record.prompt_size
    return (prompt, record.tokens, -1.0 if ttft is None else ttft, total, record.queued_s, prefill,
            handovers[-1][2] if handovers else -1.0)
