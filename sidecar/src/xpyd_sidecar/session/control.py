"""The control thread beside the scheduler: one ROUTER for prefill engines that announce, one DEALER per decode engine that
this engine announces to. It moves messages and watches over liveness; what they mean is the scheduler side's business.

Nothing waits: sends go to bounded queues and are dropped when those are full, in which case the peer counts as lost. If the
thread dies, the engine hears of it by ``thread`` (``watched``).
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from functools import partial
from typing import Any, Final, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from xpyd_sidecar.contract.ids import HostPort, join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.leases import ListeningClock
from xpyd_sidecar.kv.messages import MESSAGE_MAX, Control, Pong, Prefix, Reject, ToDecode, ToPrefill, Welcome
from xpyd_sidecar.process import curve
from xpyd_sidecar.threads.watched import Faults, WatchedThread

logger = logging.getLogger(__name__)

QUEUE_MAX: Final = 8192
POLL_MS: Final = 100
IDLE_S: Final = 120.0
JOIN_S: Final = 5.0
SOCKETS_MAX: Final = 3 * 4096 + 16
"""Three for each decode engine, since two tell of its connection; ZeroMQ's own bound is 1,023."""
_HANDSHAKE_FAILED: Final = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                            | zmq.EVENT_HANDSHAKE_FAILED_AUTH)


class ControlEvents(Protocol):
    """What the scheduler side does with what the thread hears; called on the control thread."""

    def from_prefill(self, peer: bytes, message: Control) -> None:
        """A prefill engine says something; ``peer`` names its connection."""

    def unreadable(self, peer: bytes, prefix: Prefix) -> None:
        """A prefill engine of another wire version says something."""

    def from_decode(self, peer: Peer, message: ToPrefill) -> None:
        """A decode engine answers."""

    def decode_lost(self, peer: Peer, outcome: Outcome, reason: str) -> None:
        """A decode engine refuses, does not answer, or lives another life."""

    def tell_again(self, peer: Peer) -> None:
        """The connection to a decode engine broke: what it was told may be lost."""

    def open_peers(self) -> set[Peer]:
        """Decode engines that have transfers open."""

    def greeting(self, peer: Peer) -> ToDecode:
        """The first message to a decode engine."""

    def tick(self, now: float) -> None:
        """Do what is due; called again and again on the control thread."""


class DecodePeer:
    """One decode engine, as prefill's control thread sees it."""

    def __init__(self, sock: zmq.Socket[Any], monitor: zmq.Socket[Any], now: float, listened: float) -> None:
        self.sock = sock
        self.monitor = monitor
        """Tells that there is a connection, and that it broke; ZMQ makes another."""
        self.connected = False
        """What was said may have left. What was said before stays in ZMQ's queue until it is."""
        self.heard = listened
        """By the time in which this side has listened (``leases.ListeningClock``): one that was held up itself
        blames nobody.
        """
        self.pinged = self.used = now
        self.welcome = False
        self.seq = 0


class ControlThread:
    """The thread and its sockets."""

    def __init__(self, handler: ControlEvents, key: ServiceKey, *, host: str, port: int, peer_timeout_s: float) -> None:
        """Bind; ``start`` runs the thread.

        Raises:
            ConfigError: the port cannot be bound.
        """
        self._handler = handler
        self._key = key
        self._timeout = peer_timeout_s
        self._listening = ListeningClock(peer_timeout_s)
        self._listened = 0.0
        """As of the last look."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MESSAGE_MAX), (zmq.SNDHWM, 1024), (zmq.RCVHWM, 1024),
                              (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.IPV6, int(":" in host))):
            self._router.setsockopt(option, value)
        curve.serve(self._router, key, "control")
        self._monitor = self._router.get_monitor_socket(_HANDSHAKE_FAILED)
        try:
            self._router.bind(f"tcp://{join_host_port(host, port)}")  # 0: any that is free
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"control_port: cannot listen on {host} port {port}: {error}") from None
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address: HostPort = join_host_port(host, int(endpoint.rpartition(":")[2]))
        self._decodes: dict[Peer, DecodePeer] = {}
        self._posts: deque[tuple[Peer | bytes, Control]] = deque()
        """Messages to send: to a decode engine, or (bytes) back over a prefill engine's connection."""
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        for sock in (self._router, self._monitor, self._wake_out):
            self._poller.register(sock, zmq.POLLIN)
        self._stop = threading.Event()
        self._polls, self._ticks = Faults("to wait for its sockets"), Faults("its look at deadlines")
        self.thread = WatchedThread("xpyd-control", self._run)

    def start(self) -> None:
        """Start the control thread."""
        self.thread.start()

    def post(self, to: Peer | bytes, message: Control) -> bool:
        """Send a message soon; False where the queue is full."""
        if len(self._posts) >= QUEUE_MAX:
            logger.error("xpyd: control queue full, dropped %s", type(message).__name__)
            return False
        self._posts.append((to, message))
        self._wake()
        return True

    def stop(self) -> None:
        """End the thread and close every socket."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake()
        if not self.thread.end(JOIN_S):
            return
        self._context.destroy(linger=0)
        self._wake_in.close()
        self._wake_out.close()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"x")
        except (BlockingIOError, OSError):
            return  # the pipe is full, so the thread wakes anyway; or it has ended

    def _run(self) -> None:
        tick_at = 0.0
        while not self._stop.is_set():
            found = self._polls.try_once(partial(self._poller.poll, POLL_MS))
            if found is None:
                continue
            ready = dict(found)
            try:
                if self._wake_out.fileno() in ready:
                    self._wake_out.recv(4096)
                self._send_posts()
                if self._router in ready:
                    self._hear_prefills()
                if self._monitor in ready:
                    self._hear_monitor()
                for peer, decode in list(self._decodes.items()):
                    if decode.sock in ready:
                        self._hear_decode(peer, decode)
                    if decode.monitor in ready:
                        self._hear_connection(peer, decode)
                self._send_posts()
            except Exception:  # one peer's fault must not end the thread that serves all others
                logger.exception("xpyd: the control thread met an error")
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + POLL_MS / 1000
                self._ticks.try_once(partial(self._tick, now))

    def _tick(self, now: float) -> None:
        self._watch(now)
        self._handler.tick(now)
        self._send_posts()

    def _send_posts(self) -> None:
        for _ in range(len(self._posts)):
            to, message = self._posts.popleft()
            parts = messages.pack(message)
            if isinstance(to, bytes):
                try:
                    self._router.send_multipart([to, *parts], zmq.NOBLOCK)
                except zmq.ZMQError as error:
                    logger.info("xpyd: %s to a prefill engine not sent: %s", type(message).__name__, error)
                continue
            decode = self._decodes.get(to) or self._connect(to)
            if decode is not None:
                decode.used = time.monotonic()
                self._send(to, decode, parts)

    def _connect(self, peer: Peer) -> DecodePeer | None:
        try:
            sock = self._context.socket(zmq.DEALER)
            monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self._handler.decode_lost(peer, Outcome.OVERFLOW, f"this engine has no socket for it: {error}")
            return None
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MESSAGE_MAX), (zmq.SNDHWM, 4096), (zmq.RCVHWM, 4096),
                              (zmq.IPV6, 1), (zmq.ROUTING_ID, secrets.token_bytes(16))):  # kept over a reconnect
            sock.setsockopt(option, value)
        curve.connect(sock, self._key, "control")
        try:
            sock.connect(f"tcp://{peer.control}")
        except zmq.ZMQError as error:
            _close(sock, monitor)
            self._handler.decode_lost(peer, Outcome.PROTOCOL, f"control address {peer.control!r}: {error}")
            return None
        for each in (sock, monitor):
            self._poller.register(each, zmq.POLLIN)
        decode = self._decodes[peer] = DecodePeer(sock, monitor, time.monotonic(), self._listened)
        self._send(peer, decode, messages.pack(self._handler.greeting(peer)))
        return decode

    def _send(self, peer: Peer, decode: DecodePeer, parts: tuple[bytes, bytes]) -> None:
        try:
            decode.sock.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            self._lose(peer, Outcome.PEER_LOST, "its queue is full")

    def _hear_prefills(self) -> None:
        for _ in range(256):
            try:
                peer, *parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                prefix = messages.prefix(parts[0] if parts else b"")
                if prefix.version != messages.WIRE_VERSION:
                    self._handler.unreadable(peer, prefix)
                else:
                    self._handler.from_prefill(peer, messages.unpack(parts[1] if len(parts) == 2 else b""))
            except messages.MessageError as error:
                logger.warning("xpyd: refused a control message: %s", error)
                self.post(peer, Reject(Outcome.PROTOCOL, str(error)))

    def _hear_monitor(self) -> None:
        event = recv_monitor_message(self._monitor)
        logger.warning("xpyd: refused a control connection to %s: the peer does not hold the service key, or speaks "
                       "something else", event["endpoint"].decode(errors="replace"))

    def _hear_decode(self, peer: Peer, decode: DecodePeer) -> None:
        for _ in range(256):
            try:
                parts = decode.sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            decode.heard = self._listened
            try:
                prefix = messages.prefix(parts[0])
                if prefix.version != messages.WIRE_VERSION:
                    reason = f"control wire version {messages.WIRE_VERSION} here, {prefix.version} there"
                    self._handler.decode_lost(peer, Outcome.INCOMPATIBLE, reason)
                    continue
                message = messages.unpack(parts[1] if len(parts) == 2 else b"")
            except messages.MessageError as error:
                self._handler.decode_lost(peer, Outcome.PROTOCOL, str(error))
                continue
            if isinstance(message, Welcome):
                decode.welcome = True
            elif isinstance(message, Reject):
                # The next leg greets anew: decode then fails it fast, or takes it where it had only forgotten this peer.
                self._lose(peer, message.outcome, message.reason)
                return
            elif isinstance(message, Pong):
                if message.incarnation != peer.incarnation:
                    self._handler.decode_lost(peer, Outcome.INCARNATION, f"{message.incarnation} has its address now")
            elif isinstance(message, messages.Drop):
                self._handler.from_decode(peer, message)
            else:
                self._handler.decode_lost(peer, Outcome.PROTOCOL, f"sent {type(message).__name__} to a prefill engine")

    def _hear_connection(self, peer: Peer, decode: DecodePeer) -> None:
        """A connection is there, or is no more: then what was on its way is lost, in both directions."""
        if self._decodes.get(peer) is not decode:
            return  # given up for what it has said last
        event = recv_monitor_message(decode.monitor)["event"]
        broke = decode.connected and event == zmq.EVENT_DISCONNECTED
        decode.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if broke:
            logger.info("xpyd: the control connection to %s broke, and is made again", peer.instance)
            self._send(peer, decode, messages.pack(self._handler.greeting(peer)))
            self._handler.tell_again(peer)

    def _watch(self, now: float) -> None:
        wanted = self._handler.open_peers()
        self._listened = self._listening.advance(now)
        for peer, decode in list(self._decodes.items()):
            if peer not in wanted:
                if decode.welcome:
                    decode.heard = self._listened  # it was asked nothing; silence counts from the next announcement on
                if now - decode.used > IDLE_S or (not decode.welcome and now - decode.used > self._timeout):
                    self._forget(peer)
                continue
            if self._listened - decode.heard > self._timeout:
                why = "it is silent" if decode.welcome else "no answer (not reachable, or it does not hold the service key)"
                self._lose(peer, Outcome.PEER_LOST, f"{why} for {self._timeout} s")
            elif now - decode.pinged > self._timeout / 4:
                decode.pinged = now
                decode.seq += 1
                self._send(peer, decode, messages.pack(messages.Ping(decode.seq)))

    def _lose(self, peer: Peer, outcome: Outcome, reason: str) -> None:
        self._forget(peer)
        self._handler.decode_lost(peer, outcome, reason)

    def _forget(self, peer: Peer) -> None:
        decode = self._decodes.pop(peer, None)
        if decode is not None:
            for each in (decode.sock, decode.monitor):
                self._poller.unregister(each)
            _close(decode.sock, decode.monitor)


def _close(sock: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
    sock.disable_monitor()
    monitor.close(0)
    sock.close(0)
