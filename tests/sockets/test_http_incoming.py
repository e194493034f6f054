from __future__ import annotations

import asyncio
import os
import random
import uuid

import pytest
from fuzz import heads
from paper import Echo, Paper, served

from xpyd_sidecar.router.http import heads as router_heads
from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.http.server import RequestBounds, Server

CASES = int(os.environ.get("XPYD_FUZZ", "3000"))
BOUNDS = RequestBounds(600, 300, 30.0)
ROOMY = RequestBounds(64 << 10, 300, 30.0)
"""No head is near its bound, which counts what was read where a head comes in parts, and its headers where it does not."""
PATHS = [b"/v1/completions", b"/v1/chat/completions"]


def headers_of(dice: random.Random, size: int) -> list[bytes]:
    length = b"%d" % size
    lines = [b"Host: a", b"content-type: application/json", b"Content-Length: " + length]
    for _ in range(dice.randrange(3)):
        lines.insert(dice.randrange(3), dice.choice([
            b"Authorization: Bearer k", b"x-request-id: r-1", b"X-REQUEST-ID: r 2", b"X-Odd_name: a: b  c", b"accept:*/*",
            b"Connection: Keep-Alive", b"User-Agent: OpenAI/Python 1.0", b"X-Again: 1", b"X-Again: 2"]))
    if dice.random() < 0.5:
        lines.insert(dice.randrange(len(lines)), dice.choice([
            b"Transfer-Encoding: chunked", b"transfer-encoding: identity", b"Transfer-Encoding : chunked",
            b"Content-Length: 0", b"content-length: " + length, b"Content-Length: +" + length,
            b"Content-Length: 0" + length,
            b"Content-Length: " + length + b", " + length, b"Content-Length : " + length, b"Host: b", b"Host:",
            b" folded: 1",
            b"Expect: 100-continue", b"expect: other", b"Connection: close", b"Connection: keep-alive, close",
            b"Connection: Upgrade", b"Connection: upgrade\r\nUpgrade: h2c", b"Upgrade: h2c", b"Proxy-Connection: close",
            b"TE: trailers", b"X-A:", b"X-A: \t b", b"X-A: b ", b"X-\xe9: b", b"X-A: \xe9", b"X-A: a\x00b", b"X-A: a\rb",
            b"X(A): b",
            b": b", b"novalue", b"X-Long: " + b"l" * dice.randrange(400, 600), b"X-" + b"n" * 70 + b": 1",
            b"Content-Length: 18446744073709551617"]))
    if dice.random() < 0.06:
        lines.pop(dice.randrange(len(lines)))
    return lines


def made_up(dice: random.Random) -> bytes:
    """A request as clients write it, with now and then something that is unlike it."""
    body = b'{"prompt":"hi"}' * dice.choice([0, 1, 1, 1, 1, 2, 20, 21])
    first = b"POST %b HTTP/1.1" % dice.choice(PATHS)
    if dice.random() < 0.1:
        first = dice.choice([b"POST /v1/completions HTTP/1.0", b"GET /v1/completions HTTP/1.1",
                             b"POST /v1/completions?a=1 HTTP/1.1", b"POST http://h/v1/completions HTTP/1.1",
                             b"post /v1/completions HTTP/1.1", b"PRI * HTTP/2.0",
                             b"POST  /v1/completions HTTP/1.1", b"POST /v1/completionsx HTTP/1.1",
                             b"\r\nPOST /v1/completions HTTP/1.1",
                             b"POST /v1/completions HTTP/1.1 ", b"HEAD /v1/completions HTTP/1.1", b"POST /v1/completions"])
    end = b"\r\n" if dice.random() < 0.97 else dice.choice([b"\n", b"\r", b"\r\r\n"])
    size = len(body) + (dice.choice([-1, 1, 5]) if dice.random() < 0.05 else 0)
    raw = end.join([first, *headers_of(dice, max(size, 0)), b"", b""]) + body
    if dice.random() < 0.15:
        at = dice.randrange(len(raw))
        raw = raw[:at] + dice.choice([b"", bytes([dice.randrange(256)]), b"\r\n", b" "]) + raw[at + dice.randrange(2):]
    return raw


def reads_of(dice: random.Random) -> list[bytes]:
    """A few requests, each a read of its own, or split, or together."""
    found: list[bytes] = []
    for _ in range(dice.choice([1, 1, 2, 3])):
        raw = made_up(dice)
        if dice.random() < 0.1:
            at = dice.randrange(1, len(raw))
            found += [raw[:at], raw[at:]]
        elif dice.random() < 0.1 and found:
            found[-1] += raw
        else:
            found.append(raw)
    return found


def statuses_of(told: list[object]) -> list[bytes]:
    """Of the answers that were written, without those that say to go on."""
    lines = [one[9:12] for one in told if isinstance(one, bytes) and one[:9] == b"HTTP/1.1 "]
    return [status for status in lines if status != b"100"]


def cut(dice: random.Random, raw: bytes) -> list[bytes]:
    """The same bytes in other reads."""
    many = dice.choice([2, 3, len(raw)])
    ends = sorted({dice.randrange(1, len(raw)) for _ in range(many)} | {len(raw)})
    return [raw[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


async def test_requests_are_the_same_however_they_are_cut_and_as_a_parser_alone_finds_them(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, odd, malformed and smuggled ones, alone and behind each other on one connection."""
    dice, seen, refused = random.Random(int(os.environ.get("XPYD_SEED", "5"))), 0, 0
    monkeypatch.setattr(router_heads, "fresh", lambda: "fresh")
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
    for _ in range(CASES):
        reads = reads_of(dice)
        whole, told, _ = await served(reads, ROOMY)
        again, told_again, _ = await served(cut(dice, b"".join(reads)), ROOMY)
        assert again == whole, reads
        statuses = statuses_of(told)
        assert statuses_of(told_again) == statuses, reads
        heads.agree(b"".join(reads), whole, ROOMY.body_bytes)
        seen += len(whole)
        refused += statuses[-1:] != [b"200"]
    assert seen > CASES // 3, "it is worth comparing"
    assert refused > CASES // 4, "it is worth comparing"


async def test_a_plain_request_is_what_was_sent() -> None:
    raw = (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-B: 1\r\nx-b: 2\r\nContent-Length: 2\r\n"
           b"Connection: keep-alive\r\nX-Request-Id: mine\r\n\r\n{}")
    [request], _, _ = await served([raw], BOUNDS)
    assert (request.method, request.path, request.target) == ("POST", "/v1/completions", b"/v1/completions")
    assert (request.request_id, request.body, request.upload) == ("mine", b"{}", None)
    assert request.headers == {b"host": b"a", b"x-b": b"1", b"connection": b"keep-alive",
                               b"x-request-id": b"mine"}
    for size in range(len(raw)):
        assert (await served([raw[:size]], BOUNDS))[0] == []
    for bounds, status in ((RequestBounds(20, 300, 30.0), b"431"), (RequestBounds(600, 1, 30.0), b"413")):
        _, told, _ = await served([raw], bounds)
        assert any(isinstance(one, bytes) and one[9:12] == status for one in told)


@pytest.mark.parametrize(("lines", "fits"), [
    ([b"X-Long: " + b"l" * 90], True), ([b"X-Long: " + b"l" * 91], False),
    ([b"X-A: " + b"1" * 26] * 2 + [b"X-A: " + b"1" * 27], True),
    ([b"X-A: " + b"1" * 26] * 2 + [b"X-A: " + b"1" * 28], False)])
@pytest.mark.parametrize("rest", [b"", b"r" * 200])
async def test_the_bound_of_a_head_is_exact_and_counts_headers_that_are_repeated(
        lines: list[bytes], fits: bool, rest: bytes) -> None:
    """Whether what was read is larger than the bound or not."""
    size = len(rest)
    head = b"\r\n".join([b"POST / HTTP/1.1", b"Host: a", b"Content-Length: %03d" % size, *lines, b"", b""])
    requests, told, _ = await served([head + rest], RequestBounds(9 + 21 + 100, 300, 30.0))
    assert [request.body for request in requests] == ([rest] if fits else [])
    assert any(isinstance(one, bytes) and one[9:12] == (b"200" if fits else b"431") for one in told)


async def test_a_small_body_that_comes_at_once_counts_as_any_other() -> None:
    """Until it is answered; and what is given up gives back what it had."""
    app = Echo()
    server = Server(app, BOUNDS, connect=ClientConnection)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"
    held: list[int] = []
    handle = app.handle

    def kept(request: HttpRequest, reply: Reply) -> RequestHandler | None:
        held.append(server.bodies.held_bytes)
        return handle(request, reply)

    app.handle = kept  # type: ignore[method-assign]
    for reads in ([head + b"body"], [head + b"bo", b"dy"], [head, b"body"], [2 * (head + b"body")],
                  [head + b"body" + head + b"bo"]):
        connection = ClientConnection(server)
        connection.connection_made(Paper())  # type: ignore[arg-type]
        for data in reads:
            connection.data_received(data)
        connection.connection_lost(None)
        assert server.bodies.held_bytes == 0
    assert held == [4, 4, 4, 8, 4, 6]


class Broken(Echo):
    """An application with a bug."""

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        raise RuntimeError("a bug")


async def test_a_bug_costs_one_request_which_is_answered_once() -> None:
    server = Server(Broken(), BOUNDS, connect=ClientConnection)
    near = await asyncio.get_running_loop().create_server(lambda: ClientConnection(server), "127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection(*near.sockets[0].getsockname())
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                     b'connection: close\r\ncontent-length: 15\r\n\r\n{"prompt":"hi"}')
        answer = await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
    finally:
        near.close()
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.count(b"HTTP/1.1") == 1
