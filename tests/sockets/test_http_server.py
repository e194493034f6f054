from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest
from router_fleet import read_answer, request_bytes

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.http.server import RequestBounds, Server

LOOPS = ("uvloop",)
BOUNDS = RequestBounds(4096, 4096, 30.0)


class Hello:
    def judge(self, method: str, path: str, headers: dict[bytes, bytes]) -> bool:
        """Every body is wanted."""
        return True

    def connection_key(self, headers: dict[bytes, bytes]) -> str | None:
        """Everybody's."""
        return ""

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        if request.refusal is not None:
            raise request.refusal
        reply.send_whole(200, [], b"hello")
        return None


async def test_it_listens_answers_and_lets_go() -> None:
    server = Server(Hello(), BOUNDS, connect=ClientConnection)
    port = await server.listen("127.0.0.1", 0)
    other = Server(Hello(), BOUNDS, connect=ClientConnection)
    with pytest.raises(ConfigError, match=rf"router\.port: cannot listen on 127\.0\.0\.1:{port}"):
        await other.listen("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/"))
    answer = await read_answer(reader)
    assert (answer.body, "GMT" in answer.headers["date"]) == (b"hello", True)
    server.abort()
    assert await reader.read() == b""
    writer.close()
    assert await other.listen("127.0.0.1", port) == port
    other.abort()


async def test_too_many_connections_are_refused_with_a_word() -> None:
    server = Server(Hello(), BOUNDS, connect=ClientConnection)
    server.places.most = 1
    port = await server.listen("127.0.0.1", 0)
    first = await asyncio.open_connection("127.0.0.1", port)
    first[1].write(request_bytes("/") + request_bytes("/", b"x" * 10)[:-1])
    await read_answer(first[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = await read_answer(reader)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    writer.close()
    first[1].write(b"x")
    assert (await read_answer(first[0])).status == 200
    first[1].close()
    server.abort()


async def test_a_draining_server_closes_after_the_answer() -> None:
    server = Server(Hello(), BOUNDS, connect=ClientConnection)
    port = await server.listen("127.0.0.1", 0)
    idle = await asyncio.open_connection("127.0.0.1", port)
    idle[1].write(request_bytes("/"))
    await read_answer(idle[0])
    fresh = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(30):
        while len(server.connections) < 2:  # noqa: ASYNC110 (the server's state has no event)
            await asyncio.sleep(0.005)
    server.drain()
    for _ in range(2):
        server.leave()
    assert await idle[0].read() == b"", "idle after an answer: closed"
    server.sweep()
    fresh[1].write(request_bytes("/"))
    answer = await read_answer(fresh[0])
    assert (answer.status, answer.headers["connection"]) == (200, "close"), "fresh: its request may be on the way"
    for _, writer in (idle, fresh):
        writer.close()
    server.abort()


async def test_the_date_of_answers_is_in_gmt_after_each_second() -> None:
    """RFC 9110 has no other form; a client may refuse ``-0000``."""
    server = Server(Hello(), BOUNDS, connect=ClientConnection)
    port = await server.listen("127.0.0.1", 0)
    server.sweep()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/"))
    date = (await read_answer(reader)).headers["date"]
    assert abs(datetime.strptime(date, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC).timestamp() - time.time()) < 60
    writer.close()
    server.abort()
