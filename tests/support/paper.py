"""A connection of the router without a socket: a transport that writes down what happens, and a handler that echoes."""

from __future__ import annotations

import asyncio
from typing import Any

from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.http.server import RequestBounds, Server


class Paper:
    """A transport that writes down what happens to it."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def write(self, data: bytes) -> None:
        self.seen.append(bytes(data))

    def get_extra_info(self, name: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.seen.append(name)


class Echo:
    """Answers at once, says what it was asked."""

    def __init__(self) -> None:
        self.seen: list[HttpRequest] = []

    def judge(self, method: str, path: str, headers: dict[bytes, bytes]) -> bool:
        """Every body is wanted."""
        return True

    def connection_key(self, headers: dict[bytes, bytes]) -> str | None:
        """Everybody's."""
        return ""

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        if request.refusal is not None:
            raise request.refusal
        self.seen.append(request)
        reply.send_whole(200, [], request.body)
        return None


async def served(reads: list[bytes], bounds: RequestBounds) -> tuple[list[HttpRequest], list[object], tuple[object, ...]]:
    """Everything that one connection does with what it reads: requests, what its transport is told, its state then."""
    app = Echo()
    server = Server(app, bounds, connect=ClientConnection)
    server.date = b"now"
    transport, connection = Paper(), ClientConnection(server)
    connection.connection_made(transport)  # type: ignore[arg-type]
    for data in reads:
        connection.data_received(data)
        await asyncio.sleep(0)
    state = (connection._busy, connection._closing, connection._deaf, connection._served, connection._incoming.receiving,
             connection._paused, connection._full, len(connection._queue), connection._continue)
    return app.seen, transport.seen, state
