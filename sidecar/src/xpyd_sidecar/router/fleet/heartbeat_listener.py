"""The sockets of membership: heartbeats in, acknowledgements out (docs/protocols/membership.md)."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from xpyd_sidecar import curve, listening, sockets
from xpyd_sidecar.contract import p2p
from xpyd_sidecar.contract.ids import ServiceName, join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import WIRE_VERSION, Ack, Heartbeat, Up
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.fleet.member import BeatRefused, FleetMember, Undecodable
from xpyd_sidecar.router.fleet.p2p import Guests
from xpyd_sidecar.router.fleet.pump import Pump

logger = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 10
FIND_DEAD_S = 15.0
LOG_AGAIN_S = 60.0
LOG_PEERS = 1024
PORT_AFTER_MEMBERS = 1
"""The port for older engines is that of membership and this: 30002 by default."""

_decode = msgspec.msgpack.Decoder(Up).decode
_encode = msgspec.msgpack.Encoder().encode


class BeatListener(ABC):
    """A ROUTER socket that is read in batches: what listening for agents and for older engines has in common.

    What was refused is logged once a minute per peer and reason, and of a bounded number of them.
    """

    what: str
    """What comes here, in words for the log."""

    def __init__(self, take: Callable[[Any], int | None], count: Callable[[str], None]) -> None:
        """``take`` returns how many legs are open on the instance that a message speaks for (None: not counted)."""
        self._take = take
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._pump: Pump | None = None
        self._said: dict[str, float] = {}

    @abstractmethod
    def _read(self, frames: list[zmq.Frame]) -> Up:
        """The message. Raises BeatRefused."""

    @abstractmethod
    def _answer(self, message: Up | None, in_flight: int, refused: str) -> bytes | None:
        """What is said to who sent it, if anything. ``message``: None where it could not be read."""

    def _on_message(self, frames: list[zmq.Frame]) -> bytes | None:
        message, in_flight, result, refused = None, 0, "taken", ""
        try:
            message = self._read(frames)
            in_flight = self._take(message) or 0
        except BeatRefused as error:
            result, refused = error.result, str(error)
        except Exception:
            # A bug here must cost one message, not the listener.
            logger.exception("a %s failed inside the router", self.what)
            result, refused = "failed", "the router failed; its log says why"
        self._count(result)
        if refused:
            self._say(frames[-1], refused)
        return self._answer(message, in_flight, refused)

    def _say(self, frame: zmq.Frame, reason: str) -> None:
        try:
            peer = str(frame.get("Peer-Address"))
        except (zmq.ZMQError, UnicodeDecodeError):
            peer = "unknown"
        key, now = f"{peer} {reason[:200]}", self._loop.time()
        if now - self._said.get(key, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return
        if len(self._said) >= LOG_PEERS:
            self._said.clear()
        self._said[key] = now
        logger.warning("%s refused: %s", self.what, reason[:500], extra={"peer": peer})

    def look(self) -> None:
        """Take what is there. Called every second, should an edge ever be missed."""
        if self._pump is not None:
            self._pump.look()

    def close(self) -> None:
        """Stop listening."""
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        elif self._socket is not None:
            self._socket.close()
        self._context.term()


class Members(BeatListener):
    """Listens for agents."""

    what = "membership message"

    def __init__(self, name: str, take: Callable[[Up], int | None], count: Callable[[str], None]) -> None:
        super().__init__(take, count)
        self._name = name

    def listen(self, host: str, port: int, key: ServiceKey) -> int:
        """Bind; the port (chosen by the kernel where ``port`` is 0). Raises ConfigError: the address cannot be bound."""
        self._socket = self._context.socket(zmq.ROUTER)
        curve.serve(self._socket, key, "membership")
        bound = bind(self._socket, host, port, MAX_MESSAGE, "router.members_port")
        self._pump = Pump(self._socket, self._on_message)
        return bound

    def _read(self, frames: list[zmq.Frame]) -> Up:
        if len(frames) != 1:
            raise BeatRefused(f"a message is one frame, not {len(frames)}")
        try:
            message: Up = _decode(frames[0].bytes)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Undecodable(f"not a message known here: {error}") from None
        return message

    def _answer(self, message: Up | None, in_flight: int, refused: str) -> bytes:
        seq = message.seq if isinstance(message, Heartbeat) else -1
        return _encode(Ack(v=WIRE_VERSION, seq=seq, router=self._name, refused=refused, in_flight=in_flight))


class GuestListener(BeatListener):
    """Listens for older engines (``compat: p2p``).

    They cannot prove who they are, and one socket cannot speak CURVE and plain: so this is a port of its own, next to that
    of membership, and open only where it is asked for. Nothing is answered, since they never read.
    """

    what = "heartbeat of an older engine"

    def __init__(self, service: ServiceName, take: Callable[[Heartbeat], int | None], count: Callable[[str], None],
                 members: Callable[[], Iterable[FleetMember]]) -> None:
        """``members``: who is in the roster now."""
        super().__init__(take, count)
        self._guests = Guests(service, members)

    def listen(self, host: str, port: int) -> int:
        """Bind; the port (chosen by the kernel where ``port`` is 0). Raises ConfigError: the address cannot be bound."""
        self._socket = self._context.socket(zmq.ROUTER)
        bound = bind(self._socket, host, port, p2p.MAX_MESSAGE, "router.compat: members_port + 1")
        self._pump = Pump(self._socket, self._on_message)
        logger.warning("engines that nobody can identify may join on port %d (compat: p2p)", bound, extra={"port": bound})
        return bound

    def _read(self, frames: list[zmq.Frame]) -> Heartbeat:
        try:
            beat = p2p.decode(frames[-1].buffer)
        except ValueError as error:
            raise Undecodable(str(error)) from None
        return self._guests.heartbeat(beat)

    def _answer(self, *_: object) -> None:
        return None


def bind(socket: zmq.Socket[bytes], host: str, port: int, max_message: int, setting: str) -> int:
    """Bind a ROUTER socket with the options of membership; the port. Raises ConfigError: names the setting."""
    host = listening.bound(host)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message)
    socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that comes back with the same identity replaces its old self
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    sockets.find_dead(socket, FIND_DEAD_S)
    try:
        socket.bind(f"tcp://{join_host_port(host, port or '*')}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"{setting}: cannot bind {join_host_port(host, port)}: {error}") from None
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
