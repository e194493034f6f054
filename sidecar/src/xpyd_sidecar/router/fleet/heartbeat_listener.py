"""The membership socket: heartbeats in, acknowledgements out (docs/protocols/membership.md)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from xpyd_sidecar import curve, listening, sockets
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import WIRE_VERSION, Ack, Goodbye, Up
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.fleet.member import BeatRefused
from xpyd_sidecar.router.fleet.pump import Pump

logger = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 10
FIND_DEAD_S = 15.0
LOG_AGAIN_S = 60.0
LOG_PEERS = 1024

_decode = msgspec.msgpack.Decoder(Up).decode
_encode = msgspec.msgpack.Encoder().encode


class BeatListener:
    """A ROUTER socket that is read in batches; what listens for agents and for older engines has in common."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._pump: Pump | None = None

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

    def __init__(self, name: str, take: Callable[[Up], int | None], count: Callable[[str], None]) -> None:
        """``take`` returns how many legs are open on the instance that a message speaks for (None: not counted)."""
        super().__init__()
        self._name = name
        self._take = take
        self._count = count
        self._refusals = Refusals("membership message refused")

    def listen(self, host: str, port: int, key: ServiceKey) -> int:
        """Bind; the port (chosen by the kernel where ``port`` is 0).

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._socket = self._context.socket(zmq.ROUTER)
        curve.serve(self._socket, key, "membership")
        bound = bind(self._socket, host, port, MAX_MESSAGE, "router.members_port")
        self._pump = Pump(self._socket, self._on_message)
        return bound

    def _on_message(self, frames: list[zmq.Frame]) -> bytes:
        seq, refused, in_flight = -1, "", 0
        try:
            message = _read(frames)
            if not isinstance(message, Goodbye):
                seq = message.seq
            in_flight = self._take(message) or 0
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            refused = f"not a message known here: {error}"
            self._count("undecodable")
        except BeatRefused as error:
            refused = str(error)
            self._count("refused")
        except Exception:
            # A bug here must cost one message, not the listener.
            logger.exception("a membership message failed inside the router")
            refused = "the router failed; its log says why"
            self._count("failed")
        else:
            self._count("taken")
        if refused:
            self._refusals.say(frames[-1], refused)
        return _encode(Ack(v=WIRE_VERSION, seq=seq, router=self._name, refused=refused, in_flight=in_flight))


class Refusals:
    """Says in the log what was refused: once a minute per peer and reason, and of a bounded number of them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._said: dict[str, float] = {}

    def say(self, frame: zmq.Frame, reason: str) -> None:
        """``frame``: of the message; knows the peer's address."""
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
        logger.warning("%s: %s", self._what, reason[:500], extra={"peer": peer})


def bind(socket: zmq.Socket[bytes], host: str, port: int, max_message: int, setting: str) -> int:
    """Bind a ROUTER socket with the options of membership; the port.

    Raises:
        ConfigError: the address cannot be bound; names the setting. The socket is closed.
    """
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


def _read(frames: list[zmq.Frame]) -> Up:
    if len(frames) != 1:
        raise BeatRefused(f"a message is one frame, not {len(frames)}")
    message: Up = _decode(frames[0].bytes)
    return message
