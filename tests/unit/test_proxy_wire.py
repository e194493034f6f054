from __future__ import annotations

from typing import Any

import pytest

from xpyd_sidecar.proxy import wire
from xpyd_sidecar.proxy.wire import Chunks, Head, Malformed, WholeBody, chunk_of, parse_head


def head(**fields: Any) -> Head:
    made: dict[str, Any] = {"status": 200, "headers": [], "keep_alive": True, "chunked": False, "length": None}
    return Head(**(made | fields))


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
])
def test_a_malformed_head_is_told(raw: bytes) -> None:
    with pytest.raises(Malformed):
        parse_head(raw)


def test_answers_without_a_body() -> None:
    assert parse_head(b"HTTP/1.1 204 No Content\r\nContent-Length: 5").length == 0
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
    b"5" * 2000,
    b"0\r\n\r\nmore", b"0\r\nA: b\r\n\r\nmore",
])
def test_malformed_chunks_are_told(raw: bytes) -> None:
    chunks = Chunks()
    with pytest.raises(Malformed):
        chunks.feed(raw)


def test_space_may_stand_between_a_chunks_size_and_what_follows_it() -> None:
    for raw in (b"5 \r\nhello\r\n", b"5\t ;a=b\r\nhello\r\n", b"5;a=b\r\nhello\r\n"):
        assert Chunks().feed(raw) == [(raw, b"hello")]


def test_nothing_may_follow_the_last_chunk() -> None:
    chunks = Chunks()
    chunks.feed(b"0\r\n\r\n")
    assert chunks.done
    assert chunks.feed(b"") == []
    with pytest.raises(Malformed):
        chunks.feed(b"x")


def test_trailers_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_HEAD", 100)
    with pytest.raises(Malformed, match="trailers"):
        Chunks().feed(b"0\r\n" + b"A: b\r\n" * 50)


def test_a_body_by_length() -> None:
    body = WholeBody(head(length=5), 10)
    body.feed(b"he")
    assert not body.done
    assert not body.on_eof(), "cut short"
    body.feed(b"llo")
    assert body.done
    assert body.take() == b"hello"
    with pytest.raises(Malformed):
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
    with pytest.raises(Malformed, match="limit"):
        WholeBody(head(length=11), 10)
    body = WholeBody(head(), 10)
    with pytest.raises(Malformed, match="more than 10"):
        body.feed(b"x" * 11)
    body = WholeBody(head(length=3), 10)
    with pytest.raises(Malformed, match="after the end"):
        body.feed(b"abcd")


def test_framing() -> None:
    assert chunk_of(b"hello world, 16b") == b"10\r\nhello world, 16b\r\n"
    assert chunk_of(b"") == b"0\r\n\r\n"
