"""Data-parallel step sync of ranks on several hosts: wants go over ZMQ as in ``rpc``, grants through a broadcast queue.

    rank r   wants (DEALER)             ── Want ──▶   coordinator (ROUTER, a thread in rank 0)
             reader of the queue        ◀── Grant ──     writer: a ring for ranks on its host, ZMQ for the others

A grant is the same for all ranks, so the queue writes it once for all ranks of a host, and its connections show at once
when a process ends, where heartbeats need a timeout. All that crosses the network is under CURVE with the service's key.
A grant that finds no room is dropped, as every frame is: the next heartbeat says the same.
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
    """The coordinator of step sync, a thread in rank 0: receives wants over ZMQ, sends grants through a broadcast queue."""

    def __init__(self, rules: Rules, epoch: int, hosts: Sequence[str], host: str, *, timeout_s: float,
                 key: ServiceKey) -> None:
        """Listen on ``host``; send after ``start``.

        Args:
            rules: this rank's, which hear of failures.
            epoch: tells these ranks from earlier ones at the same address.
            hosts: by rank, the host that it is on; ranks on rank 0's host read grants from shared memory.
            host: address of this machine on which to listen.
            timeout_s: seconds after which a silent rank counts as lost.
            key: the service's key, which ranks must have.

        Raises:
            OSError: ``host`` is no address of this machine, or no memory or descriptor is left.
            ConfigError: the queue cannot be made, or cannot listen on ``host``.
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
        """Send the present grant to all ranks; the first time, wait until all have joined the queue.

        Raises:
            PeerGone: a rank does not join within ``JOIN_S`` seconds, or all ranks are gone.
        """
        if not self._joined:
            self._writer.wait_ready(JOIN_S)
            self._joined = True
        try:
            self._writer.send(frames.encode(self._state.grant), timeout_s=0.0)
        except ReaderStuck as error:
            logger.debug("xpyd: %s; the next heartbeat says the same", error)

    def close_sockets(self) -> None:
        """Close the queue and the ZMQ socket; wait up to ``LAST_S`` seconds for the last grant to be read."""
        try:
            self._writer.close(LAST_S)
        except ReaderStuck as error:
            logger.info("xpyd: %s", error)
        super().close_sockets()

    def _dropped(self, name: str, reason: str) -> None:
        self.rules.fail(PeerGone(f"DP {name}", reason))


class SpreadLink(rpc.RpcLink):
    """A rank's side of step sync: sends wants over ZMQ, and receives grants from the broadcast queue."""

    def __init__(self, rules: Rules, rank: int, address: HostPort, coordinator: SpreadCoordinator | None, *,
                 timeout_s: float, handle: bytes, key: ServiceKey) -> None:
        """Connect to the coordinator at ``address``; the listener's thread joins the queue later.

        ``coordinator``: given on rank 0 alone, which starts and ends it. ``handle``: of the queue (``Writer.handle``).
        """
        super().__init__(rules, rank, address, coordinator, timeout_s=timeout_s, key=key)
        self._join: Callable[[], LocalReader | RemoteReader] = lambda: join(
            handle, name_of(rank), timeout_s=JOIN_S, key=key, spin_s=0.0)
        self._reader: LocalReader | RemoteReader | None = None

    def round(self, seconds: float) -> None:
        """Wait up to ``seconds`` for a grant, and give it to the rules; the first call joins the queue before.

        Raises:
            PeerGone: the coordinator has ended.
            PeerError: the queue cannot be joined, the coordinator has dropped this rank, or what came is no grant.
        """
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
        """Leave the queue, and close the listener's ZMQ socket."""
        if self._reader is not None:
            self._reader.close()
        super().close_sockets()


def name_of(rank: int) -> str:
    """The name of a rank's reader in the queue."""
    return f"rank {rank}"
