"""What one engine process has for links over NIXL: its agents' thread, and a pool of copies that others read.

    p, d = NixlProcess(driver), NixlProcess(driver)
    with p.prefill() as prefill, d.decode() as decode:                 as ``kv_ranks``
"""

from __future__ import annotations

from typing import Any

from kv_ranks import TIMEOUT_S, DecodeRank, PrefillRank

from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.nixl.prefill import NixlReading
from xpyd_sidecar.transport.nixl.session import ReadLimits
from xpyd_sidecar.transport.nixl.thread import NixlThread
from xpyd_sidecar.transport.shm.prefill import SharedCopies

LIMITS = ReadLimits(sessions=4, open_s=TIMEOUT_S / 2, silence_s=TIMEOUT_S, linger_s=1.0)
"""Of tests that wait for what does not come."""
PATIENT = LIMITS._replace(open_s=20.0, silence_s=8.0)
"""Of all others: a full machine keeps each process and each thread waiting by itself."""


class NixlProcess:
    """One process; ``driver`` is NIXL's or the fake's."""

    def __init__(self, driver: Any, *, piece: int = 1 << 20, keep: int = 16 << 20, limits: ReadLimits = PATIENT,
                 transport: str = "rdma") -> None:
        self.hub = NixlThread(driver, limits)
        self.reading = NixlReading(self.hub, piece, timeout_s=max(limits.open_s, limits.silence_s))
        self.sharing = SharedCopies(keep)
        self.memory = self.sharing.copies
        self.reading.register(self.memory)
        self.store = CopyStore(lambda size: Chunk(None, self.memory[:size]), keep, unit=1)
        self.ways = LinkOptions(transport, nixl=self.reading.ours())

    def prefill(self, **more: Any) -> PrefillRank:
        given = {"ways": self.ways, "reading": self.reading, "store": self.store, "sharing": self.sharing}
        return PrefillRank(**given | more)

    def decode(self, **more: Any) -> DecodeRank:
        return DecodeRank(**{"ways": self.ways, "reading": self.reading} | more)

    def stop(self) -> None:
        self.hub.stop()
