"""After which layers of a forward the KV of those before leaves, so that it travels while the rest is computed.

What is left when the forward has ended is the last group: its copy out and its copy in are what the first token waits for.
So that one is small, and each one before it twice as large, for it has twice the time: few groups do, and each costs the
engine's thread some launches.

    layers   ├──────────────────────┼───────────┼─────┼──┤
             the first has the rest    4          2    1   times ``least``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

GROUPS_MOST: Final = 6
"""Of one step."""


def last_layers(sizes: Sequence[int], least: int, most: int = GROUPS_MOST) -> list[int]:
    """The layer with which each group ends, in order; the last one is the last layer.

    Args:
        sizes: bytes that each layer has in this step, in the order in which they are computed.
        least: bytes of a group, unless the step has fewer.
        most: groups, no more than ``GROUPS_MOST``; below 1: one.

    Raises:
        ValueError: there are no layers, or ``least`` is below 1.
    """
    if not sizes or least < 1:
        raise ValueError(f"{len(sizes)} layers in groups of at least {least} bytes")
    count, ends = min(GROUPS_MOST, most), [len(sizes) - 1]
    left, group, wanted = sum(sizes), 0, least
    for layer in range(len(sizes) - 1, 0, -1):
        group += sizes[layer]
        left -= sizes[layer]
        if len(ends) < count and group >= wanted and left >= least:
            ends.append(layer - 1)
            group, wanted = 0, 2 * group
    return ends[::-1]
