"""The HTTP/1.1 server that clients talk to: asyncio protocols and httptools, no framework."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
from collections.abc import Callable
from email.utils import formatdate

import msgspec

from xpyd_sidecar.accepting import Acceptor, bind
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.body_budget import DEFAULT, BodyBudget
from xpyd_sidecar.router.http.reply import Application

MAX_CONNECTIONS = 16384
MOST_AT_ONCE = 2
"""So many bodies of the largest size always fit, whatever the budget is."""
REFUSED = 64
"""Connections beyond those allowed that are open for as long as it takes to tell them so."""
logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often the files are looked at."""

_Seen = tuple[tuple[int, int, int], ...]
_NONE: _Seen = ()


class Certificate:
    """A certificate and its key from files, which may be renewed while the router runs; a server listens with ``context``.

    A connection keeps the certificate that it began with; handshakes from now on get the new one. New files are first tried
    in a context of their own: a pair that does not fit (half of it was written) leaves the old one in service.
    """

    def __init__(self, cert_file: str, key_file: str) -> None:
        """Read the files. Raises ConfigError: names the one that cannot be used, or says that they do not fit."""
        self._files = {"tls_cert_file": cert_file, "tls_key_file": key_file}
        try:
            self._seen = self._look()
            self.context = self._load(_context())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{error}") from None

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        cert, key = self._files.values()
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except ssl.SSLError as error:
            words = {"KEY_VALUES_MISMATCH": "the key does not belong to the certificate"}
            why = words.get(error.reason or "", f"not a certificate and its key in PEM ({error.reason or error})")
            raise ValueError(f"router.tls_cert_file, router.tls_key_file: {cert}, {key}: {why}") from None
        return context

    def _look(self) -> _Seen:
        found = []
        for field, path in self._files.items():
            try:
                with open(path, "rb") as file:
                    stat = os.fstat(file.fileno())
            except OSError as error:
                raise ValueError(f"router.{field}: {path}: {error.strerror}") from None
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def look(self) -> bool:
        """Take new files into service; whether there were some. What is wrong with them is logged, once."""
        before, seen = self._seen, _NONE
        try:
            seen = self._seen = self._look()
            if seen == before:
                return False
            self._load(_context())
            self._load(self.context)
        except (OSError, ValueError) as error:
            self._seen = seen
            if seen != before:
                what = "the new certificate is not used" if seen else "the certificate cannot be read again"
                logger.error("%s: %s", what, error)  # noqa: TRY400 (said in full)
            return False
        logger.info("the certificate was renewed")
        return True


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _no_passphrase() -> str:
    raise ValueError("router.tls_key_file: a key with a passphrase cannot be used")


class RequestBounds(msgspec.Struct, frozen=True):
    """Limits of one request."""

    header_bytes: int
    body_bytes: int
    receive_s: float
    """Time a client has to send a request."""


class OpenConnection(asyncio.Protocol):
    """A connection of a client (``connection.ClientConnection``)."""

    __slots__ = ()

    def sweep(self, now: float, awake: float) -> None:
        """Called every second: close what is overdue."""

    def leave(self) -> None:
        """The server ends."""

    def abort(self) -> None:
        """Close now."""


class Server:
    """Listens, and keeps its connections and what they share."""

    def __init__(self, application: Application, bounds: RequestBounds, streamed: frozenset[str] = frozenset(), *,
                 connect: Callable[[Server], OpenConnection], body_budget: int = DEFAULT) -> None:
        """``connect`` makes a client's connection. ``body_budget``: bytes of the bodies of all requests."""
        self.application = application
        self.bounds = bounds
        self.streamed = streamed
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.bodies = BodyBudget(max(body_budget, MOST_AT_ONCE * bounds.body_bytes))
        self.connections: set[OpenConnection] = set()
        self.refusals: dict[str, int] = {}
        """How many were refused, by the code of the fault."""
        self.encrypted = False
        """Its connections are TLS."""
        self.draining = False
        self.leaving = False
        """It has stopped listening, and idle connections are closed."""
        self.turned_away = False
        """Every answer is the last of its connection, though the server goes on."""
        self.date = formatdate(usegmt=True).encode()
        self.most = MAX_CONNECTIONS
        """Connections that may be open at once."""
        self._connect = connect
        self._acceptor: Acceptor | None = None
        self._certificate: Certificate | None = None
        self._looked_at = self.loop.time()

    @property
    def full(self) -> bool:
        """Whether there are more connections than allowed."""
        return len(self.connections) > self.most

    def refused(self, fault: HttpFault) -> None:
        """A connection was refused before there was a whole request."""
        code = fault.code or str(fault.status)
        self.refusals[code] = self.refusals.get(code, 0) + 1
        logger.info("refused: %s", fault.message, extra={"status": fault.status})

    async def listen(self, host: str, port: int, certificate: Certificate | None = None) -> int:
        """Listen; the port (chosen by the kernel where ``port`` is 0). Raises ConfigError: the address cannot be listened
        on.
        """
        try:
            sockets = await bind(host, port)
        except OSError as error:
            where = join_host_port(host, port)
            raise ConfigError(f"router.port: cannot listen on {where}: {error.strerror or error}") from None
        self._certificate = certificate
        self.encrypted = certificate is not None
        self._acceptor = Acceptor(sockets, lambda: self._connect(self), self._crowded,
                                  certificate.context if certificate is not None else None)
        return self._acceptor.port

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""
        return self._acceptor is not None and self._acceptor.listening

    @property
    def opening(self) -> int:
        """How many were accepted and are not yet among the connections."""
        return self._acceptor.opening if self._acceptor is not None else 0

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
        if self._acceptor is not None:
            self._acceptor.close(at_once=True)
        for connection in list(self.connections):
            connection.abort()
