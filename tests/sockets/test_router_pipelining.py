"""Pipelined requests wait for a client that reads, and leave turns of the loop to other connections."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from http_site import Echo, Site, site
from router_fleet import read_answer, request_bytes

from xpyd_sidecar.router.http import connection as co
from xpyd_sidecar.router.http import pipeline
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler

LOOPS = ("asyncio", "uvloop")
ANSWERS = 8
"""Of one connection in one turn."""
GET = request_bytes("/echo", method="GET")
LARGE = 32 << 10
HELD = (256 << 10) + (ANSWERS + 1) * (LARGE + 1024)
"""Bytes that the server may hold of answers that nobody reads: its high water, and what one turn adds."""


class Large(Echo):
    """Every answer is large."""

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        self.requests.append(request)
        reply.send_whole(200, [], b"x" * LARGE)


class Turns:
    """Counts the turns of the loop, and notes in which one each request was answered."""

    def __init__(self, s: Site) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = 0
        self.answered: Counter[int] = Counter()
        self.stopped = False
        self._handle = s.app.handle
        s.app.handle = self.handle  # type: ignore[method-assign]
        self._count()

    def _count(self) -> None:
        self.now += 1
        if not self.stopped:
            self.loop.call_soon(self._count)

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        self.answered[self.now] += 1
        return self._handle(request, reply)


async def narrow(s: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that takes few bytes before it reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", s.port))
    return await asyncio.open_connection(sock=sock, limit=1 << 16)


async def still(s: Site) -> int:
    """How many requests have been answered, once no more are for some turns."""
    seen = -1
    while seen != len(s.app.requests):
        seen = len(s.app.requests)
        for _ in range(50):
            await asyncio.sleep(0.001)
    return seen


async def test_pipelined_answers_wait_for_a_client_that_reads_and_then_all_come() -> None:
    many = 2000
    async with site() as s:
        s.server.application = app = s.app = Large()
        reader, writer = await narrow(s)
        writer.write(GET * many)
        await s.wait(lambda: bool(app.requests))
        answered = await still(s)
        [connection] = s.server.connections
        assert connection._transport is not None
        assert 0 < connection._transport.get_write_buffer_size() <= HELD
        assert answered < many // 2
        assert len(connection._queue) <= pipeline.MAX_QUEUED + co.SLICE // len(GET) + 1, "what one slice of a read holds"
        async with asyncio.timeout(60):
            for _ in range(many):
                answer = await read_answer(reader)
                assert (answer.status, len(answer.body)) == (200, LARGE)
        assert len(app.requests) == many
        writer.transport.abort()


async def test_a_client_that_reads_slowly_is_served_nothing_by_any_way_until_it_has_read() -> None:
    """A request that comes alone, later, waits too."""
    async with site() as s:
        s.server.application = app = s.app = Large()
        reader, writer = await narrow(s)
        writer.write(GET * 500)
        await s.wait(lambda: bool(app.requests))
        answered = await still(s)
        for _ in range(3):
            writer.write(request_bytes("/v1/completions", {"prompt": "x"}, headers={"content-type": "application/json"}))
            assert await still(s) == answered
        async with asyncio.timeout(60):
            for _ in range(503):
                assert (await read_answer(reader)).status == 200
        writer.transport.abort()


async def test_one_connection_has_a_few_answers_in_a_turn_and_others_are_served_meanwhile() -> None:
    many = 2000
    async with site() as s:
        turns = Turns(s)
        reader, writer = await s.open()
        other_reader, other = await s.open()
        writer.write(GET * many)
        await s.wait(lambda: len(s.app.requests) >= ANSWERS)
        other.write(request_bytes("/echo?other", b"1"))
        await read_answer(other_reader)
        assert len(s.app.requests) < many, "the other one was answered between them"
        async with asyncio.timeout(60):
            for _ in range(many):
                assert (await read_answer(reader)).status == 200
        turns.stopped = True
        assert sum(turns.answered.values()) == many + 1
        # A read and the turn that follows by itself may fall into one of these; it is never more than two.
        assert max(turns.answered.values()) <= 2 * ANSWERS + 1
        writer.transport.abort()
        other.transport.abort()


async def test_reads_that_come_while_a_turn_is_due_add_no_turns() -> None:
    """Else every read would leave one more turn behind, and a connection more and more answers in each."""
    async with site() as s:
        turns = Turns(s)
        reader, writer = await s.open()
        for _ in range(50):
            writer.write(GET * 40)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            for _ in range(2000):
                assert (await read_answer(reader)).status == 200
        turns.stopped = True
        assert max(turns.answered.values()) <= 2 * ANSWERS
        writer.transport.abort()


async def test_a_large_body_behind_many_requests_comes_whole() -> None:
    body = bytes(range(256)) * 300
    async with site() as s:
        reader, writer = await s.open()
        writer.write(GET * 700 + request_bytes("/echo", body) + GET)
        async with asyncio.timeout(60):
            for _ in range(700):
                assert (await read_answer(reader)).body == b"GET /echo "
            assert (await read_answer(reader)).body == b"POST /echo " + body
            assert (await read_answer(reader)).body == b"GET /echo "
        writer.transport.abort()


async def test_what_is_wrong_behind_many_requests_is_told_after_their_answers() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(GET * 900 + b"nonsense\r\n\r\n" + GET * 5)
        async with asyncio.timeout(60):
            for _ in range(900):
                assert (await read_answer(reader)).status == 200
            last = await read_answer(reader)
            assert (last.status, last.headers["connection"]) == (400, "close")
            assert await reader.read() == b""
        assert len(s.app.requests) == 900
        writer.transport.abort()


async def test_a_client_that_goes_with_much_unread_leaves_nothing() -> None:
    async with site() as s:
        s.server.application = app = s.app = Large()
        _, writer = await narrow(s)
        writer.write(GET * 2000)
        await s.wait(lambda: bool(app.requests))
        answered = await still(s)
        writer.transport.abort()
        await s.wait(lambda: not s.server.connections)
        assert await still(s) == answered


async def test_thousands_of_upgrades_in_one_write_are_all_answered() -> None:
    """Each is parsed a second time without its offer; that was a call within the call before."""
    many = 3000
    offer = b"GET /echo?%d HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with site() as s:
        reader, writer = await s.open()
        writer.write(b"".join(offer % number for number in range(many)))
        async with asyncio.timeout(60):
            for _ in range(many):
                assert (await read_answer(reader)).status == 200
        assert [request.target for request in s.app.requests] == [b"/echo?%d" % number for number in range(many)]
        assert all(b"upgrade" not in request.headers for request in s.app.requests)
        writer.transport.abort()
