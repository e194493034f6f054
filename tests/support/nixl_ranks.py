"""What one engine process has for links over NIXL, and ranks (``manifest_ranks``) that use it.

    p, d = NixlProcess(driver), NixlProcess(driver)
    prefill, decode = p.prefill(), d.decode()           …         p.stop(), d.stop() after the ranks
"""

from __future__ import annotations

from typing import Any

from manifest_ranks import DecodeRank, PrefillRank

from xpyd_sidecar.kv.reads import READ_BYTES, READS, ReadLimits
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.transport.links import LinkServer
from xpyd_sidecar.transport.nixl.driver import LandingMemory
from xpyd_sidecar.transport.nixl.fetch import NixlFetcher
from xpyd_sidecar.transport.nixl.serve import NixlServer
from xpyd_sidecar.transport.nixl.thread import NixlThread

LIMITS = ReadLimits(open_s=0.75, silence_s=1.5, fence_s=1.0)
"""Of tests that wait for what does not come."""
PATIENT = ReadLimits(open_s=20.0, silence_s=8.0, fence_s=60.0)
"""Of all others: a full machine keeps each process and each thread waiting by itself."""


class NixlProcess:
    """One process; ``driver`` is NIXL's or the fake's."""

    def __init__(self, driver: Any, *, limits: ReadLimits = PATIENT, slots: int = READS * READ_BYTES,
                 transport: str = "rdma") -> None:
        self.hub = NixlThread(driver, limits, slots)
        self.transport = transport
        self.server: NixlServer | None = None

    def prefill(self, **more: Any) -> PrefillRank:
        """A rank whose store can be read."""
        transport = more.pop("transport", self.transport)

        def servers(rank: PrefillRank) -> dict[str, LinkServer]:
            self.server = NixlServer(self.hub, Chunk(None, rank.shared.copies), timeout_s=5.0)
            self.hub.held = lambda: rank.store.used_bytes > 0
            return {"nixl": self.server, "shm": rank.shm}

        return PrefillRank(**{"servers": servers, "transport": transport} | more)

    def decode(self, **more: Any) -> DecodeRank:
        """A rank that reads; into its ring, where it has one."""
        transport = more.pop("transport", self.transport)

        def others(rank: DecodeRank) -> dict[str, Any]:
            ring = LandingMemory(address_of(rank.ring.data), len(rank.ring)) if rank.machine.ring.size else None
            made: dict[str, Any] = {"nixl": NixlFetcher(self.hub, insists=transport == "rdma", ring=ring)}
            return made if transport == "rdma" else {**made, "tcp": rank.receiver.over_tcp}

        return DecodeRank(**{"others": others, "transport": transport, "nixl": self.hub.version} | more)

    def stop(self) -> None:
        self.hub.stop()
