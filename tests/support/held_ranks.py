"""The ranks of ``kv_ranks`` whose engines do one thing at a time, when they are told to (``held_session``)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kv_ranks import TCP, DecodeRank, PrefillRank

from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.session.sender import Kept
from xpyd_sidecar.transport.shm.mailbox import Mailbox


class HeldPrefill(PrefillRank):
    """Whose copies are complete when ``mark`` is called, one at a time, in their order."""

    def begin(self) -> None:
        self.marks_due: deque[tuple[Key, list[Copy[Kept]]]] = deque()

    def room(self, size: int) -> bool:
        return self.store.bound - self.store.used >= size

    def copy(self, which: Key, region: int, first: int, blocks: Sequence[bytes], **_: Any) -> None:
        self.marks_due.append((which, self.made(region, first, blocks)))

    def left(self) -> dict[str, int]:
        """What it still holds, by name."""
        machine = self.sender._machine
        return {"used": self.store.used, "on offer": machine.on_offer, "open": machine.open,
                "early": len(machine._early), "expected": len(machine._expected),
                "leaving": self.sender.spilling.leaving, "sends": len(self.sender._leaving)}

    def mark(self) -> None:
        key, copies = self.marks_due.popleft()
        self.sender.push(key, copies)


class HeldDecode(DecodeRank):
    """Whose engine looks at one event at a time, and whose copies into blocks are complete when ``give`` is called."""

    def begin(self) -> None:
        self.due: deque[Chunk] = deque()

    def emptied(self, chunk: Chunk) -> None:
        self.due.append(chunk)

    def left(self) -> dict[str, int]:
        """What it still holds, by name."""
        receiver, staging = self.receiver, self.staging
        sources = receiver._sources.values()
        return {"buffer": sum(receiver.ahead.used), "entries": len(receiver.ahead._buffer), "loads": self.machine.open,
                "gates": len(receiver._gates), "of key": len(receiver._of_key),
                "chunks": len(staging._numbers) - len(staging._free), "paused": sum(one.link.paused for one in sources),
                "asked": sum(len(one.asked) for one in sources), "expected": sum(len(one.expected) for one in sources)}

    def give(self) -> None:
        self.staging.give(self.due.popleft())


def drawn_ways(rnd: random.Random, folder: Path, patch: pytest.MonkeyPatch) -> LinkOptions:
    """Over what blocks travel; where it is asked for, the descriptor of prefill's memory may not come."""
    kind = rnd.choice(("tcp", "tcp", "shm", "lost"))
    if kind == "tcp":
        return TCP
    if kind == "lost":
        comes = rnd.randrange(3)
        take, takes = Mailbox.take, count()
        patch.setattr(Mailbox, "take", lambda box, wanted: take(box, wanted) if next(takes) < comes else None)
        return LinkOptions("auto", folder)
    return LinkOptions(rnd.choice(("auto", "shm")), rnd.choice((folder, None)))
