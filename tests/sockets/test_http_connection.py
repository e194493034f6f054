from __future__ import annotations

import asyncio
import contextlib

import pytest
from http_site import site
from router_fleet import read_answer, request_bytes

from xpyd_sidecar.router.http import heads

LOOPS = ("asyncio", "uvloop")


async def at_end(reader: asyncio.StreamReader) -> bool:
    """The server closed."""
    async with asyncio.timeout(30):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_a_request_split_at_each_byte_is_the_same_request() -> None:
    raw = request_bytes("/echo?x=1", b"body!", headers={"X-Request-Id": "my-id.1", "X-A": "b"})
    async with site() as s:
        reader, writer = await s.open()
        for at in range(1, len(raw)):
            writer.write(raw[:at])
            await asyncio.sleep(0)
            writer.write(raw[at:])
            answer = await read_answer(reader)
            assert (answer.status, answer.body) == (200, b"POST /echo body!")
            assert answer.headers["x-request-id"] == "my-id.1"
        assert all(r.headers[b"x-a"] == b"b" and r.path == "/echo" for r in s.app.requests)
        for byte in raw:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await read_answer(reader)).body == b"POST /echo body!"
        writer.transport.abort()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/later", b"1") + b"".join(request_bytes("/echo", b"%d" % i) for i in range(2, 8)))
        await s.wait(lambda: bool(s.app.later))
        await asyncio.sleep(0.02)
        assert len(s.app.requests) == 1, "the next one waits for the answer to the first"
        s.app.later[0].reply.send_whole(200, [], b"first")
        bodies = [(await read_answer(reader)).body for _ in range(7)]
        assert bodies == [b"first", *(b"POST /echo %d" % i for i in range(2, 8))]
        writer.transport.abort()


async def test_a_flood_of_pipelined_requests_is_held_back_and_then_answered() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/later"))
        await s.wait(lambda: bool(s.app.later))
        for _ in range(300):
            writer.write(request_bytes("/echo", b"x" * 3000))
        await asyncio.sleep(0.1)
        [connection] = s.server.connections
        assert len(connection._queue) < 200
        s.app.later[0].reply.send_whole(200, [], b"")
        async with asyncio.timeout(30):
            for _ in range(301):
                assert (await read_answer(reader)).status == 200
        writer.transport.abort()


@pytest.mark.parametrize(("raw", "status"), [
    (b"nonsense\r\n\r\n", 400),
    (b"GET /\r\n\r\n", 505),
    (b"GET / HTTP/9.9\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: x\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: the-unexpected\r\nContent-Length: 1\r\n\r\n", 417),
    (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 300_000, 431),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 5000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 2000, 431),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100001\r\n\r\n", 413),
])
async def test_bad_http_is_told_in_openais_form_and_the_connection_closed(raw: bytes, status: int) -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(raw)
        answer = await read_answer(reader)
        assert answer.status == status
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["connection"] == "close"
        assert await at_end(reader)
        writer.transport.abort()


async def test_a_chunked_body_is_read_and_bounded() -> None:
    async with site() as s:
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await s.raw(head + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n")).body == b"POST /echo abcde"
        assert (await s.raw(head + b"1000\r\n%b\r\n" % (b"x" * 4096) * 30)).status == 413


async def test_an_oversized_body_is_refused_before_it_is_sent_and_the_answer_is_not_lost() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(50):
                writer.write(b"x" * 100_000)
                await writer.drain()
        answer = await read_answer(reader)
        assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
        assert not s.app.requests
        writer.transport.abort()


async def test_expect_100_continue() -> None:
    async with site() as s:
        reader, writer = await s.open()
        for _ in range(2):
            writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
            assert (await read_answer(reader)).status == 100
            writer.write(b"ok")
            assert (await read_answer(reader)).body == b"POST /echo ok"
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        writer.write(request_bytes("/later") + head)
        await s.wait(lambda: bool(s.app.later))
        s.app.later[0].reply.send_whole(200, [], b"first")
        assert (await read_answer(reader)).body == b"first", "100 Continue never comes before an earlier answer"
        assert (await read_answer(reader)).status == 100
        writer.write(b"ok")
        assert (await read_answer(reader)).body == b"POST /echo ok"
        writer.transport.abort()


async def test_http_1_0_gets_no_chunks_and_is_closed() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
        answer = await read_answer(reader)
        assert (answer.body, "transfer-encoding" in answer.headers, answer.headers["connection"]) == (b"abc", False,
                                                                                                      "close")
        writer.transport.abort()
        reader, writer = await s.open()
        for _ in range(2):
            writer.write(b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await read_answer(reader)).headers["connection"] == "keep-alive"
        writer.transport.abort()


async def test_connection_close_is_honoured() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/echo", b"x", headers={"Connection": "close"}))
        assert (await read_answer(reader)).headers["connection"] == "close"
        assert await at_end(reader)
        writer.transport.abort()


async def test_an_offer_to_upgrade_is_ignored() -> None:
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAE"}
    raw = request_bytes("/echo", b"body", headers=offer)
    async with site() as s:
        reader, writer = await s.open()
        writer.write(raw + request_bytes("/echo?next", b"2"))
        assert (await read_answer(reader)).body == b"POST /echo body"
        assert (await read_answer(reader)).body == b"POST /echo 2"
        for byte in raw:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await read_answer(reader)).body == b"POST /echo body"
        writer.write(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await read_answer(reader)).status == 405
        writer.transport.abort()


async def test_head_has_the_length_and_no_body() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(b"HEAD /echo HTTP/1.1\r\nHost: a\r\n\r\n" + b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "content-length: 11" in head
        assert (await read_answer(reader)).body == b"GET /echo "
        writer.transport.abort()


async def test_a_strange_request_id_is_replaced() -> None:
    async with site() as s:
        for given in ("two words", "x" * 200, "ü"):
            answer = await s.raw(request_bytes("/echo", b"", headers={"X-Request-Id": given}))
            assert len(answer.headers["x-request-id"]) == 32


async def test_faults_and_bugs_are_answers() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/fault") + request_bytes("/bug") + request_bytes("/echo", b"still here"))
        assert [(await read_answer(reader)).status for _ in range(3)] == [418, 500, 200]
        writer.write(request_bytes("/half"))
        answer = await read_answer(reader)
        assert (answer.status, answer.complete) == (200, False), "an answer that has begun gets no second head"
        writer.transport.abort()


async def test_a_client_that_goes_is_noticed() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/later"))
        await s.wait(lambda: bool(s.app.later))
        writer.close()
        await s.wait(lambda: s.app.later[0].gone)
        s.app.later[0].reply.send_whole(200, [], b"to nobody")
        assert not s.server.connections
        assert await at_end(reader)


async def test_a_slow_client_pauses_its_answer_and_one_that_never_reads_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/later"))
        await s.wait(lambda: bool(s.app.later))
        later = s.app.later[0]
        later.reply.begin(200, b"", b"")
        for _ in range(200):
            later.reply.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert later.pauses == ["pause"]
        seen = await reader.readexactly(200 * 65536)
        assert len(seen) == 200 * 65536
        await s.wait(lambda: later.pauses == ["pause", "resume"])
        for _ in range(400):
            later.reply.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        monkeypatch.setattr(heads, "UNREAD_S", -1.0)
        s.server.sweep()
        await s.wait(lambda: later.gone)
        writer.transport.abort()


async def test_a_slow_loris_is_told_to_hurry_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(receive_s=0.05) as s:
        reader, writer = await s.open()
        writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Le")
        await asyncio.sleep(0.08)
        writer.write(b"ngth: 10\r\n")

        def told() -> bool:
            """Its time runs from when the server, which may be late itself, has read its first byte."""
            s.server.sweep()
            return bool(reader._buffer)  # type: ignore[attr-defined]

        await s.wait(told)
        answer = await read_answer(reader)
        assert (answer.status, answer.json["error"]["code"]) == (408, "request_timeout")
        assert await at_end(reader)
        writer.transport.abort()
        monkeypatch.setattr(heads, "SLOWEST_BODY", 500)
        reader, writer = await s.open()
        writer.write(request_bytes("/echo", b"x" * 50_000)[:-1])
        await asyncio.sleep(0.1)
        s.server.sweep()
        assert not reader._buffer, "a large body has time by its size"  # type: ignore[attr-defined]
        writer.write(b"x")
        assert (await read_answer(reader)).status == 200
        writer.transport.abort()


async def test_an_idle_connection_is_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/echo"))
        await read_answer(reader)
        s.server.sweep()
        monkeypatch.setattr(heads, "IDLE_S", -1.0)
        s.server.sweep()
        s.server.sweep()
        assert await at_end(reader)
        writer.transport.abort()


async def test_a_request_between_two_looks_at_an_idle_connection_is_answered() -> None:
    """A server that ends closes what is idle; a request that its loop has not read yet is not idleness."""
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/echo"))
        await read_answer(reader)
        s.server.drain()
        s.server.leave()
        writer.write(request_bytes("/later"))
        await s.wait(lambda: bool(s.app.later))
        s.server.leave()
        s.server.leave()
        s.app.later[0].reply.send_whole(200, [], b"good")
        answer = await read_answer(reader)
        assert (answer.status, answer.body) == (200, b"good")
        assert answer.headers["connection"] == "close"
        assert await at_end(reader)
        writer.transport.abort()


async def test_who_is_turned_away_keeps_an_idle_connection_until_the_server_ends() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/echo"))
        await read_answer(reader)
        s.server.turned_away = True
        s.server.drain()
        for _ in range(3):
            s.server.sweep()
        assert len(s.server.connections) == 1
        s.server.leave()
        s.server.leave()
        assert await at_end(reader)
        writer.transport.abort()


async def test_a_refused_client_that_goes_on_sending_is_cut_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(b"nonsense\r\n\r\n")
        assert (await read_answer(reader)).status == 400
        writer.write(b"more nonsense")
        assert len(s.server.connections) == 1
        monkeypatch.setattr(heads, "LINGER_S", -1.0)
        s.server.sweep()
        await s.wait(lambda: not s.server.connections)
        writer.transport.abort()


async def test_an_error_behind_a_good_request_comes_after_its_answer() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(request_bytes("/later") + b"nonsense\r\n\r\n")
        await s.wait(lambda: bool(s.app.later))
        s.app.later[0].reply.send_whole(200, [], b"good")
        assert (await read_answer(reader)).body == b"good"
        assert (await read_answer(reader)).status == 400
        assert await at_end(reader)
        writer.transport.abort()


@pytest.mark.parametrize(("lines", "status", "code"), [
    (b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n", 501, "transfer_encoding"),
    (b"Transfer-Encoding: chunked\r\n", 400, "malformed_http"), (b"Host: a\r\nHost: a\r\n", 400, "malformed_http"),
    (b"Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400, "malformed_http"),
])
async def test_framing_that_can_be_read_in_two_ways_is_refused(lines: bytes, status: int, code: str) -> None:
    async with site() as s:
        answer = await s.raw(b"POST /echo HTTP/1.1\r\n" + lines + b"\r\n0\r\n\r\n")
        assert (answer.status, answer.json["error"]["code"], answer.headers["connection"]) == (status, code, "close")
        assert not s.app.requests


async def test_a_target_may_be_absolute() -> None:
    async with site() as s:
        assert (await s.raw(request_bytes("http://x:1/echo?a=b", b"1"))).body == b"POST /echo 1"
        assert s.app.requests[0].target == b"/echo?a=b"
        assert (await s.raw(request_bytes("HTTPS://x", method="GET"))).body == b"GET / "


async def test_trailers_are_dropped_and_bounded() -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    async with site() as s:
        answer = await s.raw(head + b"X-Request-Id: trailer\r\nAuthorization: Bearer x\r\n\r\n")
        assert answer.body == b"POST /echo a"
        assert answer.headers["x-request-id"] != "trailer"
        assert b"authorization" not in s.app.requests[0].headers
        reader, writer = await s.open()
        for piece in (head, *[b"X: " + b"y" * 60_000 + b"\r\n"] * 20):
            writer.write(piece)
            await asyncio.sleep(0.005)
        assert (await read_answer(reader)).status == 400
        writer.transport.abort()
