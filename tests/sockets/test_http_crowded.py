"""Connections of a server whose places are full, and heads of strangers: who gives way, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from http_site import Site, site
from router_fleet import read_answer, request_bytes

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http import heads, places
from xpyd_sidecar.router.http.pipeline import MAX_QUEUED_BYTES
from xpyd_sidecar.router.http.places import LEAST, ConnectionPlaces
from xpyd_sidecar.router.http.server import REFUSED

LOOPS = ("uvloop",)
KEY = {"authorization": "key"}


async def idle(s: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has had an answer, and asks nothing more."""
    reader, writer = await s.open()
    writer.write(request_bytes("/"))
    assert (await read_answer(reader)).status == 200
    return reader, writer


async def test_when_all_places_are_taken_who_asks_nothing_gives_way_and_who_is_answered_stays() -> None:
    async with site(places=ConnectionPlaces(3)) as s:
        served = await s.open()
        served[1].write(request_bytes("/later"))
        await s.wait(lambda: bool(s.app.later))
        first, second = await idle(s), await idle(s)
        third = await idle(s)
        assert await first[0].read() == b"", "idle for longest"
        await s.wait(lambda: len(s.server.connections) == 3)
        stranger = await s.open()
        assert await second[0].read() == b""
        await asyncio.sleep(1.05)
        fourth = await idle(s)
        assert await stranger[0].read() == b"", "it has brought no request"
        s.app.later[0].reply.send_whole(200, [], b"done")
        for reader, writer in (third, fourth):
            writer.write(request_bytes("/"))
            assert (await read_answer(reader)).status == 200
        assert (await read_answer(served[0])).body == b"done"
        assert s.server.gave_way == 3


async def test_a_head_that_has_no_end_gives_way_with_a_reason() -> None:
    async with site(places=ConnectionPlaces(1)) as s:
        reader, writer = await s.open()
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nx-a:")
        await s.wait(lambda: bool(s.server.connections))
        await asyncio.sleep(1.05)
        other = await idle(s)
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert "had brought no whole request" in answer.json["error"]["message"]
        assert await reader.read() == b""
        other[1].write(request_bytes("/"))
        assert (await read_answer(other[0])).status == 200


async def test_connections_of_one_address_that_bring_nothing_are_refused_and_others_are_served(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "source_of", lambda host, trusted: f"as if from afar: {host}")
    monkeypatch.setattr(places, "GRACE_S", 600.0)  # all of them come just now, however long it takes to open them
    async with site(places=ConnectionPlaces(LEAST * 8)) as s:
        asked = [await idle(s) for _ in range(2)]
        held = [await s.open() for _ in range(LEAST)]
        await s.wait(lambda: len(s.server.connections) == LEAST + 2)
        refused = [await s.open() for _ in range(3 * REFUSED)]
        for reader, _ in refused[-3:]:
            answer = await read_answer(reader)
            assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (429, "1", "close")
            assert "8 connections from this address" in answer.json["error"]["message"]
        held[0][1].write(request_bytes("/"))
        assert (await read_answer(held[0][0])).status == 200
        await idle(s)
        held.append(await s.open())
        monkeypatch.setattr(places, "GRACE_S", 1.0)
        await asyncio.sleep(1.05)
        asked.append(await idle(s))
        assert await held[1][0].read() == b"", "a second later another one is served, though strangers share its address"
        for reader, writer in asked:
            writer.write(request_bytes("/"))
            assert (await read_answer(reader)).status == 200
        assert len(s.server.places) <= LEAST * 8


async def test_a_key_with_its_share_of_the_connections_hears_so() -> None:
    async with site(places=ConnectionPlaces(2 * LEAST)) as s:
        s.app.connection_key = lambda headers: headers.get(b"authorization", b"").decode()  # type: ignore[method-assign]
        held = []
        for number in range(LEAST + 1):
            reader, writer = await s.open()
            writer.write(request_bytes("/echo", b"x" if number % 2 else None, headers=KEY))
            answer = await read_answer(reader)
            assert answer.status == (200 if number < LEAST else 429)
            held.append((reader, writer))
        assert "8 connections open" in answer.json["error"]["message"]
        assert (await s.raw(request_bytes("/", headers={"authorization": "another"}))).status == 200
        held[0][1].transport.abort()
        await s.wait(lambda: len(s.server.connections) <= LEAST)
        assert (await s.raw(request_bytes("/", headers=KEY))).status == 200


@pytest.mark.parametrize("piece", [1 << 20, 1000])
async def test_heads_are_bounded_by_their_headers_and_until_a_key_is_seen_by_16_kib(piece: int) -> None:
    async with site(header=64 << 10) as s:
        s.app.keys = ("key",)

        async def status(more: bytes, headers: bytes = b"") -> int:
            raw = b"GET / HTTP/1.1\r\nhost: a\r\n" + headers + more + b"\r\n"
            reader, writer = await s.open()
            for at in range(0, len(raw), piece):
                writer.write(raw[at:at + piece])
                await asyncio.sleep(0)
            found = (await read_answer(reader)).status
            writer.transport.abort()
            return found

        long = b"".join(b"x%d: %b\r\n" % (number, b"v" * 1000) for number in range(30))
        assert await status(long) == 431
        assert await status(long, b"authorization: another\r\n") == 431
        assert await status(long, b"authorization: key\r\n") == 200
        for names in (b"x%d: v\r\n", b"x: %d\r\n"):
            assert await status(b"".join(names % number for number in range(heads.MAX_HEADERS))) == 431
            assert await status(b"".join(names % number for number in range(heads.MAX_HEADERS - 1))) == 200
        reader, writer = await s.open()
        writer.write(request_bytes("/", headers=KEY))
        assert (await read_answer(reader)).status == 200
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n" + long + b"\r\n")
        assert (await read_answer(reader)).status == 200, "its key was seen on this connection"


async def test_a_head_has_ten_seconds_and_a_body_its_own_time() -> None:
    async with site() as s:
        slow, sending = await s.open(), await s.open()
        slow[1].write(b"GET / HTTP/1.1\r\nhost: a\r\n")
        sending[1].write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nab")
        await s.wait(lambda: sum(one._incoming.receiving for one in s.server.connections) == 2)  # type: ignore[attr-defined]
        later = s.server.loop.time() + heads.HEAD_S + 0.1
        for connection in list(s.server.connections):
            connection.sweep(later, 0.0)
        assert (await read_answer(slow[0])).status == 408
        sending[1].write(b"c")
        assert (await read_answer(sending[0])).body == b"POST /echo abc"


HALF = b"GET / HTTP/1.1\r\nhost: a\r\nx-a:"
NO_REQUESTS = {
    "a body that nobody wants": b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999\r\n\r\nab",
    "empty lines": b"\r\n\r\n", "half a head": HALF, "half a method": b"GE"}


@pytest.mark.parametrize("sent", NO_REQUESTS.values(), ids=NO_REQUESTS.keys())
async def test_what_is_no_whole_request_keeps_no_place(sent: bytes) -> None:
    """It is sent behind an accepted request, and again and again."""
    async with site(places=ConnectionPlaces(2)) as s:
        s.app.judge = lambda method, path, headers: path == "/echo"  # type: ignore[method-assign]
        held = [await idle(s), await idle(s)]
        for _, writer in held:
            writer.write(sent)
        await asyncio.sleep(0.1)
        for _, writer in held:
            writer.write(b"\r\n" if sent.isspace() else b"")
        await asyncio.sleep(0.1)
        other = await idle(s)
        answer = await held[0][0].read()
        assert answer[9:12] == (b"" if sent.isspace() else b"408")
        assert s.server.gave_way == 1
        other[1].write(request_bytes("/echo", b"x"))
        assert (await read_answer(other[0])).body == b"POST /echo x"


async def test_who_sends_a_body_that_is_wanted_keeps_its_place() -> None:
    async with site(places=ConnectionPlaces(1)) as s:
        reader, writer = await idle(s)
        writer.write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nab")
        await asyncio.sleep(0.1)
        assert (await s.raw(request_bytes("/"))).status == 503
        writer.write(b"c")
        assert (await read_answer(reader)).body == b"POST /echo abc"
        await idle(s)
        assert await reader.read() == b""


async def test_the_body_of_a_refused_request_keeps_no_place_and_hears_nothing_more() -> None:
    async with site(places=ConnectionPlaces(1)) as s:
        s.app.judge = unauthorized  # type: ignore[method-assign]
        reader, writer = await idle(s)
        writer.write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3000\r\n\r\n")
        assert (await read_answer(reader)).status == 401
        writer.write(b"x" * 100)
        await asyncio.sleep(0.1)
        await idle(s)
        assert await reader.read() == b"", "there is one answer to a request"


def unauthorized(method: str, path: str, headers: dict[bytes, bytes]) -> bool:
    if method == "POST":
        raise HttpFault(401, "no key")
    return True


async def test_a_connection_that_was_read_no_further_gives_way_once_all_of_it_is_answered() -> None:
    async with site(places=ConnectionPlaces(1), body=2 * MAX_QUEUED_BYTES) as s:
        reader, writer = await idle(s)
        writer.write(request_bytes("/later") + request_bytes("/echo", "x" * (MAX_QUEUED_BYTES + 1)))
        await s.wait(lambda: bool(s.app.later))
        connection = next(iter(s.server.connections))
        await s.wait(lambda: connection._paused)  # type: ignore[attr-defined]
        s.app.later[0].reply.send_whole(200, [], b"")
        for _ in range(2):
            assert (await read_answer(reader)).status == 200
        await asyncio.sleep(0.1)
        await idle(s)
        assert await reader.read() == b""


async def test_who_has_not_read_an_answer_keeps_its_place_until_it_has() -> None:
    async with site(places=ConnectionPlaces(1)) as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/later"))
        await s.wait(lambda: bool(s.app.later))
        body = bytes(1 << 26)
        s.app.later[0].reply.send_whole(200, [], body)
        connection = next(iter(s.server.connections))
        await s.wait(lambda: connection._blocked_at > 0)  # type: ignore[attr-defined]
        assert (await s.raw(request_bytes("/"))).status == 503
        assert (await read_answer(reader)).body == body
        await s.wait(lambda: not connection._blocked_at)  # type: ignore[attr-defined]
        await idle(s)
        assert await reader.read() == b""


async def test_empty_lines_keep_no_connection_open_for_ever() -> None:
    async with site() as s:
        _, writer = await idle(s)
        connection = next(iter(s.server.connections))
        began = connection._since  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        writer.write(b"\r\n")
        await asyncio.sleep(0.1)
        assert connection._since == began  # type: ignore[attr-defined]


async def test_strangers_that_give_way_and_linger_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ended for those who come, though they would be waited for."""
    monkeypatch.setattr(heads, "LINGER_S", 600.0)
    async with site(places=ConnectionPlaces(4)) as s:
        s.app.judge = lambda method, path, headers: False  # type: ignore[method-assign]
        held = []
        async with asyncio.timeout(60):
            for number in range(4 * REFUSED):
                reader, writer = await s.open()
                writer.write(request_bytes("/") + NO_REQUESTS["a body that nobody wants"])
                assert (await read_answer(reader)).status == 200
                held.append(writer)
                assert len(s.server.connections) <= 4 + REFUSED, number
        assert s.server.gave_way >= 3 * REFUSED
        assert len(s.server.places) <= 4


async def test_who_has_had_its_last_answer_needs_no_place() -> None:
    """It is listened to for a while, so that the answer is not lost on its way."""
    async with site(places=ConnectionPlaces(1)) as s:
        reader, writer = await idle(s)
        writer.write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 9999999\r\n\r\n")
        assert (await read_answer(reader)).status == 413
        await s.wait(lambda: len(s.server.places) == 0)
        assert len(s.server.connections) == 1
        await idle(s)
        assert s.server.gave_way == 0
