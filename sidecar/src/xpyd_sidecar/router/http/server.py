"""The HTTP/1.1 server that clients talk to: asyncio protocols and httptools, no framework.

Belongs here: listening, the set of connections, the turn of the clock, draining. Does not belong here: parsing
(``connection``), paths (``application``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from email.utils import formatdate

from xpyd_sidecar.accepting import Acceptor, bind
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.faults import Fault
from xpyd_sidecar.router.http import held_bodies
from xpyd_sidecar.router.http.connection import Connection
from xpyd_sidecar.router.http.held_bodies import HeldBodies
from xpyd_sidecar.router.http.incoming import Bounds
from xpyd_sidecar.router.http.known_heads import KnownHeads
from xpyd_sidecar.router.http.reply import Application
from xpyd_sidecar.router.http.tls import LOOK_S, Certificate

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16384
REFUSED = 64
"""Connections beyond those allowed that are open for as long as it takes to tell them so."""


class Server:
    """Listens, and keeps its connections."""

    def __init__(self, application: Application, bounds: Bounds, streamed: frozenset[str] = frozenset(), *,
                 body_budget: int = held_bodies.DEFAULT) -> None:
        """``body_budget``: bytes of the bodies of all requests."""
        self.application = application
        self.bounds = bounds
        self.streamed = streamed
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.bodies = HeldBodies(self.loop.time, body_budget, bounds.body_bytes)
        self.heads = KnownHeads()
        self.connections: set[Connection] = set()
        self.refusals: dict[str, int] = {}
        """How many were refused, by the code of the fault."""
        self.draining = False
        self.leaving = False
        """It has stopped listening, and idle connections are closed."""
        self.turned_away = False
        """Every answer is the last of its connection, though the server goes on."""
        self.date = formatdate(usegmt=True).encode()
        self.most = MAX_CONNECTIONS
        """Connections that may be open at once."""
        self._acceptor: Acceptor | None = None
        self._certificate: Certificate | None = None
        self._looked_at = self.loop.time()

    async def listen(self, host: str, port: int, certificate: Certificate | None = None, *, shared: bool = False) -> int:
        """Listen; the port (chosen by the kernel where ``port`` is 0). ``shared``: with other processes (SO_REUSEPORT).

        Raises:
            ConfigError: the address cannot be listened on.
        """
        try:
            sockets = await bind(host, port, shared=shared)
        except OSError as error:
            raise ConfigError(f"router.port: cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._certificate = certificate
        self._acceptor = Acceptor(sockets, lambda: Connection(self), self._crowded,
                                  certificate.context if certificate is not None else None)
        return self._acceptor.port

    @property
    def full(self) -> bool:
        """Whether there are more connections than allowed."""
        return len(self.connections) > self.most

    @property
    def encrypted(self) -> bool:
        """Whether connections are TLS."""
        return self._certificate is not None

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""
        return self._acceptor is not None

    @property
    def accept_errors(self) -> int:
        """How often nobody could be accepted, for a lack of this process's own."""
        return self._acceptor.errors if self._acceptor is not None else 0

    def _crowded(self, opening: int) -> bool:
        return len(self.connections) + opening >= self.most + REFUSED

    def refused(self, fault: Fault) -> None:
        """A connection was refused before there was a whole request."""
        code = fault.code or str(fault.status)
        self.refusals[code] = self.refusals.get(code, 0) + 1
        logger.info("refused: %s", fault.message, extra={"status": fault.status})

    def sweep(self, awake: float = -math.inf) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""
        self.date = formatdate(usegmt=True).encode()
        now = self.loop.time()
        if self._certificate is not None and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._certificate.look()
        for connection in list(self.connections):
            connection.sweep(now, awake)

    def stop_listening(self) -> None:
        """Accept nobody any more."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def drain(self) -> None:
        """Every answer is the last of its connection. Idle ones stay: a request may be on its way on each of them."""
        self.draining = True

    def leave(self) -> None:
        """Close what is idle, at the second call or after a second; to be called until no connection is left."""
        self.leaving = True
        for connection in list(self.connections):
            connection.leave()

    def abort(self) -> None:
        """Close every connection now."""
        self.stop_listening()
        for connection in list(self.connections):
            connection.abort()
