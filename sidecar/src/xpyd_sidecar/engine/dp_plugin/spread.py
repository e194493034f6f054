"""Steps of ranks on several hosts: wants go over ZMQ as in ``rpc``, grants through a broadcast queue.

    rank r   wants (DEALER)             ── Want ──▶   coordinator (ROUTER, a thread in rank 0)
             reader of the queue        ◀── Grant ──     writer: a ring for ranks on its host, ZMQ for the others

A grant is the same for all ranks, which is what the queue is for: one write for a whole host, and the connections say at
once when a process ends; heartbeats alone need the timeout. Everything is under CURVE with the service's key. A grant
that finds no room is dropped, as every frame is: the next heartbeat says the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from xpyd_sidecar.broadcast.errors import NothingCame, QueueClosed, ReaderStuck
from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import LocalReader, RemoteReader, join
from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.dp import frames
from xpyd_sidecar.dp.frames import Grant
from xpyd_sidecar.engine.dp_plugin import rpc
from xpyd_sidecar.engine.dp_plugin.links import Rules
from xpyd_sidecar.errors import PeerGone

logger = logging.getLogger(__name__)

CHUNKS: Final = 64
"""Grants that a rank may be behind: 13 s of heartbeats."""
CHUNK_BYTES: Final = 4096
JOIN_S: Final = 60.0
LAST_S: Final = 1.0
"""For the last word to reach ranks on other hosts."""


class SpreadCoordinator(rpc.CoordinatorThread):
    """Hears all ranks over ZMQ, tells them through the queue."""

    def __init__(self, rules: Rules, epoch: int, hosts: Sequence[str], host: str, *, timeout_s: float,
                 key: ServiceKey) -> None:
        """``hosts``: of each rank, as it names it; those of rank 0's read its memory.

        Raises:
            OSError: ``host`` is no address of this machine.
            ConfigError: as ``Writer`` does.
        """
        super().__init__(rules, epoch, len(hosts), host, timeout_s=timeout_s, key=key)
        near = [one == hosts[0] for one in hosts]
        try:
            self._writer = Writer("dp steps", local=[name_of(rank) for rank, same in enumerate(near) if same],
                                  remote=[name_of(rank) for rank, same in enumerate(near) if not same], chunks=CHUNKS,
                                  chunk_bytes=CHUNK_BYTES, listen=host, key=key, spin_s=0.0, on_drop=self._dropped)
        except BaseException:
            super().close_sockets()
            raise
        self.handle = self._writer.handle
        self._joined = False

    def beat(self) -> None:
        """Tell all ranks; the first time when all have joined."""
        if not self._joined:
            self._writer.wait_ready(JOIN_S)
            self._joined = True
        try:
            self._writer.send(frames.encode(self._state.grant), timeout_s=0.0)
        except ReaderStuck as error:
            logger.debug("xpyd: %s; the next heartbeat says the same", error)

    def close_sockets(self) -> None:
        """Close the queue when the last word was read, and the socket."""
        try:
            self._writer.close(LAST_S)
        except ReaderStuck as error:
            logger.info("xpyd: %s", error)
        super().close_sockets()

    def _dropped(self, name: str, reason: str) -> None:
        self.rules.fail(PeerGone(f"DP {name}", reason))


class SpreadLink(rpc.RpcLink):
    """A rank's side."""

    def __init__(self, rules: Rules, rank: int, address: HostPort, coordinator: SpreadCoordinator | None, *,
                 timeout_s: float, handle: bytes, key: ServiceKey) -> None:
        """``handle``: of the queue; it is joined by the listener's thread."""
        super().__init__(rules, rank, address, coordinator, timeout_s=timeout_s, key=key)
        self._join: Callable[[], LocalReader | RemoteReader] = lambda: join(
            handle, name_of(rank), timeout_s=JOIN_S, key=key, spin_s=0.0)
        self._reader: LocalReader | RemoteReader | None = None

    def round(self, seconds: float) -> None:
        """Receive what the coordinator has sent."""
        if self._reader is None:
            self._reader = self._join()
        try:
            data = self._reader.recv(seconds)
        except NothingCame:
            return
        except QueueClosed as error:
            raise PeerGone(f"{rpc.COORDINATOR} 0", f"it has ended ({error})") from None
        grant = frames.decode(b"".join(data), Grant, "coordinator")
        self.watch.on_frame(0, time.monotonic())
        self.rules.on_grant(grant)

    def close_sockets(self) -> None:
        """Leave the queue, close the listener's socket."""
        if self._reader is not None:
            self._reader.close()
        super().close_sockets()


def name_of(rank: int) -> str:
    """The name of a rank's reader in the queue."""
    return f"rank {rank}"
