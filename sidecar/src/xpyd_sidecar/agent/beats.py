"""Carries beats to every router and their acks back.

One DEALER per router address, so that each ack has a known sender. A name among the router addresses stands for every
address it resolves to; it is looked up again and again. While a lookup fails the addresses of the last answer stay: an
outage of the name service takes no instance out of service.

A socket queues for an established connection only (ZMQ_IMMEDIATE): a router that is away gets the newest state when it is
back, never a heap of old beats. The sockets are polled on ZMQ_FD, which tells of *edges*: after every send or receive the
events are read again until nothing is left (``_Link.pump``).

While the keys of a service change, routers that still have the key of before are told with that one: a link whose handshake
fails begins anew with the other key, and so on until a router answers. What it carries is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from xpyd_sidecar.agent.beat import KnownRouter
from xpyd_sidecar.agent.prefix_teller import PrefixTeller
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import HostPort, join_host_port, split_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import Ack, GoodbyeMessage, Heartbeat
from xpyd_sidecar.process import curve, resources, sockets

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) → IP addresses; raises OSError when the lookup fails."""

WARN_EVERY_S = 30.0
RESOLVE_TIMEOUT_S = 5.0
MAX_ADDRESSES = 64
"""Per name; a longer answer is cut with a warning."""
GOODBYE_LINGER_S = 1.0
MAX_ACK_BYTES = 64 << 10
_ACK = msgspec.msgpack.Decoder(Ack)
_EVENTS = (zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
           | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_LOCKED_OUT = frozenset({zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                        zmq.EVENT_HANDSHAKE_FAILED_AUTH})
"""The last one while a router is there and does not take our key: after a failed handshake it is connected to again."""
_PROBLEMS = {
    zmq.EVENT_CONNECTED: "connected, the handshake is not done: does it hold another service key?",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake fails: does it hold another service key?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake fails: is it an xpyd router?",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the handshake fails: it holds another service key",
    zmq.EVENT_CLOSED: "cannot be reached",
}


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """The system's resolver; IP addresses pass through.

    Of a name with addresses of both families the IPv4 ones are taken: they are two ways to the same routers, and those of a
    machine without IPv6 listen on no other.
    """
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    v4 = [str(info[4][0]) for info in infos if info[0] == socket.AF_INET]
    return list(dict.fromkeys(v4 or [str(info[4][0]) for info in infos]))


def dealer(context: zmq.Context[zmq.Socket[bytes]], key: ServiceKey, heartbeat_s: float) -> zmq.Socket[bytes]:
    """A socket for one router, not yet connected."""
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    sock.immediate = True
    sock.sndhwm = sock.rcvhwm = 64
    sock.maxmsgsize = MAX_ACK_BYTES
    sock.ipv6 = True
    sock.reconnect_ivl, sock.reconnect_ivl_max = 100, 2000
    sock.connect_timeout = 3000
    sock.handshake_ivl = 3000
    sockets.find_dead(sock, max(3.0, 2 * heartbeat_s))
    curve.connect(sock, key, "membership")
    return sock


class Beats:
    """Links to the routers. ``on_ack`` is called after each ack that changes what a router is known to have heard."""

    def __init__(self, routers: Sequence[HostPort], key: ServiceKey, *, heartbeat_s: float, resolve_s: float,
                 resolve: Resolve = system_resolve, on_ack: Callable[[], None] = lambda: None,
                 before: ServiceKey | None = None) -> None:
        """``before``: the key that the service had before, for routers that still have it."""
        self._names = {address: frozenset[HostPort]() for address in routers}
        self._keys = (key,) if before is None else (key, before)
        self._heartbeat_s = heartbeat_s
        self._resolve_s = resolve_s
        self._resolve = resolve
        self._on_ack = on_ack
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[HostPort, _Link] = {}
        self._newest = b""
        self._warned: dict[str, float] = {}
        self._sent_at = float("inf")
        """When a beat was last sent."""

    async def keep_resolving(self) -> None:
        """Look the names up every ``resolve_s``, for ever; cancel it to end it."""
        while True:
            await self.resolve_once()
            await asyncio.sleep(self._resolve_s)

    async def resolve_once(self) -> None:
        """Look every name up and connect to, or disconnect from, what changed."""
        await asyncio.gather(*(self._resolve_name(name) for name in self._names))
        wanted = frozenset[HostPort]().union(*self._names.values())
        for address in self._links.keys() - wanted:
            logger.info("router left the name service", extra={"router": address})
            self._links.pop(address).close(linger_s=0.0)
        for address in sorted(wanted - self._links.keys()):
            self._begin(KnownRouter(address, since=asyncio.get_running_loop().time()), 0)

    def send(self, beat: Heartbeat, prefixes: HeldPrefixes | None = None) -> None:
        """Hand one beat to every link; a link that is not connected sends it once it is. ``prefixes``: what is in the
        engine's cache, which routers that want to know are told behind the beat; None: it is not known.
        """
        self._newest = msgspec.msgpack.encode(beat)
        now = asyncio.get_running_loop().time()
        late_s, self._sent_at = max(0.0, now - self._sent_at - self._heartbeat_s), now
        for link in list(self._links.values()):
            link.send(self._newest)
            if prefixes is not None:
                link.tell(beat, prefixes)
            self._complain(link, late_s)
            if len(self._keys) > 1 and link.locked_out(self._heartbeat_s):
                self._other_key(link)

    def routers(self) -> tuple[KnownRouter, ...]:
        """What is known of each router, in order of address."""
        return tuple(self._links[address].view for address in sorted(self._links))

    async def close(self, goodbye: GoodbyeMessage | None = None, linger_s: float = GOODBYE_LINGER_S) -> None:
        """Say goodbye, wait for its acks for at most ``linger_s``, and close."""
        if goodbye is not None and self._links:
            text = msgspec.msgpack.encode(goodbye)
            for link in self._links.values():
                link.send(text)
            heard = [link for link in self._links.values() if link.view.acked >= 0]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await asyncio.gather(*(link.left.wait() for link in heard))
        for link in self._links.values():
            link.close(linger_s=0.1 if goodbye is not None else 0.0)
        self._links.clear()
        self._context.term()

    def _begin(self, view: KnownRouter, which: int) -> None:
        """A link with one of our keys. Without files for it there is none, and the next look-up tries again."""
        try:
            link = _Link(view, self._context, self._keys[which], self._heartbeat_s, self._on_ack, which=which)
        except zmq.ZMQError as error:
            if not resources.is_own_lack(error):
                raise
            self._warn(view.address, f"router {view.address} is told nothing yet: {resources.words(error)}")
            return
        self._links[HostPort(view.address)] = link
        if self._newest:
            link.send(self._newest)

    def _other_key(self, link: _Link) -> None:
        logger.debug("router does not take this key, the other one is tried", extra={"router": link.view.address})
        self._links.pop(HostPort(link.view.address)).close(linger_s=0.0)
        self._begin(link.view, (link.which + 1) % len(self._keys))

    async def _resolve_name(self, name: HostPort) -> None:
        host, port = split_host_port(name)
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = sorted(set(await self._resolve(host, port)))
        except TimeoutError:
            self._warn(name, f"router address {name}: no answer to the lookup within {RESOLVE_TIMEOUT_S:g} s")
        except OSError as error:
            self._warn(name, f"router address {name}: {error}")
        else:
            if len(found) > MAX_ADDRESSES:
                self._warn(name, f"router address {name}: {len(found)} addresses, the first {MAX_ADDRESSES} are used")
            self._names[name] = frozenset(join_host_port(ip, port) for ip in found[:MAX_ADDRESSES])

    def _complain(self, link: _Link, late_s: float) -> None:
        """``late_s``: this process was so late with its beat itself; what came meanwhile lies unread."""
        now = asyncio.get_running_loop().time()
        view, problem = link.view, link.problem()
        silent_s = now - max(view.heard, view.since)
        if view.refused:
            self._warn(view.address, f"router {view.name or view.address} refuses the beats: {view.refused}")
        elif silent_s > 2 * self._heartbeat_s:
            if silent_s - late_s > 2 * self._heartbeat_s:
                self._warn(view.address, f"router {view.address} has not acknowledged for {silent_s:.0f} s: "
                                         f"{problem or 'no answer'}")
        elif self._warned.pop(view.address, None) is not None:
            logger.info("router acknowledges again", extra={"router": view.address})

    def _warn(self, about: str, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned.get(about, float("-inf")) >= WARN_EVERY_S:
            self._warned[about] = now
            logger.warning(message)


class _Link:
    """One DEALER to one address."""

    def __init__(self, view: KnownRouter, context: zmq.Context[zmq.Socket[bytes]], key: ServiceKey, heartbeat_s: float,
                 on_ack: Callable[[], None], *, which: int) -> None:
        """``view``: what is known of the router; ``which``: of our keys it is made with."""
        self._loop = asyncio.get_running_loop()
        self._on_ack = on_ack
        self._began = self._loop.time()
        self.which = which
        self.view = view
        self.left = asyncio.Event()
        self._unsent = b""
        self._teller = PrefixTeller()
        self._last_event = zmq.Event(0)
        sock = dealer(context, key, heartbeat_s)
        self._socket = sock
        try:
            self._monitor: zmq.Socket[Any] = sock.get_monitor_socket(_EVENTS)
        except zmq.ZMQError:
            sock.close()
            raise
        self._fd = int(sock.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.pump)
        sock.connect(f"tcp://{view.address}")

    def send(self, text: bytes) -> None:
        """Send now, or when the connection stands; only the newest message is kept until then."""
        self._unsent = text
        self.pump()

    def tell(self, beat: Heartbeat, prefixes: HeldPrefixes) -> None:
        """Send what has changed in the cache behind ``beat``; what cannot be sent now is told anew later."""
        for changes in self._teller.changes(beat, prefixes):
            if self._unsent or self._socket.closed or not self._send(msgspec.msgpack.encode(changes)):
                self._teller.on_lost()
                return
        self.pump()

    def pump(self) -> None:
        """Send what is unsent and take in what came, until the socket has neither to offer."""
        while not self._socket.closed:
            events = self._socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if events & zmq.POLLIN:
                self._take(self._socket.recv_multipart(zmq.NOBLOCK))
            elif self._unsent and events & zmq.POLLOUT:
                if not self._send(self._unsent):  # the connection ended in between
                    return
                self._unsent = b""
            else:
                return

    def _send(self, text: bytes) -> bool:
        try:
            self._socket.send(text, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def problem(self) -> str:
        """What the transport says about a router that is silent; empty when the connection stands."""
        while self._monitor.poll(0):
            event = zmq.Event(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])
            if event != zmq.EVENT_DISCONNECTED or self._last_event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._last_event = event
        return _PROBLEMS.get(self._last_event, "")

    def locked_out(self, silent_s: float) -> bool:
        """The router has been there for ``silent_s`` without a handshake that ended well, nor an answer."""
        if self._loop.time() - max(self.view.heard, self._began) < silent_s:
            return False
        self.problem()  # reads what happened meanwhile
        return self._last_event in _LOCKED_OUT

    def close(self, linger_s: float) -> None:
        """Disconnect."""
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=round(1000 * linger_s))

    def _take(self, frames: list[bytes]) -> None:
        try:
            ack = _ACK.decode(frames[-1])
        except msgspec.MsgspecError as error:
            logger.warning("router sent what is no ack: %s", error, extra={"router": self.view.address})
            return
        if ack.seq == -1:
            self.left.set()
            return
        self._teller.on_ack(ack.seq, ack.prefixes)
        if ack.refused and ack.refused != self.view.refused:
            logger.warning("router refuses the beats: %s", ack.refused,
                           extra={"router": self.view.address, "router_name": ack.router})
        self.view = msgspec.structs.replace(self.view, name=ack.router, acked=max(self.view.acked, ack.seq),
                                            heard=self._loop.time(), refused=ack.refused, in_flight=ack.in_flight,
                                            ejected=ack.ejected, poisons=ack.poisons, demand=ack.demand,
                                            stalled=ack.stalled, hold=ack.hold)
        self._on_ack()
