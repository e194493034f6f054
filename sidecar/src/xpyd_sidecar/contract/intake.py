"""What became of the prompts of an engine: how much of them came as KV, and over which links; and what a router makes of
that: whether the service is disaggregating.

    prompts  =  cached  +  received  +  computed             tokens of an engine that decodes
                (own)      (prefill's)  (its own work again)

Engines count (``contract.metrics`` and vLLM's own series), agents tell the counts with their beats (``membership.Load``),
routers look at how they grow (``router.observing.intake_window``) and tell ``Disaggregation`` in ``/fleet``.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

MOST_LINKS: Final = 8
MOST_OUTCOMES: Final = 24
"""Entries of a beat; there are fewer of either kind."""
HARMLESS: Final = frozenset({"ok", "aborted", "unused", "stale"})
"""Outcomes of transfers after which no prompt is computed that was to be received."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Counts = tuple[tuple[Word, Count], ...]


class Intake(msgspec.Struct, frozen=True):
    """Of one engine since its start; all but ``blocks_waiting`` only grow. Lengths in tokens."""

    prompts: Count = 0
    """Of prompts that have their first token."""
    cached: Count = 0
    """Of those, found in the engine's own prefix cache."""
    received: Count = 0
    """Of those, whose KV came from a prefill engine."""
    outcomes: Annotated[Counts, msgspec.Meta(max_length=MOST_OUTCOMES)] = ()
    """Loads that ended, by how (``kv.keys.Outcome``), sorted."""
    links: Annotated[Counts, msgspec.Meta(max_length=MOST_LINKS)] = ()
    """Payload bytes that came in, by link, sorted; ``buffer``: what had come ahead from an engine that is gone."""
    refused: Annotated[Counts, msgspec.Meta(max_length=MOST_LINKS)] = ()
    """Sessions that could not have a link, by link, and go on over a worse one; sorted."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """From the arrival of a decode leg until its KV was in place, summed over loads."""
    blocks_waiting: Count = 0
    """Of a prefill engine: blocks that find no room to be copied out, now."""


class IntakeRates(msgspec.Struct, frozen=True):
    """The same of one instance, a second, over the last readings that a router has."""

    received_s: float = 0.0
    computed_s: float = 0.0
    """Tokens of prompts that it has computed itself."""
    cached_s: float = 0.0
    """Tokens of prompts that it has found in its own prefix cache."""
    bytes_s: float = 0.0
    """Payload that came in over links."""
    best_bytes_s: float = 0.0
    """The most of that since the engine's start, between two beats."""
    wait_s: float = 0.0
    """Mean of the loads: from the arrival of the leg until its KV was in place, seconds."""
    loads_s: float = 0.0
    """Loads that ended well."""
    blocks_waiting: int = 0
    """Of a prefill engine: blocks that find no room to be copied out, now."""


class LinkRate(msgspec.Struct, frozen=True):
    """KV bytes a second that decode instances receive over one kind of link."""

    link: str
    gb_s: float
    """1e9 bytes a second, into all decode instances together."""


class Disaggregation(msgspec.Struct, frozen=True):
    """Whether decode receives the prompts that it was to receive."""

    holds: Literal["True", "False", "Unknown"] = "Unknown"
    reason: str = "NoTraffic"
    """``Receiving``; ``NoPrefill``, ``NoPair``, ``LoadsFail``, ``SkippedByRule``, ``Computed``; ``NoDecode``, ``NotTold``,
    ``NoTraffic``."""
    message: str = "no prompt has come yet"
    share: float | None = None
    """Received tokens of those that decode received or computed, without what skipped prefill by rule; None: not known."""
    links: tuple[LinkRate, ...] = ()
    """The busiest first."""
    failed: Counts = ()
    """Loads that ended so that their prompts were computed, by outcome, the most frequent first."""
    received_s: float = 0.0
    computed_s: float = 0.0
    skipped: float = 0.0
    """Share of the tokens that came to this router whose prompts skipped prefill by rule."""
