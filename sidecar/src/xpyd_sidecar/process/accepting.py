"""Listening, and accepting connections: a few per turn of the loop, and none while there is no file for them.

Belongs here: listening sockets, of the router's clients and of the agent. Does not belong here: what a connection does
(``http.connection``, ``agent.control``), how many may be open (who asks for an ``Acceptor`` says).

asyncio's own server accepts as many connections in a row as its backlog has, and when it has no file left it goes on to the
end of that row, with a line in the log for each.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from xpyd_sidecar.listening import both_families, bound
from xpyd_sidecar.process import resources

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted."""
AT_ONCE = 64
"""Accepted in a turn of the loop."""
LACK_S = 1.0
"""How long nobody is accepted after a file was lacking. Those who come wait in the kernel."""
FULL_S = 0.05
"""The same when as many connections are open as may be."""
HANDSHAKE_S = 10.0
"""How long a client may take to shake hands."""
SHUTDOWN_S = 3.0
"""How long it may take to say goodbye."""
PRESSED_S = 1.0
"""How long a handshake may take where others wait to be accepted."""


class Acceptor:
    """Accepts on sockets that listen: those of one port, or that of one path."""

    def __init__(self, sockets: list[socket.socket], make: Callable[[], asyncio.Protocol], full: Callable[[int], bool],
                 tls: ssl.SSLContext | None = None, *, who: str = "clients") -> None:
        """``make``: the protocol of a connection. ``full``: whether more would be too many, with so many half-open ones.

        ``who``: those who connect, for the log.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._make = make
        self._full = full
        self._tls = tls
        self._opening: dict[asyncio.Task[None], float] = {}
        """Half-open ones, oldest first, and when they came."""
        self._paused: asyncio.TimerHandle | None = None
        self._complaint = resources.Complaint(f"{who} are not accepted for a second")
        self.errors = 0
        """How often a connection could not be accepted for a lack of our own."""
        self._read()

    @property
    def port(self) -> int:
        """That of the first socket."""
        return int(self._sockets[0].getsockname()[1])

    @property
    def listening(self) -> bool:
        """Not closed."""
        return bool(self._sockets)

    @property
    def opening(self) -> int:
        """How many were accepted and are not yet connections."""
        return len(self._opening)

    def close(self, *, at_once: bool = False) -> None:
        """Listen no more. Who is in the middle of a TLS handshake is cut off.

        Who was accepted without one may have sent a request, which may be served already: a loop reads a connection before
        it tells who opened it. ``at_once``: they are cut off too.
        """
        if self._paused is not None:
            self._paused.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self._sockets = []
        for task in list(self._opening) if at_once or self._tls is not None else ():
            task.cancel()

    def _read(self) -> None:
        self._paused = None
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _pause(self, seconds: float) -> None:
        for listening in self._sockets:
            self._loop.remove_reader(listening)
        self._paused = self._loop.call_later(seconds, self._read)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            if self._full(len(self._opening)) and not self._end_slowest():
                self._pause(FULL_S)
                return
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if resources.is_own_lack(error):
                    self.errors += 1
                    self._complaint.add(error)
                    self._pause(LACK_S)
                    return
                logger.debug("a connection ended before it was accepted: %s", error)  # accept(2): as if there was none
                continue
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted))
            self._opening[task] = self._loop.time()
            task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)

    def _end_slowest(self) -> bool:
        """Cut off the handshake that has taken longest, if it has taken long; whether there was one."""
        for task, began in self._opening.items():
            if self._loop.time() - began < PRESSED_S:
                return False
            del self._opening[task]
            task.cancel()
            return True
        return False

    async def _open(self, accepted: socket.socket) -> None:
        tls = self._tls is not None
        try:
            await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S if tls else None,
                ssl_shutdown_timeout=SHUTDOWN_S if tls else None)
        except OSError as error:  # the client's end, or what it said instead of a handshake
            logger.debug("a connection ended before its first request: %s", error)


async def bind(host: str, port: int, *, backlog: int = BACKLOG) -> list[socket.socket]:
    """Sockets that listen on all addresses of ``host``.

    Raises:
        OSError: an address cannot be listened on.
    """
    found = await asyncio.get_running_loop().getaddrinfo(bound(host) or None, port, type=socket.SOCK_STREAM,
                                                         flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            both_families(listening, host)
            listening.bind(address)
            listening.listen(backlog)
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return sockets


def same_host(peer: Any, own: Any) -> bool:
    """Whether a client is on this host, by the names of its socket's two ends (``getpeername``, ``getsockname``).

    Through ``kubectl port-forward`` clients come from the loopback address of the pod.
    """
    if not isinstance(peer, tuple) or not isinstance(own, tuple):
        return False
    try:
        there = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(there, "ipv4_mapped", None)
    return (mapped or there).is_loopback or peer[0] == own[0]


def of_this_host(transport: asyncio.BaseTransport) -> bool:
    """Whether a connection that was accepted comes from this host."""
    return same_host(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """The descriptor of a connection whose bytes may be written to it as they are, else -1."""
    if transport.get_extra_info("sslcontext") is not None:
        return -1
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
