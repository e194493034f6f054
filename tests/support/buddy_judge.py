"""Random operations on the buddy allocator, every answer held against a map of the space."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from typing import NamedTuple

from xpyd_sidecar.kv.buddy import Buddy


class Seen(NamedTuple):
    """What a run saw."""

    operations: int
    overlaps: int
    """Blocks given out over others, beyond the end, or off their boundary."""
    unmerged: int
    """1: what was free at the end was not what was free at the start."""
    refused: int
    external: list[float]
    """At each refusal of what would have fit into the free bytes together: the share of them that no request can have."""
    internal: list[float]
    """The share of the used bytes that is lost to rounding, sampled."""


def run(seed: int, operations: int, size: int, unit: int, largest: int) -> Seen:
    """Allocate and free at random at a changing fill, check every offset, and at the end that all has merged back."""
    draw = random.Random(seed)
    buddy = Buddy(size, unit)
    start = buddy.usage
    assert start.used == 0
    held: dict[int, int] = {}
    asked: dict[int, int] = {}
    order: list[int] = []  # offsets, sorted
    names: list[int] = []  # offsets, for a random choice in constant time
    places: dict[int, int] = {}
    refused, overlaps, external, internal, fill = 0, 0, [], [], 0.5
    for number in range(operations):
        if number % 997 == 0:
            fill = draw.random()
            internal.append(1 - sum(asked.values()) / buddy.usage.used if asked else 0.0)
        if names and draw.random() > (0.75 if buddy.usage.used < fill * buddy.size else 0.25):
            at = draw.randrange(len(names))
            offset, last = names[at], names[-1]
            names[at], places[last] = last, at
            names.pop()
            del places[offset]
            order.pop(bisect_left(order, offset))
            del held[offset], asked[offset]
            buddy.free(offset)
            continue
        want = int(largest ** draw.random()) + draw.randrange(2)
        offset_or_none = buddy.allocate(want)
        if offset_or_none is None:
            refused += 1
            usage = buddy.usage
            assert usage.largest < want, "refused although a block fits"
            if usage.size - usage.used >= want:
                external.append(1 - usage.largest / (usage.size - usage.used))
            continue
        offset = offset_or_none
        block = unit << (-(-want // unit) - 1).bit_length()
        at = bisect_left(order, offset)
        overlaps += (offset % block != 0 or not 0 <= offset <= buddy.size - block
                     or (at > 0 and order[at - 1] + held[order[at - 1]] > offset)
                     or (at < len(order) and offset + block > order[at]))
        insort(order, offset)
        held[offset], asked[offset] = block, want
        places[offset] = len(names)
        names.append(offset)
        assert buddy.usage.used <= buddy.size
    assert buddy.usage.used == sum(held.values())
    for offset in names:
        buddy.free(offset)
    return Seen(operations, overlaps, int(buddy.usage != start), refused, external, internal)
