"""The sockets of membership: heartbeats in, acknowledgements out (docs/protocols/membership.md).

Messages are taken in the event loop, in batches. A ZMQ socket's descriptor is edge-triggered: readable means "look at the
socket now", and every look must go on until nothing is left, also after sending. Waking up costs more than a heartbeat, so
after a look that found something the next one is ``PACE_S`` later, whatever comes: a single message is taken at once, a
stream of them in batches. A look is bounded too, so at most ``PER_LOOK`` messages are taken per ``PACE_S``: a flood never
starves requests, and ZMQ's fair queue gives each peer its share. What is answered leaves at the end of a look: ZMQ's own
thread is woken once for all of it, and not for each.

    idle, descriptor watched ──readable──▶ look ──found something──▶ paused for PACE_S ──▶ look ──▶ …
            ▲                                │
            └──────── found nothing ─────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq

from xpyd_sidecar import listening
from xpyd_sidecar.contract.demand import RouterDemand
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import WIRE_VERSION, Ack, AgentMessage, Heartbeat, PrefixChanges, Up
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process import curve, sockets
from xpyd_sidecar.router.fleet.member import BeatRefused, Undecodable

logger = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 10
PER_LOOK = 512
PACE_S = 0.1
FIND_DEAD_S = 15.0
LOG_AGAIN_S = 60.0
LOG_PEERS = 1024

_decode = msgspec.msgpack.Decoder(AgentMessage).decode
_encode = msgspec.msgpack.Encoder().encode


class Verdict(NamedTuple):
    """What a router thinks of an instance, as acknowledgements say it (``Ack``)."""

    ejected: bool = False
    stalled: bool = False
    hold: bool = False
    prefixes: int = 0


class HeartbeatListener:
    """Listens for agents: a ROUTER socket that is read in batches.

    What was refused is logged once a minute per peer and reason, and of a bounded number of them.
    """

    def __init__(self, name: str, take: Callable[[Up], int | None], count: Callable[[str], None],
                 verdict: Callable[[Up], Verdict] = lambda _: Verdict(),
                 refusals: Callable[[], tuple[str, ...]] = tuple) -> None:
        """``name``: the router's, told in acknowledgements. ``take`` returns how many legs are open on the instance that a
        message speaks for (None: not counted), and ``verdict`` what the router thinks of it. ``refusals``: what
        requests it refuses, for other routers.
        """
        self._name = name
        self._take = take
        self._count = count
        self._verdict = verdict
        self._refusals = refusals
        self.demand: Callable[[], RouterDemand | None] = lambda: None
        """Whom to ask what other routers are told of tenants; None: there are none."""
        self.take_prefixes: Callable[[PrefixChanges], None] | None = None
        """Who takes what is told of caches; None: nobody does, and agents are told so."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self._watched = False
        self._paused: asyncio.TimerHandle | None = None
        self._said: dict[str, float] = {}

    def _on_message(self, frames: list[zmq.Frame]) -> bytes | None:
        """Take a message. Returns the acknowledgement; None where it has none."""
        message: AgentMessage | None = None
        in_flight, verdict, result, refused = 0, Verdict(), "taken", ""
        try:
            message = _read(frames)
            if isinstance(message, PrefixChanges):
                if self.take_prefixes is not None:
                    self.take_prefixes(message)
                return None
            in_flight, verdict = self._take(message) or 0, self._verdict(message)
        except BeatRefused as error:
            result, refused = error.result, str(error)
        except Exception:
            # A bug here must cost one message, not the listener.
            logger.exception("a membership message failed inside the router")
            result, refused = "failed", "the router failed; its log says why"
        self._count(result)
        if refused:
            self._say(frames[-1], refused)
        seq = message.seq if isinstance(message, Heartbeat) else -1
        return _encode(Ack(v=WIRE_VERSION, seq=seq, router=self._name, refused=refused, in_flight=in_flight,
                           ejected=verdict.ejected, poisons=self._refusals(), stalled=verdict.stalled,
                           demand=self.demand(), hold=verdict.hold,
                           prefixes=-1 if self.take_prefixes is None else verdict.prefixes))

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
        logger.warning("membership message refused: %s", reason[:500], extra={"peer": peer})

    def listen(self, host: str, port: int, key: ServiceKey) -> int:
        """Bind, and begin; the port (chosen by the kernel where ``port`` is 0). ``key``: messages are encrypted with it.
        Raises ConfigError: the address cannot be bound; it names the setting.
        """
        socket = self._context.socket(zmq.ROUTER)
        curve.serve(socket, key, "membership")
        host = listening.bound(host)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that comes back with the same identity replaces its old self
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        sockets.find_dead(socket, FIND_DEAD_S)
        try:
            socket.bind(f"tcp://{join_host_port(host, port or '*')}")
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"router.members_port: cannot bind {join_host_port(host, port)}: {error}") from None
        self._socket, self._fd = socket, int(socket.getsockopt(zmq.FD))
        self.read_messages()
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def read_messages(self) -> None:
        """Take and answer the messages that have come. Also called every second, should an edge ever be missed."""
        if self._socket is None:
            return
        taken, receive = 0, self._socket.recv
        answers: list[tuple[bytes, bytes]] = []
        while taken < PER_LOOK and not self._socket.closed:
            try:
                sender = receive(zmq.NOBLOCK)
                frames = [receive(zmq.NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(receive(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                logger.error("membership socket: %s", error)  # noqa: TRY400 (a traceback would say nothing more)
                break
            taken += 1
            answer = self._on_message(frames)
            if answer is not None:
                answers.append((sender, answer))
        if answers and not self._socket.closed:
            self._send(self._socket, answers)
        if taken:
            self._watch(False)
            if self._paused is None:
                self._paused = self._loop.call_later(PACE_S, self._go_on)
        elif self._paused is None:
            self._watch(True)

    def _send(self, socket: zmq.Socket[bytes], answers: list[tuple[bytes, bytes]]) -> None:
        send = super(zmq.Socket, socket).send  # without what other kinds of sockets need, a third of the time
        for sender, answer in answers:
            try:
                send(sender, zmq.NOBLOCK | zmq.SNDMORE)
                send(answer, zmq.NOBLOCK)
            except zmq.ZMQError as error:  # the peer is gone or does not read: it will beat again
                logger.debug("answer not sent: %s", error)

    def _go_on(self) -> None:
        self._paused = None
        self.read_messages()

    def _watch(self, watched: bool) -> None:
        if watched and not self._watched:
            self._loop.add_reader(self._fd, self.read_messages)
        elif self._watched and not watched:
            self._loop.remove_reader(self._fd)
        self._watched = watched

    def close(self) -> None:
        """Stop listening."""
        self._watch(False)
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        if self._socket is not None:
            self._socket.close()
        self._context.term()


def _read(frames: list[zmq.Frame]) -> AgentMessage:
    """The message. Raises BeatRefused."""
    if len(frames) != 1:
        raise BeatRefused(f"a message is one frame, not {len(frames)}")
    try:
        message: AgentMessage = _decode(frames[0].bytes)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Undecodable(f"not a message known here: {error}") from None
    return message
