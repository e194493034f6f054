"""The membership socket: heartbeats in, acknowledgements out (docs/protocols/membership.md).

Belongs here: the ZMQ ROUTER socket and its messages. Does not belong here: what a beat means (``routing.roster``).

The socket's descriptor is watched by the event loop. It is edge-triggered: readable means "look at the socket now", and
every look must go on until nothing is left, also after sending. Waking up costs more than a beat, so after a look that found
something the next one is ``PACE_S`` later, whatever comes: a single message is taken at once, a stream of them in batches.
A look is bounded too, so at most ``PER_LOOK`` messages are taken per ``PACE_S``: a flood never starves requests, and ZMQ's
fair queue gives each peer its share.

    idle, descriptor watched ──readable──▶ look ──found something──▶ paused for PACE_S ──▶ look ──▶ …
            ▲                                └──────── found nothing ─────────┐
            └──────────────────────────────────────────────────────────────────┘

Dead connections are the kernel's to find (``sockets.find_dead``): pings of ZMQ would cost as much as the beats themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from xpyd_sidecar import curve, sockets
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import WIRE_VERSION, Ack, Goodbye, Up
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.routing.roster import Refused

logger = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 10
PER_LOOK = 256
PACE_S = 0.05
LOG_AGAIN_S = 60.0
LOG_PEERS = 1024

_decode = msgspec.msgpack.Decoder(Up).decode
_encode = msgspec.msgpack.Encoder().encode


class Members:
    """Listens for agents."""

    def __init__(self, name: str, take: Callable[[Up], int | None], count: Callable[[str], None]) -> None:
        """``take`` returns how many legs are open on the instance that a message speaks for (None: not counted)."""
        self._name = name
        self._take = take
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self._watched = False
        self._paused: asyncio.TimerHandle | None = None
        self._logged: dict[str, float] = {}

    def listen(self, host: str, port: int, key: ServiceKey) -> int:
        """Bind; the port (chosen by the kernel where ``port`` is 0).

        Raises:
            ConfigError: the address cannot be bound.
        """
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an agent that comes back with the same identity replaces its old self
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        sockets.find_dead(socket, 15.0)
        curve.serve(socket, key, "membership")
        try:
            socket.bind(f"tcp://[{host}]:{port or '*'}" if ":" in host else f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"router.members_port: cannot bind {host}:{port}: {error}") from None
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self.look()
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def look(self) -> None:
        """Take what is there. Also called every second, should an edge ever be missed."""
        socket = self._socket
        if socket is None:
            return
        taken = 0
        while taken < PER_LOOK:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                logger.error("membership socket: %s", error)  # noqa: TRY400 (a traceback would say nothing more)
                break
            taken += 1
            self._on_message(socket, frames)
        if taken:
            self._watch(False)
            if self._paused is None:
                self._paused = self._loop.call_later(PACE_S, self._go_on)
        elif self._paused is None:
            self._watch(True)

    def _go_on(self) -> None:
        self._paused = None
        self.look()

    def _watch(self, watched: bool) -> None:
        if watched and not self._watched:
            self._loop.add_reader(self._fd, self.look)
        elif self._watched and not watched:
            self._loop.remove_reader(self._fd)
        self._watched = watched

    def _on_message(self, socket: zmq.Socket[bytes], frames: list[Any]) -> None:
        identity = frames[0].bytes
        seq, refused, in_flight = -1, "", 0
        try:
            if len(frames) != 2:
                raise Refused(f"a message is one frame, not {len(frames) - 1}")
            message = _decode(frames[1].buffer)
            if not isinstance(message, Goodbye):
                seq = message.seq
            in_flight = self._take(message) or 0
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            refused = f"not a message known here: {error}"
            self._count("undecodable")
        except Refused as error:
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
            self._log_refused(frames[-1], refused)
        ack = Ack(v=WIRE_VERSION, seq=seq, router=self._name, refused=refused, in_flight=in_flight)
        try:
            socket.send_multipart([identity, _encode(ack)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the peer is gone or does not read: it will beat again
            logger.debug("acknowledgement not sent: %s", error)

    def _log_refused(self, frame: Any, reason: str) -> None:
        try:
            peer = str(frame.get("Peer-Address"))
        except (zmq.ZMQError, UnicodeDecodeError):
            peer = "unknown"
        key, now = f"{peer} {reason[:200]}", self._loop.time()
        if now - self._logged.get(key, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return
        if len(self._logged) >= LOG_PEERS:
            self._logged.clear()
        self._logged[key] = now
        logger.warning("membership message refused: %s", reason[:500], extra={"peer": peer})

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._watch(False)
            if self._paused is not None:
                self._paused.cancel()
            self._socket.close()
            self._socket = None
        self._context.term()
