"""A server of the router's HTTP in this process before an application of tests: what came, and who was told what.

    async with site() as s:
        answer = await s.raw(request_bytes("/echo", b"body"))
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from router_fleet import Answer, read_answer

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.places import ConnectionPlaces
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.http.server import RequestBounds, Server


class Later:
    """Answers when told, and remembers what happened to its client."""

    def __init__(self, request: HttpRequest, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self.gone = False
        self.pauses: list[str] = []

    def on_client_gone(self) -> None:
        self.gone = True

    def on_pause(self) -> None:
        self.pauses.append("pause")

    def on_resume(self) -> None:
        self.pauses.append("resume")


class Echo:
    """/echo answers at once, /later keeps a handler, /fault raises, /bug breaks, /half breaks after its head."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.later: list[Later] = []
        self.keys: tuple[str, ...] = ()

    def judge(self, method: str, path: str, headers: dict[bytes, bytes]) -> bool:
        """Every body is wanted."""
        return True

    def connection_key(self, headers: dict[bytes, bytes]) -> str | None:
        """A key is asked for where ``keys`` names some."""
        key = headers.get(b"authorization", b"").decode()
        return "" if not self.keys else key if key in self.keys else None

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        if request.refusal is not None:
            raise request.refusal
        self.requests.append(request)
        if request.path == "/later":
            self.later.append(Later(request, reply))
            return self.later[-1]
        if request.path == "/fault":
            raise HttpFault(418, "teapot")
        if request.path == "/bug":
            raise RuntimeError("a bug")
        if request.path == "/half":
            reply.begin(200, b"", b"")
            raise RuntimeError("a bug")
        if request.path == "/stream":
            first = b"3\r\nabc\r\n" if reply.framed else b"abc"
            reply.begin(200, b"content-type: text/plain\r\n", first)
            reply.end()
            return None
        reply.send_whole(200, [], f"{request.method} {request.path} ".encode() + request.body)
        return None


class Site:
    def __init__(self, server: Server, app: Echo, port: int) -> None:
        self.server, self.app, self.port = server, app, port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)

    async def raw(self, data: bytes) -> Answer:
        reader, writer = await self.open()
        try:
            writer.write(data)
            return await read_answer(reader)
        finally:
            writer.transport.abort()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (what is waited for is the server's state, which has no event)
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def site(header: int = 4096, body: int = 100_000, receive_s: float = 30.0, *, budget: int = 1 << 30,
               streamed: frozenset[str] = frozenset(), places: ConnectionPlaces | None = None) -> AsyncIterator[Site]:
    app = Echo()
    server = Server(app, RequestBounds(header, body, receive_s), streamed, connect=ClientConnection, body_budget=budget,
                    places=places)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield Site(server, app, port)
    finally:
        server.abort()
        await asyncio.sleep(0)
