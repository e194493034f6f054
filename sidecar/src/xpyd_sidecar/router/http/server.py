"""The HTTP/1.1 server that clients talk to: asyncio protocols and httptools, no framework."""

from __future__ import annotations

import math
from email.utils import formatdate

from xpyd_sidecar.accepting import Acceptor, bind
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.http.body_budget import DEFAULT
from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.reply import Application
from xpyd_sidecar.router.http.server_state import RequestBounds, ServerState
from xpyd_sidecar.router.http.tls import LOOK_S, Certificate

REFUSED = 64
"""Connections beyond those allowed that are open for as long as it takes to tell them so."""


class Server(ServerState):
    """Listens, and keeps its connections."""

    def __init__(self, application: Application, bounds: RequestBounds, streamed: frozenset[str] = frozenset(), *,
                 body_budget: int = DEFAULT) -> None:
        """``body_budget``: bytes of the bodies of all requests."""
        super().__init__(application, bounds, streamed, body_budget)
        self._acceptor: Acceptor | None = None
        self._certificate: Certificate | None = None
        self._looked_at = self.loop.time()

    async def listen(self, host: str, port: int, certificate: Certificate | None = None, *, shared: bool = False) -> int:
        """Listen; the port (chosen by the kernel where ``port`` is 0). ``shared``: with other processes (SO_REUSEPORT).
        Raises ConfigError: the address cannot be listened on.
        """
        try:
            sockets = await bind(host, port, shared=shared)
        except OSError as error:
            where = join_host_port(host, port)
            raise ConfigError(f"router.port: cannot listen on {where}: {error.strerror or error}") from None
        self._certificate = certificate
        self.encrypted = certificate is not None
        self._acceptor = Acceptor(sockets, lambda: ClientConnection(self), self._crowded,
                                  certificate.context if certificate is not None else None)
        return self._acceptor.port

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
