"""The HTTP/1.1 server that clients talk to: asyncio protocols and httptools, no framework.

Belongs here: listening, the set of connections, the turn of the clock, draining. Does not belong here: parsing
(``connection``), paths (``admin``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from email.utils import formatdate

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.proxy.connection import Connection
from xpyd_sidecar.proxy.incoming import Bounds
from xpyd_sidecar.proxy.reply import Application
from xpyd_sidecar.proxy.tls import HANDSHAKE_S, LOOK_S, SHUTDOWN_S, Certificate
from xpyd_sidecar.routing.faults import Fault

logger = logging.getLogger(__name__)

BACKLOG = 4096
MAX_CONNECTIONS = 16384


class Server:
    """Listens, and keeps its connections."""

    def __init__(self, application: Application, bounds: Bounds, streamed: frozenset[str] = frozenset()) -> None:
        self.application = application
        self.bounds = bounds
        self.streamed = streamed
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.draining = False
        self.leaving = False
        """It has stopped listening, and idle connections are closed."""
        self.turned_away = False
        """Every answer is the last of its connection, though the server goes on."""
        self.date = formatdate(usegmt=True).encode()
        self._server: asyncio.Server | None = None
        self._certificate: Certificate | None = None
        self._looked_at = self.loop.time()

    async def listen(self, host: str, port: int, certificate: Certificate | None = None, *, shared: bool = False) -> int:
        """Listen; the port (chosen by the kernel where ``port`` is 0). ``shared``: with other processes (SO_REUSEPORT).

        Raises:
            ConfigError: the address cannot be listened on.
        """
        tls = certificate is not None
        try:
            self._server = await self.loop.create_server(
                lambda: Connection(self), host, port, backlog=BACKLOG, reuse_address=True, reuse_port=shared or None,
                ssl=certificate.context if certificate is not None else None,
                ssl_handshake_timeout=HANDSHAKE_S if tls else None, ssl_shutdown_timeout=SHUTDOWN_S if tls else None)
        except OSError as error:
            raise ConfigError(f"router.port: cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._certificate = certificate
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def full(self) -> bool:
        """Whether there are more connections than allowed."""
        return len(self.connections) > MAX_CONNECTIONS

    def refused(self, fault: Fault) -> None:
        """A connection was refused before there was a whole request."""
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
        if self._server is not None:
            self._server.close()
            self._server = None

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
