"""Heads that came before: what is like them is what a parser makes of it, others are not known, and they are bounded."""

from __future__ import annotations

import random

import pytest
from paper import Echo, Paper

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http import heads as kh
from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.heads import KnownHead, KnownHeads, whole_read
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.http.server import RequestBounds, Server

BOUNDS = RequestBounds(600, 300, 30.0)
LINES = (b"Host: a", b"content-type: application/json", b"Authorization: Bearer k")


def request(body: bytes = b"{}", *lines: bytes, length: bytes = b"", name: bytes = b"Content-Length: ",
            first: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    return b"\r\n".join([first, *LINES, name + (length or b"%d" % len(body)), *lines, b"", body])


class Counted:
    """A server, and how many of its requests were of known heads."""

    def __init__(self, bounds: RequestBounds = BOUNDS) -> None:
        self.app = Echo()
        self.server = Server(self.app, bounds, connect=ClientConnection)
        self.server.date = b"now"
        self.hits = 0
        find = self.server.heads.find

        def counted(like: kh.Like) -> KnownHead | None:
            found = find(like)
            self.hits += found is not None
            return found

        self.server.heads.find = counted  # type: ignore[method-assign,assignment]

    def read(self, *reads: bytes) -> list[HttpRequest]:
        """What comes of reads of one new connection."""
        before = len(self.app.seen)
        connection = ClientConnection(self.server)
        self.paper = Paper()
        connection.connection_made(self.paper)  # type: ignore[arg-type]
        for data in reads:
            connection.data_received(data)
        return self.app.seen[before:]


@pytest.mark.parametrize("name", [b"Content-Length: ", b"content-length: "])
async def test_what_is_like_one_that_came_is_the_same_as_parsed(name: bytes) -> None:
    fresh, used = Counted(), Counted()
    used.read(request(b'{"first":1}', name=name))
    for body in (b"{}", b'{"a":1}', b"x" * 299):
        [parsed] = Counted().read(request(body, name=name))
        [known] = used.read(request(body, name=name))
        assert len(known.request_id) == len(parsed.request_id) == 32
        assert known.request_id != parsed.request_id
        assert [getattr(known, field) for field in ("method", "path", "target", "headers", "body", "judged", "upload")] == [
            getattr(parsed, field) for field in ("method", "path", "target", "headers", "body", "judged", "upload")]
    assert (used.hits, fresh.hits) == (3, 0)
    assert used.server.bodies.held == 0, "every body was given back"


async def test_bodies_of_known_heads_count_until_they_are_answered() -> None:
    used, app = Counted(), Echo()
    used.read(request())
    used.server.application = app
    held: list[int] = []
    handle = app.handle

    def watched(asked: HttpRequest, reply: Reply) -> RequestHandler | None:
        held.append(used.server.bodies.held)
        return handle(asked, reply)

    app.handle = watched  # type: ignore[method-assign]
    used.read(request(b"x" * 200))
    assert (held, used.hits) == ([200], 1)


@pytest.mark.parametrize("line", [
    b"Expect: 100-continue", b"Connection: close", b"Connection: Upgrade\r\nUpgrade: h2c", b"X-Request-Id: mine",
    b"traceparent: 00", b"X-A: 1\r\nX-A: 2", b"Host: a", b"Content-Length: 2", b"X-A: b\r\n folded",
    b"X-A: b\r\n\tfolded", b"Transfer-Encoding: chunked"])
async def test_heads_with_anything_unusual_are_never_known(line: bytes) -> None:
    used = Counted()
    for _ in range(3):
        used.read(request(b"{}", line))
    assert used.hits == 0


async def test_heads_of_old_or_unwanted_requests_are_never_known() -> None:
    for first in (b"POST /v1/completions HTTP/1.0", b"PUT /v1/completions HTTP/1.1"):
        used = Counted()
        used.app.judge = _refuse if first.startswith(b"PUT") else used.app.judge  # type: ignore[method-assign]
        for _ in range(3):
            used.read(request(first=first))
        assert used.hits == 0, first


def _refuse(method: str, path: str, headers: dict[bytes, bytes]) -> bool:
    raise HttpFault(405, "no")


async def test_a_known_head_that_is_no_longer_in_order_is_judged_again() -> None:
    used = Counted()
    assert len(used.read(request())) == 1
    assert len(used.read(request())) == 1
    used.app.judge = _refuse  # type: ignore[method-assign]
    used.app.still = lambda headers: False  # type: ignore[method-assign]
    assert used.read(request()) == []
    assert any(isinstance(one, bytes) and one.startswith(b"HTTP/1.1 405 ") for one in used.paper.seen)


async def test_a_read_that_is_not_one_whole_request_is_parsed() -> None:
    used, whole = Counted(), request(b'{"a":1}')
    used.read(whole)
    for reads in ([whole[:-1], whole[-1:]], [whole[:50], whole[50:]], [whole + whole], [whole + whole[:9], whole[9:]]):
        assert [one.body for one in used.read(*reads)] == [b'{"a":1}'] * b"".join(reads).count(b"POST"), reads
    for at in range(1, len(whole)):
        assert len(used.read(whole[:at], whole[at:])) == 1, at
    assert used.hits == 0


async def test_bounds_of_bodies_and_heads_hold_for_known_heads() -> None:
    used = Counted()
    used.read(request())
    assert used.read(request(b"x" * 301)) == used.read(request(b"x" * 301))[:0], "413"
    roomy = Counted(RequestBounds(64 << 10, 300, 30.0))
    for _ in range(2):
        roomy.read(request(b"{}", b"X-Long: " + b"l" * kh.MAX_BYTES))
    assert roomy.hits == 0, "it is too long to be kept"


@pytest.mark.parametrize("length", [b"+2", b"2 ", b" 2", b"2,2", b"0x2", b"2_0", b"\xb2", b"", b"2\t", b"00000000002"])
async def test_lengths_that_are_no_plain_numbers_are_parsed(length: bytes) -> None:
    assert whole_read(request(b"{}", length=length or b" ")) is None


async def test_whatever_a_read_is_a_server_that_knows_heads_does_as_one_that_does_not() -> None:
    """Reads that differ from a known one in a byte or two, in every place."""
    dice, usual = random.Random(3), request(b'{"a":1}')
    used = Counted()
    used.read(usual)
    for _ in range(4000):
        data = bytearray(usual)
        for _ in range(dice.choice([1, 1, 2])):
            data[dice.randrange(len(data))] = dice.choice(b"\r\n\t :0123456789aZ\x00\xff{}")
        told = [[(one.method, one.target, one.headers, one.body, one.refusal) for one in server.read(bytes(data))]
                for server in (used, Counted())]
        assert told[0] == told[1], bytes(data)
    assert used.hits > 100, "it is worth comparing"


def test_no_more_than_so_many_heads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kh, "MAX_HEADS", 3)
    heads = KnownHeads()
    for number in range(50):
        like = b"POST / HTTP/1.1\r\nHost: %d\r\nContent-L" % number, b""
        heads.keep(like, KnownHead("POST", "/", b"/", {b"host": b"%d" % number}))
        assert heads.find(like) is not None
        assert len(heads._known) <= 3
