"""The answer to ``GET /sample`` of a router: times and sizes of the requests that ended well within the last hour, from
which ``xpyd doctor`` simulates the same load. It holds no prompt, answer, key, client or address. The call needs the
admin bearer token.

Numbers are sent as packed arrays, which is how the router stores them: its event loop serves nobody while it builds an
answer, and to encode 32,768 requests as objects would take a tenth of a second.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import Final

import msgspec

from xpyd_sidecar.contract.ids import ServiceName

PATH: Final = "/sample"
MOST: Final = 32_768
"""Requests; with more than nine a second it is of less than an hour."""
HOUR_S: Final = 3600.0
COLUMNS: Final = 7
"""Numbers of a request beside its arrival: the fields of ``SampledRequest`` after the first, in order."""


class SampledRequest(msgspec.Struct, frozen=True):
    """One request that ended well. Times are in seconds, lengths in tokens; -1: not known, or there is none."""

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
    """Times and sizes of the requests that a router remembers, in order of arrival."""

    service: ServiceName
    covers_s: float
    """How far it reaches back: all requests of so long that ended well are in it."""
    requests: tuple[SampledRequest, ...] = ()


class PackedSample(msgspec.Struct, frozen=True):
    """The answer to ``GET /sample``, as JSON in which the two arrays are base64 of little-endian numbers."""

    service: ServiceName
    begins: float
    """What arrived before is not part of it; seconds since 1970."""
    now: float
    at: bytes = b""
    """Arrivals, seconds since 1970, as 64-bit floats, in no order."""
    rest: bytes = b""
    """``COLUMNS`` 32-bit floats for each of them."""


def pack_numbers(numbers: array[float]) -> bytes:
    """The bytes of an array of numbers in little-endian order, as ``PackedSample`` holds them."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def unpack(packed: PackedSample) -> Sample:
    """The requests of a packed sample, in order of arrival; those that arrived before ``packed.begins`` are left out.

    Raises:
        ValueError: an array ends within a number, a number is not finite, or there are not ``COLUMNS`` numbers for each
            arrival.
    """
    ats, rest = array("d"), array("f")
    ats.frombytes(packed.at)
    rest.frombytes(packed.rest)
    if len(rest) != COLUMNS * len(ats):
        raise ValueError(f"{len(ats)} arrivals and {len(rest)} numbers, which should be {COLUMNS} for each")
    if sys.byteorder == "big":
        ats.byteswap()
        rest.byteswap()
    if not all(map(math.isfinite, ats)) or not all(map(math.isfinite, rest)):
        raise ValueError("a number is not finite")
    found = []
    for at, place in sorted((at, place) for place, at in enumerate(ats) if at >= packed.begins):
        prompt, output, *times = rest[place * COLUMNS:(place + 1) * COLUMNS]
        ttft, total, queued, prefill, handover = (round(value, 5) for value in times)
        found.append(SampledRequest(round(at - packed.begins, 4), int(prompt), int(output), ttft, total, queued, prefill,
                                    handover))
    return Sample(packed.service, round(max(0.0, packed.now - packed.begins), 3), tuple(found))
