"""The last transfers of an engine, for who asks (``xpyd trace``). The caller holds the scheduler side's lock.

Laws
1. At most ``KEPT`` sides of transfers are remembered, of each at most ``RANKS_MOST`` ranks; the oldest are forgotten.
2. What ranks have noted stays packed: about 3 KiB per rank, nothing is decoded here.
3. Late marks of an older attempt do not count, but for those of the try that decode has loaded: its request runs on that
   one, although a newer one may be known by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.contract.timeline import KEPT, Notes
from xpyd_sidecar.kv.keys import Key, Recent

RANKS_MOST: Final = 16


@dataclass
class _Entry:
    attempt: Attempt
    tokens: int = 0
    outcome: str = ""
    marks: dict[str, float] = field(default_factory=dict)
    ranks: list[bytes] = field(default_factory=list)
    first: bytes = b""
    loaded: Key | None = None


class RecentTransfers:
    """Both sides of an engine's transfers."""

    def __init__(self) -> None:
        self._entries: Recent[tuple[TransferId, bool], _Entry] = Recent(KEPT)

    def mark(self, key: Key, name: str, *, sends: bool, tokens: int = 0, outcome: str = "") -> None:
        """Something has happened now. A higher attempt takes the place of a lower one, whose late marks count no more."""
        entry = self._of(key, sends=sends)
        if entry is None:
            return
        entry.marks.setdefault(name, time.monotonic())
        entry.tokens = tokens or entry.tokens
        entry.outcome = outcome or entry.outcome

    def on_loaded(self, key: Key) -> None:
        """All ranks of decode have the KV of this try."""
        entry = self._entries.get((key.transfer, False))
        if entry is not None:
            entry.loaded = key
        self.mark(key, "loaded", sends=False)

    def side(self, key: Key, noted: bytes, *, sends: bool) -> None:
        """A rank has ended its part. Those of decode note once for each load, whichever of its tries they took."""
        entry = self._of(key, sends=sends) if sends else self._entries.get((key.transfer, False))
        if entry is not None and len(entry.ranks) < RANKS_MOST:
            entry.ranks.append(noted)

    def first(self, key: Key, noted: bytes) -> None:
        """Decode's first forward is over."""
        entry = self._of(key, sends=False)
        if entry is not None:
            entry.first = noted

    def notes_of(self, transfers: Iterable[TransferId]) -> tuple[Notes, ...]:
        """The notes of these transfers, as far as they are remembered."""
        names = [(transfer, sends) for transfer in transfers for sends in (True, False)]
        return tuple(Notes(*name, one.attempt, one.tokens, one.outcome, dict(one.marks), tuple(one.ranks), one.first)
                     for name in names if (one := self._entries.get(name)) is not None)

    def _of(self, key: Key, *, sends: bool) -> _Entry | None:
        name = (key.transfer, sends)
        entry = self._entries.get(name)
        if entry is not None and entry.attempt > key.attempt and entry.loaded != key:
            return None
        if entry is None or (sends and entry.attempt < key.attempt):
            entry = _Entry(key.attempt)
            self._entries.put(name, entry)
        elif entry.attempt < key.attempt:  # decode's leg waits on: what it has waited for so far is part of its story
            entry.attempt = key.attempt
        return entry
