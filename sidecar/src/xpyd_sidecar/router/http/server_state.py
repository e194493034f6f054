"""What the connections of one server share."""

from __future__ import annotations

import asyncio
import logging
from email.utils import formatdate
from typing import Protocol

import msgspec

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.body_budget import BodyBudget
from xpyd_sidecar.router.http.heads import KnownHeads
from xpyd_sidecar.router.http.reply import Application

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16384
MOST_AT_ONCE = 2
"""So many bodies of the largest size always fit, whatever the budget is."""


class RequestBounds(msgspec.Struct, frozen=True):
    """Limits of one request."""

    header_bytes: int
    body_bytes: int
    receive_s: float
    """Time a client has to send a request."""


class OpenConnection(Protocol):
    """A connection of a client (``connection.ClientConnection``)."""

    def sweep(self, now: float, awake: float) -> None:
        """Called every second: close what is overdue."""

    def leave(self) -> None:
        """The server ends."""

    def abort(self) -> None:
        """Close now."""


class ServerState:
    """Of one server."""

    def __init__(self, application: Application, bounds: RequestBounds, streamed: frozenset[str], body_budget: int) -> None:
        self.application = application
        self.bounds = bounds
        self.streamed = streamed
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.bodies = BodyBudget(max(body_budget, MOST_AT_ONCE * bounds.body_bytes))
        self.heads = KnownHeads()
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

    @property
    def full(self) -> bool:
        """Whether there are more connections than allowed."""
        return len(self.connections) > self.most

    def refused(self, fault: HttpFault) -> None:
        """A connection was refused before there was a whole request."""
        code = fault.code or str(fault.status)
        self.refusals[code] = self.refusals.get(code, 0) + 1
        logger.info("refused: %s", fault.message, extra={"status": fault.status})
