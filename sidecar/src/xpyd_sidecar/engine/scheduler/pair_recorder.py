"""Which peers this engine cannot take KV from, and which links are worse than they could be, for the agent to tell.

    a peer is refused ──▶ told, for a while  ──▶ routers pair the two no more
                          told no more       ──▶ they pair them again; refused again: for twice as long, to ``MOST_S``

So a pair that cannot be costs one prompt that decode computes, now and then, and one that was mended is found by itself.
All methods but ``write`` are called with the scheduler side's lock held.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from xpyd_sidecar.contract import pair_notes
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.pair_notes import (
    INCARNATION_MAX,
    MOST_LINKS,
    MOST_REFUSED,
    NAME_MAX,
    PairNotes,
    RefusedPeer,
    cut,
)

logger = logging.getLogger(__name__)

FIRST_S: Final = 60.0
"""For which a pair that was refused is not tried again; a peer that is not refused for as long after that is forgotten."""
MOST_S: Final = 960.0


class Refusal(NamedTuple):
    """Why one peer was refused."""

    reason: str
    until: float
    span_s: float
    """For which it is told."""


class PairRecorder:
    """Records what one engine (one DP rank of it) finds of its peers."""

    def __init__(self, run_dir: Path | None, dp_rank: int, incarnation: Incarnation) -> None:
        """``run_dir``: where the agent reads; None: there is no agent."""
        self._run_dir = run_dir
        self._dp_rank = dp_rank
        self._incarnation = incarnation
        self._refused: dict[tuple[InstanceName, Incarnation], Refusal] = {}
        """The oldest first."""
        self._links: Mapping[int, tuple[str, ...]] = {}
        self._written: PairNotes | None = None
        self._failed = ""

    def refuse(self, instance: InstanceName, incarnation: Incarnation, reason: str, now: float) -> None:
        """A prefill engine's KV cannot be taken. One that no router could know by its name is not told."""
        if not 0 < len(instance.encode(errors="replace")) <= NAME_MAX or len(incarnation) > INCARNATION_MAX:
            return
        peer = instance, incarnation
        known = self._refused.pop(peer, None)
        span = FIRST_S if known is None else min(2 * known.span_s, MOST_S)
        self._refused[peer] = known if known is not None and now < known.until else Refusal(cut(reason), now + span, span)
        while len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def links(self, words: Mapping[int, tuple[str, ...]]) -> None:
        """What each rank says of its links now."""
        self._links = words

    def due(self, now: float) -> PairNotes | None:
        """What is to be written; None while nothing has changed."""
        for peer in [one for one, refusal in self._refused.items() if now >= refusal.until + refusal.span_s]:
            del self._refused[peer]
        refused = tuple(RefusedPeer(*peer, one.reason) for peer, one in self._refused.items() if now < one.until)
        links = tuple(map(cut, dict.fromkeys(chain.from_iterable(words for _, words in sorted(self._links.items())))))
        notes = PairNotes(self._incarnation, refused, links[:MOST_LINKS])
        return notes if self._run_dir is not None and notes != self._written else None

    def write(self, notes: PairNotes) -> None:
        """Write what is due. Where that fails it stays due, and the log says so once; without the lock, by one thread."""
        assert self._run_dir is not None
        try:
            pair_notes.write(self._run_dir, self._dp_rank, notes)
        except OSError as error:
            if str(error) != self._failed:
                logger.warning("xpyd: routers do not hear of pairs that cannot be: %s", error)
            self._failed = str(error)
        else:
            self._written, self._failed = notes, ""
