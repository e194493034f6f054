"""Steps over ZMQ: a coordinator in the engine core of rank 0, which every rank speaks to.

    rank r   wants (DEALER "w<r>", core's thread)      ── Want ──▶  coordinator (ROUTER, a thread of its own in rank 0)
             listener (DEALER "r<r>", its thread)      ── Want ──▶     every 200 ms
                                                       ◀── Grant ──    at each change, and every 200 ms

A frame that finds no room is dropped: the next heartbeat says the same. So no send ever blocks. With the service's key
both ends prove that they have it (CURVE). Where ranks are on several hosts, grants come another way: ``spread``.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import zmq

from xpyd_sidecar.contract.ids import HostPort, join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.dp import frames
from xpyd_sidecar.dp.coordinator import Coordinator
from xpyd_sidecar.dp.frames import Grant, Want
from xpyd_sidecar.dp.watch import PeerWatch
from xpyd_sidecar.engine.dp_plugin.links import Listener, Rules
from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.process import curve

logger = logging.getLogger(__name__)

LINGER_MS: Final = 1000
"""For the last word of a rank that leaves."""
ROOM: Final = 1000
"""Frames on the way to or from a peer."""
MESSAGE_MAX: Final = 1024
"""Bytes; those of CURVE's handshake count, too, and are more than a frame's."""
COORDINATOR: Final = "coordinator in DP rank"


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, ROOM)
    socket.setsockopt(zmq.RCVHWM, ROOM)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_MAX)
    return socket


def _send(socket: zmq.Socket[Any], parts: list[bytes]) -> None:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        logger.debug("xpyd: no room for a step frame; the next heartbeat says the same")


class CoordinatorThread(Listener):
    """Hears all ranks, tells all ranks."""

    def __init__(self, rules: Rules, epoch: int, size: int, host: str, *, timeout_s: float,
                 key: ServiceKey | None = None) -> None:
        """Listen at once, on a port that the kernel chooses; speak after ``start``.

        Raises:
            OSError: ``host`` is no address of this machine.
        """
        super().__init__("xpyd-dp-coordinator", rules, PeerWatch(range(size), time.monotonic(), timeout_s), "DP rank")
        self._state = Coordinator.initial(epoch, size)
        self._ranks = [b"r%d" % rank for rank in range(size)]
        self._complained: set[str] = set()
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if key is not None:
            curve.serve(self._socket, key, "broadcast")
        try:
            port = self._socket.bind_to_random_port(f"tcp://{join_host_port(host, 0).removesuffix(':0')}")
        except zmq.ZMQError as error:
            self.close_sockets()
            raise OSError(error.errno, f"{host}: {error}") from None
        self.address = join_host_port(host, port)

    def beat(self) -> None:
        """Send the grant to all ranks."""
        data = frames.encode(self._state.grant)
        for rank in self._ranks:
            _send(self._socket, [rank, data])

    def round(self, seconds: float) -> None:
        """Take in what has come, and tell all ranks once if it changes anything."""
        if not self._socket.poll(round(1000 * seconds)):
            return
        before = self._state.grant
        for _ in range(ROOM):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(parts)
        if self._state.grant != before:
            self.beat()

    def _take(self, parts: list[bytes]) -> None:
        peer = parts[0].decode("ascii", "replace")
        try:
            want = frames.decode(b"".join(parts[1:]), Want, peer)
            self._state = self._state.receive(want)
            if want.epoch == self._state.epoch:
                self.watch.on_frame(want.rank, time.monotonic())
        except ProtocolError as error:
            if len(self._complained) < 16 and peer not in self._complained:
                self._complained.add(peer)
                logger.warning("xpyd: step frame refused: %s", error)

    def close_sockets(self) -> None:
        """Close the socket; what is on the way may still go."""
        self._socket.close()
        self._context.term()


class RpcLink(Listener):
    """A rank's side. ``steps`` uses ``send`` from the core's thread; the rest is the listener's."""

    def __init__(self, rules: Rules, rank: int, address: HostPort, coordinator: CoordinatorThread | None, *,
                 timeout_s: float, key: ServiceKey | None = None) -> None:
        """``coordinator``: where this is rank 0, which starts and ends it."""
        super().__init__("xpyd-dp-listener", rules, PeerWatch((0,), time.monotonic(), timeout_s), COORDINATOR)
        self._coordinator = coordinator
        self._key = key
        self._context = zmq.Context()
        self._wants = self._connect(b"w%d" % rank, address)
        self._socket = self._connect(b"r%d" % rank, address)

    def _connect(self, name: bytes, address: HostPort) -> zmq.Socket[Any]:
        socket = _socket(self._context, zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name)
        if self._key is not None:
            curve.connect(socket, self._key, "broadcast")
        socket.connect(f"tcp://{address}")
        return socket

    def start(self) -> None:
        """Start both threads."""
        if self._coordinator is not None:
            self._coordinator.start()
        super().start()

    def send(self, want: Want) -> None:
        """Send this rank's state to the coordinator."""
        _send(self._wants, [frames.encode(want)])

    def read_grant(self) -> Grant | None:
        """Nothing, always: the listener tells the rules of grants."""
        return None

    def park(self, *, parked: bool) -> None:
        """Nothing: the listener wakes the core."""

    def beat(self) -> None:
        """Send this rank's state again."""
        _send(self._socket, [frames.encode(self.rules.want())])

    def round(self, seconds: float) -> None:
        """Receive what the coordinator has sent."""
        if not self._socket.poll(round(1000 * seconds)):
            return
        grant = frames.decode(self._socket.recv(), Grant, "coordinator")
        self.watch.on_frame(0, time.monotonic())
        self.rules.on_grant(grant)

    def close(self) -> None:
        """The listener first; then the coordinator, after it has said the last word."""
        self.stop()
        self._wants.close()
        if self._coordinator is not None:
            self._coordinator.stop()
        if not self.is_alive():
            self._context.term()

    def close_sockets(self) -> None:
        """Close the listener's socket."""
        self._socket.close()
