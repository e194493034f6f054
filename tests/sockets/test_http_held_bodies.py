"""The bytes of bodies that a server holds: counted by every way in, given back at the request's end, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from http_site import Later, Site, site
from router_fleet import Answer, read_answer, request_bytes

from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.server import RequestBounds, Server
from xpyd_sidecar.router.serving.generation import IDS, LEGS
from xpyd_sidecar.router.stream.answers import MAX_EARLY

LOOPS = ("uvloop",)
LARGEST = 400_000
RESERVE, REST = 100_000, 700_000
SMALL = 64 << 10
JSON = {"content-type": "application/json"}
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def full_site() -> AsyncIterator[Site]:
    """A server with a reserve, and with less room for bodies than it would have by itself."""
    async with site(body=LARGEST) as s:
        s.server.bodies.reserve.limit, s.server.bodies.rest.limit = RESERVE, REST
        yield s
        for later in s.app.later:
            if not later.gone and not later.reply.done:
                later.reply.send_whole(200, [], b"")
        s.server.abort()
        await s.wait(lambda: not s.server.bodies.held_bytes)


def head(length: int | None, path: str = "/later", more: str = "") -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: a\r\n{more}{framing}\r\n\r\n".encode()


async def sent(s: Site, raw: bytes, size: int) -> Client:
    """A client that has sent so much of a body of it, which the server has."""
    before = s.server.bodies.held_bytes
    reader, writer = await s.open()
    writer.write(raw)
    await s.wait(lambda: s.server.bodies.held_bytes >= before + size)
    return reader, writer


async def answer_of(client: Client) -> Answer:
    answer = await read_answer(client[0])
    client[1].transport.abort()
    return answer


def later(s: Site, number: int = -1) -> Later:
    return s.app.later[number]


@pytest.mark.parametrize(("path", "chunked"), [("/v1/completions", False), ("/later", False), ("/later", True)])
async def test_a_body_counts_until_its_request_has_ended(path: str, chunked: bool) -> None:
    """By every way in: in one read, parsed, in chunks."""
    async with full_site() as s:
        seen = s.app.handle
        s.app.handle = lambda request, reply: seen(  # type: ignore[method-assign]
            type(request)(request.method, "/later", request.headers, request.body, request.request_id), reply)
        reader, writer = await s.open()
        for size in (1000, SMALL, SMALL + 1, 300_000):
            body = b"x" * size
            if chunked:
                writer.write(head(None) + b"%x\r\n%b\r\n0\r\n\r\n" % (size, body))
            else:
                writer.write(request_bytes(path, body, headers=JSON))
            count = len(s.app.later)
            await s.wait(lambda count=count: len(s.app.later) > count)
            bodies = s.server.bodies
            assert bodies.held_bytes == size
            assert (bodies.reserve.held == size) == (size <= SMALL)
            later(s).reply.send_whole(200, [], b"")
            assert bodies.held_bytes == 0
            assert (await read_answer(reader)).status == 200
        writer.transport.abort()


async def test_what_a_client_leaves_behind_is_given_back() -> None:
    """While its body comes, while it waits for its turn, while it is answered, and when it was refused."""
    async with full_site() as s:
        answered, queued = request_bytes("/later", b"x" * 3000), request_bytes("/later", b"y" * 2000)
        for raw, size in ((head(5000) + b"x" * 4000, 4000), (answered, 3000),
                          (answered + queued + head(1000) + b"z" * 9, 5009)):
            _, writer = await sent(s, raw, size)
            assert s.server.bodies.held_bytes == size
            writer.transport.abort()
            await s.wait(lambda: not s.server.bodies.held_bytes)
        client = await sent(s, head(5000) + b"x" * 4000, 4000)
        [connection] = s.server.connections
        now = s.server.loop.time()
        connection.sweep(now + 31.0, now)
        assert not s.server.bodies.held_bytes
        assert (await answer_of(client)).status == 408


async def test_a_new_large_body_is_refused_at_its_head_where_there_is_no_room_and_small_ones_are_served() -> None:
    async with full_site() as s:
        held = [await sent(s, request_bytes("/later", b"x" * 340_000), 340_000) for _ in range(2)]
        answer = await s.raw(head(100_000, "/echo"))
        assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        assert answer.json["error"]["code"] == "unavailable"
        answer = await s.raw(head(100_000, "/echo", "expect: 100-continue\r\n"))
        assert answer.status == 503, "instead of 100"
        for path in ("/echo", "/v1/completions"):
            for body in (b"", b"x" * 1000, b"y" * SMALL):
                assert (await s.raw(request_bytes(path, body, headers=JSON))).body == f"POST {path} ".encode() + body
        later(s, 0).reply.send_whole(200, [], b"")
        assert (await s.raw(request_bytes("/echo", b"x" * 100_000))).status == 200, "there is room again"
        for _, writer in held:
            writer.transport.abort()


async def test_where_all_is_taken_the_slowest_is_told_so_and_the_others_come_through() -> None:
    async with full_site() as s:
        slow, fast, last = [await sent(s, head(300_000, path) + b"x" * 10, 10) for path in ("/later", "/later", "/echo")]
        for (_, writer), size in ((slow, 250_000), (fast, 290_000), (last, 150_000)):
            before = s.server.bodies.held_bytes
            writer.write(b"x" * (size - 10))
            await s.wait(lambda before=before, size=size: s.server.bodies.held_bytes == before + size - 10)  # type: ignore[misc]
        coming = sorted(s.server.bodies._coming, key=lambda body: body.came)
        assert [body.came for body in coming] == [150_000, 250_000, 290_000]
        for body, age in zip(coming, (5.0, 60.0, 30.0), strict=True):
            body.began -= age
        last[1].write(b"x" * 150_000)
        assert (await answer_of(last)).body == b"POST /echo " + b"x" * 300_000
        answer = await answer_of(slow)
        assert (answer.status, answer.headers["connection"], answer.headers["retry-after"]) == (408, "close", "1")
        assert s.server.bodies.held_bytes == 290_000
        fast[1].write(b"x" * 10_000)
        await s.wait(lambda: bool(s.app.later))
        later(s).reply.send_whole(200, [], b"")
        assert (await answer_of(fast)).status == 200


async def test_a_new_large_body_takes_the_room_of_one_that_has_stopped_to_come() -> None:
    async with full_site() as s:
        stalled = await sent(s, head(400_000) + b"x" * 390_000, 390_000)
        served = await sent(s, request_bytes("/later", b"x" * 300_000), 300_000)
        [body] = s.server.bodies._coming
        body.began -= 10.0
        assert (await s.raw(request_bytes("/echo", b"y" * 200_000))).status == 200
        assert (await answer_of(stalled)).status == 408
        served[1].transport.abort()


async def test_chunks_without_room_are_refused_where_everybody_else_is_whole() -> None:
    async with full_site() as s:
        held = [await sent(s, request_bytes("/later", b"x" * 330_000), 330_000) for _ in range(2)]
        chunk = b"ffff\r\n" + b"x" * 0xffff + b"\r\n"
        reader, writer = await s.open()
        writer.write(head(None, "/echo") + chunk * 4)
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert await reader.read() == b""
        assert s.server.bodies.held_bytes == 660_000
        for each in (*held, (reader, writer)):
            each[1].transport.abort()


async def test_a_body_that_is_ended_behind_another_request_is_told_in_its_turn() -> None:
    async with full_site() as s:
        reader, writer = await sent(s, request_bytes("/later", b"x" * 10) + head(400_000) + b"x" * 350_000, 350_010)
        [body] = s.server.bodies._coming
        body.began -= 10.0
        other = await sent(s, request_bytes("/later", b"x" * 300_000), 300_000)
        assert (await s.raw(request_bytes("/echo", b"y" * 100_000))).status == 200
        assert s.server.bodies.held_bytes == 300_010
        later(s, 0).reply.send_whole(200, [], b"first")
        assert (await read_answer(reader)).body == b"first"
        assert (await read_answer(reader)).status == 408
        assert await reader.read() == b""
        for each in (writer, other[1]):
            each.transport.abort()


class Taker:
    """Takes a body while it comes."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)


async def test_a_body_that_is_handed_on_counts_for_the_little_that_is_kept_of_it() -> None:
    size, kept, read = 20 << 20, 256 << 10, 256 << 10
    async with site(body=size, budget=1, streamed=frozenset({"/later"})) as s:
        reader, writer = await s.open()
        writer.write(head(size) + b"x" * size)
        await s.wait(lambda: bool(s.app.later) and s.server.bodies.held_bytes > kept)
        assert s.server.bodies.held_bytes <= kept + read, "nothing is read on while nobody takes it"
        upload, taker = later(s).request.upload, Taker()
        assert upload is not None
        upload.on_open(taker)
        await s.wait(lambda: upload.sent)
        assert taker.size == size
        assert s.server.bodies.held_bytes <= kept + read
        later(s).reply.send_whole(200, [], b"")
        assert not s.server.bodies.held_bytes
        assert (await read_answer(reader)).status == 200
        writer.transport.abort()


async def test_the_largest_request_is_accepted_where_no_other_is_whatever_the_budget() -> None:
    def server(largest: int, **budget: int) -> Server:
        return Server(None, RequestBounds(100, largest, 1.0), connect=ClientConnection, **budget)  # type: ignore[arg-type]

    largest = 100 << 20
    s = server(largest, body_budget=100)
    body, ended = s.bodies.begin(None, largest, 0.0)  # type: ignore[arg-type]
    assert body is not None
    assert ended == s.bodies.grow(body, largest, 1.0) == []
    s.bodies.complete(body)
    s.ledger.release(s.ledger.reserve("", largest, (LEGS + IDS) * largest, 1.0)[0])
    s.ledger.release(s.ledger.reserve("", largest, LEGS * largest + MAX_EARLY, 1.0)[0])
    for given, budget in ((100, 2400), (3000, 3000)):
        bodies = server(400, body_budget=given).bodies
        assert bodies.reserve.limit + bodies.whole_rest == budget
