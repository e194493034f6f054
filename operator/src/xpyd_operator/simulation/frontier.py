"""What there is to choose from without a planner: no other choice costs less and attains more.

Beside each stands what it asks of the links, what is left of it when an instance dies and nobody replaces it, and what the
same devices do as plain engines, which compute prompts in chunks beside their batches.
"""

from __future__ import annotations

import msgspec

from xpyd_operator.simulation.outcome import Pair
from xpyd_operator.simulation.statics import Point, Statics

MOST_ROWS = 6
CHUNKS = (2048, 8192)
"""Of plain engines: the better one counts."""
WORTH = 0.001
"""What a row attains more than the one before it, at least."""


class FrontierRow(msgspec.Struct, frozen=True):
    """One choice."""

    choice: str
    gpus: int
    hours: float
    """Of GPUs."""
    attained: float
    link: float
    """Bytes a second into a decode instance, on average over the trace."""
    without_prefill: float
    """What is attained with one prefill instance less."""
    without_decode: float
    plain: str
    """The same devices as plain engines; empty where there are too few."""
    plain_attained: float


def rows(statics: Statics) -> list[FrontierRow]:
    """From the cheapest to the best; only choices that were simulated."""
    return [_row(statics, counts) for counts in _best(statics)[-MOST_ROWS:]]


def _best(statics: Statics) -> list[Pair]:
    found: list[Pair] = []
    last = -1.0
    by_cost = sorted(statics.points, key=lambda counts: (statics.gpus(counts), -statics.points[counts].attained))
    for counts in by_cost:
        attained = statics.points[counts].attained
        if attained >= last + WORTH:
            found.append(counts)
            last = attained
    return found


def _row(statics: Statics, counts: Pair) -> FrontierRow:
    point = statics.points[counts]
    prefill, decode = counts
    gpus = statics.gpus(counts)
    plain = _plain(statics, gpus // statics.pools.gpus[1])
    return FrontierRow(
        point.choice, gpus, point.hours, point.attained, statics.links[counts],
        statics.point_outside((prefill - 1, decode)).attained if prefill else 0.0,
        statics.point_outside((prefill, decode - 1)).attained if decode > 1 else 0.0,
        plain.choice if plain is not None else "", plain.attained if plain is not None else 0.0,
    )


def _plain(statics: Statics, count: int) -> Point | None:
    """So many plain engines, with the chunks that are better for them."""
    if count < 1:
        return None
    return max((statics.point_outside((0, count), chunk) for chunk in CHUNKS), key=lambda each: each.attained)
