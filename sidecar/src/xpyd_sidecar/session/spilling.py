"""Prefill's half of what is pushed ahead: when to offer copies to decode, and what decode answers. On the sender's thread.

A sender that keeps more than half of what it may keep offers the oldest copies that nobody has asked for to those decode
ranks that expect them, so that steps still to come find room.
"""

from __future__ import annotations

import time
from typing import Any

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.copies import Step
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.kv.stores import Busy, Expect, Fetch
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.threads.increments import Increments

RETRY_LEAST_S = 0.01
RETRY_MOST_S = 5.0


class Spilling:
    """The pressure on one sender's store."""

    def __init__(self, machine: Sending[Any], store: CopyStore) -> None:
        self.leaving = 0
        """Bytes that are on their way out of the store."""
        self.counted = Increments()
        """Metrics, for the engine's thread to take."""
        self._machine = machine
        self._store = store

    def heard(self, link: int, peer: str, header: Header, body: memoryview) -> list[Step[Any]]:
        """Decode expects, has room, has none, or fetches.

        Raises:
            ProtocolError: it says something else.
        """
        key = header.key
        if header.kind is FrameKind.EXPECT:
            return self._machine.expect(link, key, bodies.read_body(body, Expect))
        if header.kind is FrameKind.ROOM:
            return self._machine.room(link, key, header.region, header.first)
        if header.kind is FrameKind.BUSY:
            asked = bodies.read_body(body, Busy).retry_s
            wait = asked if RETRY_LEAST_S <= asked <= RETRY_MOST_S else RETRY_MOST_S  # also where it is no number
            self._machine.full(link, key, header.region, header.first, time.monotonic() + wait)
            self.counted.add(metrics.STORE_RETRIES, 1)
            return []
        if header.kind is FrameKind.FETCH:
            return self._machine.fetch(link, key, bodies.read_body(body, Fetch).until)
        raise ProtocolError(peer, f"sent {header.kind.name} where prefill listens")

    def relieve(self) -> list[Step[Any]]:
        """What to offer now, when all earlier steps have been carried out."""
        over = self._store.used - self._store.bound // 2 - self._machine.on_offer - self.leaving
        if over <= 0:
            return []
        return self._machine.spill(over, lambda kept: len(kept.view), time.monotonic())
