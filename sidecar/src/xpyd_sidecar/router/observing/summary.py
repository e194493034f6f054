"""What the record of one request means in the field's measures: TTFT, TPOT, handover, pairs, failures.

    arrived ─── queued_s ───┬─ prefill leg ──▶ 2xx ┐
                            │                      ├─ handover ─▶ decode's first event ── tokens ──▶ end
                            └─ decode leg ─ waits ─┘
    ├──────────────────────── TTFT ──────────────────────────────┤├── TPOT * (tokens - 1) ─────────┤
"""

from __future__ import annotations

import math

import msgspec

from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.router.observing.record import Record

FAILED = frozenset({"failed", "broken", "timeout", "unavailable", "poison"})
"""Outcomes that the router or its engines are to blame for."""
_DONE = "2xx"


class Handover(msgspec.Struct, frozen=True):
    """KV that one prefill instance made and one decode instance went on with."""

    prefill: InstanceName
    decode: InstanceName
    seconds: float
    """From the end of the prefill leg to decode's first event, at least 0: what the way of the KV adds to TTFT."""


class Summary(msgspec.Struct, frozen=True):
    """All measures of one record."""

    seconds: float
    """Of the whole request."""
    ttft: float | None
    tpot: float | None
    """Time per output token: (end - first token) / (tokens - 1). None: no whole stream of two tokens or more. ``tokens``
    counts ids, not chunks: a chunk may carry several."""
    handovers: list[Handover]


def of(record: Record) -> Summary:
    """Every measure of a request that is over."""
    ended = ended_at(record)
    first = ttft(record)
    each = None
    if first is not None and record.outcome == "ok" and record.tokens >= 2:
        each = max(0.0, ended - record.first_at) / (record.tokens - 1)
    return Summary(ended - record.arrived, first, each, handovers(record))


def failed(outcome: str) -> bool:
    """Whether a request of this outcome counts as failed: neither served nor the client's own doing."""
    return outcome in FAILED


def ended_at(record: Record) -> float:
    """When the client had its whole answer, on the clock of ``record``.

    A served request ends with the decode leg; ``last_at`` may be later, when a prefill leg took longer to end.
    """
    if record.outcome == "ok":
        for leg in reversed(record.legs):
            if leg.role is Role.DECODE and leg.result == _DONE and leg.ended <= record.last_at:
                return leg.ended
    return record.last_at


def ttft(record: Record) -> float | None:
    """Time to first token, seconds: from arrival to the first event of the stream. None: no stream began.

    Answers that come whole have no first token that a client could see, so they have no TTFT.
    """
    if not record.stream or math.isnan(record.first_at) or record.status >= 400:
        return None
    return record.first_at - record.arrived


def handovers(record: Record) -> list[Handover]:
    """The pairs that worked: for each decode leg that answered, the prefill leg whose KV it had.

    A decode leg of attempt a waits while prefill legs a, a + 1 … are tried; the next decode leg starts a later attempt, and
    the KV of the former went elsewhere. Attempt 0 is decode alone.
    """
    if len(record.legs) < 2:
        return []
    out: list[Handover] = []
    below = math.inf
    for decode in reversed(record.legs):
        if decode.role is not Role.DECODE or not decode.attempt:
            continue
        for leg in reversed(record.legs):
            if leg.role is Role.PREFILL and leg.result == _DONE and decode.attempt <= leg.attempt < below:
                if not math.isnan(decode.first_at):
                    out.append(Handover(leg.instance, decode.instance, max(0.0, decode.first_at - leg.ended)))
                break
        below = decode.attempt
    out.reverse()
    return out
