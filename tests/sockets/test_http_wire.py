from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
import pytest
from raw_engines import Request, standing, streamed, whole

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.http import wire
from xpyd_sidecar.router.http.wire import (
    Chunks,
    HeadReader,
    MalformedMessage,
    ResponseHead,
    WholeBody,
    chunk_of,
    parse_head,
)

LOOPS = ("uvloop",)


def head(**fields: Any) -> ResponseHead:
    made: dict[str, Any] = {"status": 200, "headers": [], "keep_alive": True, "chunked": False, "length": None}
    return ResponseHead(**(made | fields))


def test_a_head_is_parsed() -> None:
    parsed = parse_head(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
                        b"X-A:  b \r\nConnection: keep-alive, x-a")
    assert (parsed.status, parsed.chunked, parsed.length, parsed.keep_alive) == (200, True, None, True)
    assert parsed.is_event_stream
    assert parsed.end_to_end() == [(b"content-type", b"text/event-stream")], "what Connection names is dropped too"


def test_headers_that_the_router_writes_itself_are_dropped() -> None:
    parsed = parse_head(b"HTTP/1.1 200 OK\r\nDate: x\r\nServer: y\r\nContent-Length: 3\r\nX-Request-Id: z\r\nX-Kept: k")
    assert parsed.end_to_end() == [(b"x-kept", b"k")]
    assert parsed.passed_on() == parsed.passed_on() == b"x-kept: k\r\n"
    assert parsed.length == 3


@pytest.mark.parametrize(("raw", "keep"), [
    (b"HTTP/1.1 200 OK", True), (b"HTTP/1.1 200", True), (b"HTTP/1.0 200 OK", False),
    (b"HTTP/1.1 200 OK\r\nConnection: Close", False), (b"HTTP/1.0 200 OK\r\nConnection: keep-alive", True),
])
def test_whether_the_connection_can_be_used_again(raw: bytes, keep: bool) -> None:
    assert parse_head(raw).keep_alive is keep


@pytest.mark.parametrize("raw", [
    b"", b"garbage", b"HTTP/2 200 OK", b"HTTP/1.1 2x0 OK", b"HTTP/1.1 2000", b"HTTP/1.1 200 OK\r\nno colon",
    b"HTTP/1.1 200 OK\r\n: v", b"HTTP/1.1 200 OK\r\n folded: v", b"HTTP/1.1 200 OK\r\nname : v",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2", b"HTTP/1.1 200 OK\r\nContent-Length: -1",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked", b"HTTP/1.1 204 x\r\nTransfer-Encoding: chunked",
    b"HTTP/1.1 200 OK\r\nContent-Length: %b2" % (b"0" * 5000), b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 19,
    b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1", b"HTTP/1.1 200 OK\r\nContent-Length:",
    b"HTTP/1.1 200 OK\r\nContent-Length: +1",
    "HTTP/1.1 200 OK\r\nContent-Length: ٣".encode(),
    b"HTTP/1.1 200 OK\r\nX: a\r\n folded", b"HTTP/1.1 200 OK\r\nX: a\r\n\tfolded",
    *[b"HTTP/1.1 200 OK\r\nx-a: b%bset-cookie: injected=1" % bytes([byte]) for byte in (*range(9), *range(10, 32), 127)],
    *[b"HTTP/1.1 200 O%bK" % bytes([byte]) for byte in (0, 10, 13, 127)],
    *[b"HTTP/1.1 200 OK\r\nx%ba: b" % bytes([byte]) for byte in b' \t\n\r\0\x7f\x80"(),/;<=>?@[\\]{}'],
    b"HTTP/1.1 200 OK\r\nname\t: v", b"\r\nHTTP/1.1 200 OK", b" HTTP/1.1 200 OK", b"HTTP/1.1  200 OK", b"HTTP/1.1\t200 OK",
    b"HTTP/1.1 20 OK", b"HTTP/1.1 200OK", b"HTTP/1.1 000 OK", b"HTTP/1.1 600 OK", b"HTTP/1.2 200 OK", b"http/1.1 200 OK",
    b"HTTP/1.1 200 OK\r\n\r\nx: y", b"HTTP/1.1 200 OK\r\n",
])
def test_a_malformed_head_is_told(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_head(raw)


class Seen:
    """What another parser reads of a head."""

    def __init__(self, raw: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = self.keep_alive = False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(raw + b"\r\n\r\n")
        self.status = self.parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete, self.keep_alive = True, self.parser.should_keep_alive()


LINES = (b"Content-Length: 5", b"content-length:5 ", b"Content-Length: 6", b"Transfer-Encoding: chunked",
         b"transfer-encoding: Chunked",
         b"Transfer-Encoding: gzip", b"Connection: close", b"Connection: keep-alive", b"X-A: b",
         b"X-A:", b"x-b:\tc\t", b"x: \xc3\xa9",
         b"Content-Type: text/event-stream", b"X: a, b;c=\"d\"", b"Set-Cookie: a=b", b"Content-Length: 000000005")
FIRST = (b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.0 200 OK", b"HTTP/1.1 404 Not Found",
         b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified",
         b"HTTP/1.1 503 ", b"HTTP/1.1 200 \xc3\xa9")


def test_what_another_parser_refuses_or_reads_otherwise_is_refused() -> None:
    rng = random.Random(23)
    taken = refused = 0
    for _ in range(30_000):
        raw = b"\r\n".join([rng.choice(FIRST), *rng.choices(LINES, k=rng.randrange(4))])
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(raw) + 1)
            put = rng.choice((b"", bytes([rng.randrange(256)]), b"\r\n", b"\n", b" ", b":"))
            raw = raw[:at] + put + raw[at + rng.randrange(2):]
        if b"\r\n\r\n" in raw:
            continue
        try:
            head = parse_head(raw)
        except MalformedMessage:
            refused += 1
            continue
        taken += 1
        seen = Seen(raw)  # raises where it takes none
        assert seen.complete, raw
        assert (seen.status, seen.headers) == (head.status, head.headers), raw
        if head.chunked or head.length is not None:
            assert seen.keep_alive or not head.keep_alive, raw
        text = wire.lines_of(head.headers)
        assert text.count(b"\n") == text.count(b"\r\n") == len(head.headers), raw
    assert min(taken, refused) > 5000


def test_what_any_connection_header_names_is_dropped() -> None:
    parsed = parse_head(b"HTTP/1.1 200 OK\r\nConnection: x-a\r\nConnection: X-B , x-close\r\nx-a: 1\r\nx-b: 2\r\nx-c: 3")
    assert parsed.end_to_end() == [(b"x-c", b"3")]
    assert parsed.keep_alive


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
FINAL = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_interim_answers_are_passed_over_however_they_are_split(size: int) -> None:
    reader, data = HeadReader(), INTERIM * 2 + FINAL + b"hi"
    for at in range(0, len(data), size):
        found = reader.feed(data[at:at + size])
        if found is not None:
            head, rest = found
            assert (head.status, rest + data[at + size:]) == (200, b"hi")
            return
    pytest.fail("no head was found")


def test_interim_answers_are_bounded_and_each_answer_has_its_own() -> None:
    one = b"HTTP/1.1 100 Continue\r\n\r\n"
    reader = HeadReader()
    for _ in range(3):
        assert reader.feed(one * 16 + FINAL) is not None
    with pytest.raises(MalformedMessage, match="interim"):
        reader.feed(one * 17 + FINAL)
    reader.reset()
    for _ in range(16):
        assert reader.feed(one) is None
    with pytest.raises(MalformedMessage, match="interim"):
        reader.feed(one)
    with pytest.raises(MalformedMessage, match="switch"):
        HeadReader().feed(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n")


@pytest.mark.parametrize("raw", [
    b"HTTP/1.1 200 OK\n\n", b"HTTP/1.1 200 OK\r\nx: y\n", b"HTTP/1.1 200 OK\rx", b"HTTP/1.1 200 OK\r\n\0", b"\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 66_000, b"HTTP/1.1 200 OK\r\nx: " + b"y" * 66_000 + b"\r\n\r\n",
])
def test_a_head_that_would_not_end_is_told_at_once(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        HeadReader().feed(raw)


def test_answers_without_a_body() -> None:
    assert parse_head(b"HTTP/1.1 204 No Content\r\nContent-Length: 5").length == 0
    parsed = parse_head(b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked")
    assert (parsed.length, parsed.chunked) == (0, False)
    assert WholeBody(head(status=204, length=0), 10).done


BODY = b"5\r\nhello\r\n1;ext=1\r\n,\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("size", range(1, len(BODY) + 1))
def test_chunks_come_whole_however_they_are_split(size: int) -> None:
    chunks, found = Chunks(), []
    for at in range(0, len(BODY), size):
        assert not chunks.done
        found += chunks.feed(BODY[at:at + size])
    assert chunks.done
    assert [payload for _, payload in found] == [b"hello", b",", b"0123456789"]
    assert b"".join(framed for framed, _ in found) == BODY[:BODY.index(b"0\r\nTrailer")]


@pytest.mark.parametrize("raw", [
    b" 5\r\nhello\r\n", b"\t5\r\nhello\r\n", b"\n5\r\nhello\r\n", b"5\n\r\nhello\r\n", b"+5\r\nhello\r\n",
    b"x\r\n", b"\r\n", b"-1\r\n", b"0x5\r\nhello\r\n", b"1_0\r\n", b"fffffffff\r\n", b"5\r\nhelloXX", b"7fffffff\r\n",
    b"5" * 2000, b"5;a\nb\r\nhello\r\n", b"5;a\0\r\nhello\r\n", b"5;a\rb\r\nhello\r\n", b"5 5\r\nhello\r\n",
    b"0\r\n\r\nmore", b"0\r\nA: b\r\n\r\nmore",
])
def test_malformed_chunks_are_told(raw: bytes) -> None:
    chunks = Chunks()
    with pytest.raises(MalformedMessage):
        chunks.feed(raw)


def test_space_may_stand_between_a_chunks_size_and_what_follows_it() -> None:
    for raw in (b"5 \r\nhello\r\n", b"5\t ;a=b\r\nhello\r\n", b"5;a=b\r\nhello\r\n"):
        assert Chunks().feed(raw) == [(raw, b"hello")]


def test_nothing_may_follow_the_last_chunk() -> None:
    chunks = Chunks()
    chunks.feed(b"0\r\n\r\n")
    assert chunks.done
    assert chunks.feed(b"") == []
    with pytest.raises(MalformedMessage):
        chunks.feed(b"x")


def test_trailers_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_HEAD", 100)
    with pytest.raises(MalformedMessage, match="trailers"):
        Chunks().feed(b"0\r\n" + b"A: b\r\n" * 50)


def test_a_body_by_length() -> None:
    body = WholeBody(head(length=5), 10)
    body.feed(b"he")
    assert not body.done
    assert not body.on_eof(), "cut short"
    body.feed(b"llo")
    assert body.done
    assert body.take() == b"hello"
    with pytest.raises(MalformedMessage):
        body.feed(b"x")


def test_a_body_in_chunks() -> None:
    body = WholeBody(head(chunked=True), 100)
    body.feed(BODY)
    assert (body.done, body.take()) == (True, b"hello,0123456789")


def test_a_body_until_the_end() -> None:
    body = WholeBody(head(), 100)
    body.feed(b"abc")
    assert not body.done
    assert body.on_eof()
    assert body.take() == b"abc"


def test_bodies_are_bounded() -> None:
    with pytest.raises(MalformedMessage, match="limit"):
        WholeBody(head(length=11), 10)
    body = WholeBody(head(), 10)
    with pytest.raises(MalformedMessage, match="more than 10"):
        body.feed(b"x" * 11)
    body = WholeBody(head(length=3), 10)
    with pytest.raises(MalformedMessage, match="after the end"):
        body.feed(b"abcd")


def test_framing() -> None:
    assert chunk_of(b"hello world, 16b") == b"10\r\nhello world, 16b\r\n"
    assert chunk_of(b"") == b"0\r\n\r\n"


# ---- what becomes of it


def saying(raw: bytes) -> Callable[[Request], Awaitable[None]]:
    async def serve(request: Request) -> None:
        await request.say(raw)
        await request.gone.wait()
    return serve


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"
BROKEN = {
    "line end in a value": OK + b"x-a: b\nset-cookie: injected=1\r\n\r\n{}", "nul in a value": OK + b"x-a: b\0c\r\n\r\n{}",
    "5000 digits": b"HTTP/1.1 200 OK\r\ncontent-length: %b2\r\n\r\n{}" % (b"0" * 5000),
    "length and coding": OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "interim without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 4000 + OK + b"\r\n{}",
    "switch": b"HTTP/1.1 101 Switching\r\n\r\n",
    "line feeds alone": b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}",
    "stream": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-a: b\nc: d\r\n\r\n",
}
ASKED = [("/v1/completions", {"model": "tiny", "prompt": "hi"}),
         ("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}),
         ("/tokenize", {"model": "tiny", "prompt": "hi"}),
         ("/v1/messages", {"model": "tiny", "messages": [], "max_tokens": 1})]


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize(("path", "body"), ASKED, ids=["whole", "stream", "passed", "dialect"])
async def test_a_broken_head_is_its_engines_failure(path: str, body: dict[str, Any], raw: bytes,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    async with standing((Role.DECODE, saying(raw))) as (f, [engine]):
        answer = await f.post(path, body)
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_failed")
        assert "set-cookie" not in answer.headers
        assert b"injected" not in answer.body
        assert engine.asked, "it was asked"
        engine.serve = whole
        assert (await f.complete()).status == 200, "and is asked again"
    assert not [record for record in caplog.records if record.exc_info], "no error of the router's own"


@pytest.mark.parametrize("stream", [False, True])
async def test_another_engine_is_asked_where_nothing_was_relayed(stream: bool) -> None:
    good = streamed if stream else whole
    async with standing((Role.DECODE, saying(BROKEN["line end in a value"])), (Role.DECODE, good)) as (f, engines):
        for _ in range(4):
            answer = await f.complete(stream=stream)
            assert answer.status == 200
            assert "t0 " in answer.text
        assert all(engine.asked for engine in engines)


async def test_interim_answers_of_engines_are_passed_over() -> None:
    for path, body in ASKED[:3]:
        async def serve(request: Request, stream: bool = bool(body.get("stream"))) -> None:
            await request.say(INTERIM * 4)
            await (streamed(request) if stream else whole(request))
        async with standing((Role.DECODE, serve)) as (f, _):
            answer = await f.post(path, body)
            assert answer.status == 200
            assert b"t0 " in answer.body
