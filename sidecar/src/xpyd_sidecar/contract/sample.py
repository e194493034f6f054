"""``GET /sample`` of a router: times and sizes of the requests of the last hour, for who would play them again
(``xpyd doctor``). No prompt, answer, key, name or address is in it. Authenticated with the admin bearer token.
"""

from __future__ import annotations

from typing import Final

import msgspec

from xpyd_sidecar.contract.ids import ServiceName

PATH: Final = "/sample"
MOST: Final = 32_768
"""Requests; with more than nine a second it is of less than an hour."""
HOUR_S: Final = 3600.0


class SampledRequest(msgspec.Struct, frozen=True, array_like=True):
    """One that ended well. Times in seconds, lengths in tokens; -1: not known."""

    at: float
    """Its arrival, from the beginning of the sample."""
    prompt: int
    output: int
    ttft: float
    """From arrival to the first event of its stream."""
    total: float
    """From arrival to the end of its answer."""
    queued: float
    """How long it waited in the router."""
    prefill: float
    """How long its prefill leg took; -1: decode did it alone."""
    handover: float
    """From the end of its prefill leg to decode's first event."""


class Sample(msgspec.Struct, frozen=True):
    """What a router has kept, by arrival."""

    service: ServiceName
    covers_s: float
    """How far it reaches back: all requests of so long that ended well are in it."""
    requests: tuple[SampledRequest, ...] = ()
