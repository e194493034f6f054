"""Readers on other hosts: a ZMQ ROUTER at the writer, a DEALER at each reader.

A reader says which message it has given back, and the writer never has more than a window of messages on the way to it. So
queues are bounded, and nothing is ever dropped on the way, which PUB sockets do. A broken connection is the end of that
reader: it does not come back, since what was on the way is lost. ZMQ's own heartbeats find peers that vanish without a
word; they are answered by its own thread, so a reader that computes for minutes still lives.

A second connection of each reader, over which nothing is said, is ended after less silence, and made again: it shows that a
reader is stopped or cut off before that is the end of it (``silent``).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.errors import QueueClosed, ReaderDropped
from xpyd_sidecar.broadcast.local import refusal
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import AuthError, ConfigError, PeerGone, ProtocolError
from xpyd_sidecar.process import curve

logger = logging.getLogger(__name__)

HEARTBEAT_MS: Final = 2_000
SILENCE_MS: Final = 10_000
"""A peer whose ZMQ thread is silent for that long is gone."""
SEEN_MS: Final = 2_500
"""The same, until it counts as silent; asked once a second."""
SECOND_MAX: Final = 1024
"""Bytes of a message on the second connections."""
ASK_S: Final = 1.0
"""How often a reader that is waited for is asked whether it is still connected."""
LINGER_MS: Final = 1_000
_NEVER_MS: Final = 3_600_000
_BROKEN: Final = (zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                  | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECT_RETRIED)


class Remotes:
    """The writer's side."""

    def __init__(self, queue: str, token: bytes, names: tuple[str, ...], *, host: str, port: int,
                 key: ServiceKey | None) -> None:
        """Listen. Raises ConfigError where that is not possible."""
        self.notes: dict[str, bytes] = {}
        """Of readers that have joined."""
        self.taken: dict[str, int] = {}
        """The last message that each live reader has given back."""
        self.gone: dict[str, str] = {}
        """Readers that were lost, until the queue has taken notice, and why."""
        self._queue = queue
        self._token = token
        self._names = names
        self._asked = 0.0
        self._seen: set[str] = set()
        """Readers whose second connection was there once."""
        self._to: dict[str, bytes] = {}
        self._from: dict[bytes, str] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._sock = self._context.socket(zmq.ROUTER)
        for option, value in (*_both_sides(host), (zmq.ROUTER_MANDATORY, 1), (zmq.MAXMSGSIZE, wire.CONTROL_MAX)):
            self._sock.setsockopt(option, value)
        self._second = self._context.socket(zmq.ROUTER)
        for option, value in (*_both_sides(host), (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1),
                              (zmq.MAXMSGSIZE, SECOND_MAX), (zmq.HEARTBEAT_IVL, SEEN_MS // 3),
                              (zmq.HEARTBEAT_TIMEOUT, SEEN_MS)):
            self._second.setsockopt(option, value)
        if key is not None:
            for each in (self._sock, self._second):
                curve.serve(each, key, "broadcast")
        try:
            self._sock.bind(f"tcp://{join_host_port(host, port) if port else _any_port(host)}")
            self._second.bind(f"tcp://{_any_port(host)}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{queue}: cannot listen on {host} port {port}: {error}") from None
        self.endpoint = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self.second = self._second.getsockopt_string(zmq.LAST_ENDPOINT)
        """Of the second connections."""

    def missing(self) -> tuple[str, ...]:
        """Readers that have not joined."""
        return tuple(name for name in self._names if name not in self.notes)

    def lagging_readers(self, number: int) -> tuple[str, ...]:
        """Live readers that have not given back message ``number``."""
        return tuple(name for name, taken in self.taken.items() if taken < number)

    def step(self, timeout_s: float) -> None:
        """Hear what readers say; waits at most that long for something."""
        if not self._sock.poll(int(timeout_s * 1000)):
            return
        while True:
            try:
                peer, *parts = self._sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._heard(peer, wire.unpack(self._from.get(peer, "a reader that joins"), parts[0] if parts else b""))
            except ProtocolError as error:
                logger.warning("broadcast %s: %s", self._queue, error)
                if peer in self._from:
                    self.lose(self._from[peer], error.reason)

    def send(self, number: int, parts: Sequence[bytes]) -> None:
        """Send a message to every live reader; those found gone are in ``gone`` then."""
        frames = [zmq.Frame(wire.pack_number(number, len(parts))), *(zmq.Frame(part) for part in parts)]
        for name in tuple(self.taken):
            self._say(name, frames)

    def ask(self, now: float) -> None:
        """Find readers whose connection is gone, where that has not been asked for a second."""
        if now - self._asked >= ASK_S:
            self._asked = now
            for name in tuple(self.taken):
                self._say(name, [zmq.Frame(wire.pack(wire.QueueWelcome()))])

    def silent(self) -> tuple[str, ...]:
        """Live readers of whose process nothing was heard for ``SEEN_MS``: stopped, or cut off."""
        found = []
        for name in self.taken:
            try:
                self._second.send_multipart([_second(self._token, name), b""], zmq.NOBLOCK)
                self._seen.add(name)
            except zmq.ZMQError:
                found.append(name)
        return tuple(name for name in found if name in self._seen)

    def lose(self, name: str, reason: str) -> None:
        """Count a reader as lost; it is told, if it still listens."""
        if self.taken.pop(name, None) is not None:
            self._say(name, [zmq.Frame(wire.pack(wire.QueueRefuse(reason)))])
            self.gone.setdefault(name, reason)

    def close(self, last: int) -> None:
        """Tell every reader that there is no more."""
        for name in tuple(self.taken):
            self._say(name, [zmq.Frame(wire.pack(wire.Bye(last)))])
        self._context.destroy(linger=LINGER_MS)

    def _heard(self, peer: bytes, message: wire.Control) -> None:
        name = self._from.get(peer)
        if name is None:
            if not isinstance(message, wire.QueueHello):
                raise ProtocolError("a reader that joins", f"sent {type(message).__name__} instead of Hello")
            reason = refusal(message, self._token, self._names, self._to)
            if reason:
                logger.warning("broadcast %s: refused reader %r: %s", self._queue, message.name, reason)
            else:
                name, self._to[message.name], self._from[peer] = message.name, peer, message.name
            answer = wire.pack(wire.QueueRefuse(reason) if reason else wire.QueueWelcome())
            try:
                self._sock.send_multipart([peer, answer], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                logger.info("broadcast %s: a reader that joined is gone again: %s", self._queue, error)
                if name is not None:
                    del self._to[name], self._from[peer]
                return
            if name is not None:
                self.notes[name] = message.note
                self.taken[name] = 0
        elif isinstance(message, wire.QueueTaken):
            if name in self.taken and message.number > self.taken[name]:
                self.taken[name] = message.number
        else:
            raise ProtocolError(name, f"sent {type(message).__name__} instead of Taken")

    def _say(self, name: str, frames: Sequence[zmq.Frame]) -> None:
        try:
            self._sock.send_multipart([self._to[name], *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if self.taken.pop(name, None) is not None:
                self.gone[name] = f"its connection broke: {error}"


class RemoteLink:
    """A reader's side."""

    def __init__(self, handle: wire.Handle, name: str, note: bytes, key: ServiceKey | None, timeout_s: float) -> None:
        """Connect and join.

        Raises:
            ConfigError: the queue wants the service's key and there is none, or its address is none.
            AuthError: the writer refuses; the reason is its own.
            PeerGone: the writer has ended, does not answer in time, or does not hold the same key.
            ProtocolError: its answer is none of this protocol.
        """
        self.writer = f"writer of {handle.queue}"
        if handle.secure and key is None:
            raise ConfigError(f"{handle.queue}: its writer wants the service's key, and this reader has none")
        self._context: zmq.Context[Any] = zmq.Context()
        self._sock = self._context.socket(zmq.DEALER)
        for option, value in (*_both_sides(_host(handle)), (zmq.MAXMSGSIZE, handle.message_max),
                              (zmq.RECONNECT_IVL, _NEVER_MS)):
            self._sock.setsockopt(option, value)
        self._second = self._context.socket(zmq.DEALER)
        for option, number in (*_both_sides(_host(handle)), (zmq.MAXMSGSIZE, SECOND_MAX),
                               (zmq.RECONNECT_IVL, SEEN_MS // 10)):
            self._second.setsockopt(option, number)
        self._second.setsockopt(zmq.ROUTING_ID, _second(handle.token, name))
        self._drained = 0.0
        if handle.secure and key is not None:
            for each in (self._sock, self._second):
                curve.connect(each, key, "broadcast")
        self._monitor = self._sock.get_monitor_socket(_BROKEN)
        self._poller = zmq.Poller()
        self._poller.register(self._sock, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._connect(handle, name, note, timeout_s)
        except BaseException:
            self.close()
            raise

    def _connect(self, handle: wire.Handle, name: str, note: bytes, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        try:
            if handle.second:
                self._second.connect(handle.second)
            self._sock.connect(handle.endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{handle.queue}: {handle.endpoint!r} is not an address: {error}") from None
        self._sock.send(wire.pack(wire.QueueHello(wire.WIRE_VERSION, handle.token, name, note)))
        while True:
            left = end - time.monotonic()
            if left <= 0:
                why = "not reachable, nobody lets readers in, or not the same service key"
                raise PeerGone(self.writer, f"no answer from {handle.endpoint} in {timeout_s:.1f} s ({why})")
            heard = self.receive(left)
            if heard is not None:
                break
        raw = heard[0].bytes
        answer = wire.unpack(self.writer, raw)
        if isinstance(answer, wire.QueueRefuse):
            raise AuthError(self.writer, answer.reason)
        if not isinstance(answer, wire.QueueWelcome):
            raise ProtocolError(self.writer, f"sent {type(answer).__name__} instead of Welcome")

    def receive(self, timeout_s: float) -> list[zmq.Frame] | None:
        """What comes next, as frames; None where nothing came in time.

        Raises:
            PeerGone: the connection broke, and everything that came was received.
        """
        ready = dict(self._poller.poll(int(max(timeout_s, 0.0) * 1000)))
        if self._sock in ready or self._monitor in ready:
            try:
                return self._sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                pass
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)
            raise PeerGone(self.writer, f"the connection broke ({zmq.Event(event['event'])!s})")
        return None

    def message(self, timeout_s: float) -> tuple[int, list[zmq.Frame]] | None:
        """The next message, its number and its parts; None where none came in time.

        Raises:
            QueueClosed: the writer has closed the queue.
            ReaderDropped: the writer does not wait for this reader any more.
            PeerGone: the connection broke.
            ProtocolError: the writer sent what is not allowed.
        """
        frames = self.receive(timeout_s)
        self._drain()
        if not frames:
            return None
        raw = frames[0].bytes
        head = wire.read_number(self.writer, raw)
        if head is not None:
            number, count = head
            if count != len(frames) - 1:
                raise ProtocolError(self.writer, f"message {number} has {len(frames) - 1} parts, and says {count}")
            return number, frames[1:]
        control = wire.unpack(self.writer, raw)
        if isinstance(control, wire.Bye):
            raise QueueClosed(f"{self.writer}: closed after message {control.last}")
        if isinstance(control, wire.QueueRefuse):
            raise ReaderDropped(self.writer, control.reason)
        if not isinstance(control, wire.QueueWelcome):
            raise ProtocolError(self.writer, f"sent {type(control).__name__} to a reader")
        return None

    def give_back(self, number: int) -> None:
        """All messages up to this one have been read."""
        try:
            self._sock.send(wire.pack(wire.QueueTaken(number)), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerGone(self.writer, "it does not take what is said to it") from None

    def _drain(self) -> None:
        now = time.monotonic()
        if now - self._drained < ASK_S:
            return
        self._drained = now
        while self._second.poll(0):
            self._second.recv_multipart(zmq.NOBLOCK)

    def close(self) -> None:
        """The writer sees it."""
        self._sock.disable_monitor()
        self._context.destroy(linger=0)


def _both_sides(host: str) -> tuple[tuple[int, int], ...]:
    """Queues without a limit of their own: the window bounds them, in messages and so in bytes.

    What a peer is asked to bear (TTL) counts from the last beat before a silence, which is up to ``HEARTBEAT_MS`` older.
    """
    return ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.IPV6, int(":" in host)),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
            (zmq.HEARTBEAT_TTL, SILENCE_MS + 2 * HEARTBEAT_MS))


def _host(handle: wire.Handle) -> str:
    return handle.endpoint.removeprefix("tcp://").rpartition(":")[0]


def _second(token: bytes, name: str) -> bytes:
    """How a reader's second connection is called: only who has the handle knows it."""
    return b"seen " + hmac.digest(token, name.encode(), hashlib.sha256)[:16]


def _any_port(host: str) -> str:
    return f"[{host}]:*" if ":" in host else f"{host}:*"
