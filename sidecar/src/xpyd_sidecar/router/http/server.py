"""The HTTP/1.1 server that clients talk to: asyncio protocols and httptools, no framework."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import msgspec

from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.launch import ledger_bytes
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process.accepting import Acceptor, bind
from xpyd_sidecar.router.api.faults import HttpFault, too_many, unavailable
from xpyd_sidecar.router.http.body_budget import DEFAULT, BodyBudget
from xpyd_sidecar.router.http.ledger import ByteLedger
from xpyd_sidecar.router.http.places import ConnectionPlaces
from xpyd_sidecar.router.http.reply import Application

MAX_CONNECTIONS = 16384
REFUSED = 64
"""Connections beyond those with a place that are open for as long as it takes to tell them so, or to end."""
ADMIN_CONNECTIONS = 64
"""Places of the admin port."""
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

    def reload(self) -> bool:
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

    def give_way(self) -> None:
        """Close: somebody else needs the place more."""


class Server:
    """Listens, and keeps its connections and what they share."""

    def __init__(self, application: Application, bounds: RequestBounds, streamed: frozenset[str] = frozenset(), *,
                 connect: Callable[[Server], OpenConnection], body_budget: int = DEFAULT,
                 places: ConnectionPlaces | None = None, setting: str = "port") -> None:
        """``connect`` makes a client's connection. ``body_budget``: bytes of all that is held for clients. ``places``: of
        its connections. ``setting``: the field of ``RouterConfig`` that its port is from.
        """
        self.application = application
        self.bounds = bounds
        self.streamed = streamed
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.bodies = BodyBudget(ledger_bytes(body_budget, bounds.body_bytes), others=lambda: self.ledger.other_bytes)
        bodies = self.bodies
        self.ledger = ByteLedger(bodies.whole_rest, lambda: bodies.rest.held, bodies.shares, bodies.let_go)
        self.connections: set[OpenConnection] = set()
        self.places = ConnectionPlaces(MAX_CONNECTIONS) if places is None else places
        self.refusals: dict[str, int] = {}
        """How many were refused, by the code of the fault."""
        self.gave_way = 0
        """How many were closed for another one."""
        self.encrypted = False
        """Its connections are TLS."""
        self.draining = False
        self.leaving = False
        """It has stopped listening, and idle connections are closed."""
        self.turned_away = False
        """Every answer is the last of its connection, though the server goes on."""
        self.date = formatdate(usegmt=True).encode()
        self._setting = setting
        self._refused: dict[OpenConnection, None] = {}
        """Connections without a place that have had their last answer, oldest first."""
        self._connect = connect
        self._acceptor: Acceptor | None = None
        self._certificate: Certificate | None = None
        self._looked_at = self.loop.time()

    def enter(self, one: OpenConnection, peer: Any) -> HttpFault | None:
        """A connection came from ``peer``. Another one gives way for it where all places are taken, or it is refused."""
        self.connections.add(one)
        places, now = self.places, self.loop.time()
        fault: HttpFault | None = None
        has_place, oldest = places.enter(one, peer, now)  # first, or who is refused would cost others their places
        if oldest is not None:
            self.gave_way += 1
            oldest.give_way()
        if not has_place:
            words = f"{places.per_source} connections from this address have brought no request yet, which is the limit"
            fault = too_many(words, 1)
        elif len(places) > places.most:
            dispensable = places.dispensable(now)
            if dispensable is None:
                places.leave(one)
                fault = unavailable("too many connections are open")
            else:
                self.gave_way += 1
                places.leave(dispensable)
                dispensable.give_way()
        if fault is not None:
            self._refused[one] = None
        return fault

    def source(self, connection: Any) -> str:
        """The address at the other end of a connection; empty where it is of many, or not known."""
        return self.places.source(connection)

    def on_connection_lost(self, one: OpenConnection) -> None:
        """A connection is closed."""
        self.connections.discard(one)
        self._refused.pop(one, None)
        self.places.leave(one)

    def lingers(self, one: OpenConnection) -> None:
        """A connection waits for its end alone, or gives way: it needs no place, and is closed when there are too many."""
        if one in self.connections:
            self.places.leave(one)
            self._refused[one] = None

    def count_refusal(self, fault: HttpFault) -> None:
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
            raise ConfigError(f"router.{self._setting}: cannot listen on {where}: {error.strerror or error}") from None
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
        most = self.places.most + REFUSED
        while len(self.connections) + opening >= most and self._refused:
            one = next(iter(self._refused))
            del self._refused[one]
            self.connections.discard(one)
            one.abort()  # it has had its answer; others wait for theirs
        return len(self.connections) + opening >= most

    def sweep(self, awake: float = -math.inf) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""
        self.date = formatdate(usegmt=True).encode()
        now = self.loop.time()
        if self._certificate is not None and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._certificate.reload()
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
