from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections import Counter
from typing import Any

import pytest
from paper import Echo, served

from xpyd_sidecar.proxy import ids, intake
from xpyd_sidecar.proxy.connection import Connection
from xpyd_sidecar.proxy.incoming import Bounds
from xpyd_sidecar.proxy.reply import HttpRequest
from xpyd_sidecar.proxy.server import Server
from xpyd_sidecar.routing import shapes

TAKE = intake.take
COMPILED = TAKE.__module__ != intake.__name__
compiled = pytest.mark.skipif(not COMPILED, reason="nothing was compiled here")
CASES = int(os.environ.get("XPYD_FUZZ", "3000"))
BOUNDS = Bounds(600, 300, 30.0)
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


@compiled
async def test_a_request_taken_in_one_call_is_the_same_as_a_parsed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, odd, malformed and smuggled ones, alone and behind each other on one connection."""
    dice, taken = random.Random(int(os.environ.get("XPYD_SEED", "5"))), 0

    def counted(*given: Any) -> Any:
        nonlocal taken
        found = TAKE(*given)
        taken += found is not None
        return found

    monkeypatch.setattr(ids, "fresh", lambda: "fresh")
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
    for _ in range(CASES):
        reads = reads_of(dice)
        monkeypatch.setattr(intake, "take", intake._nothing)
        expected = await served(reads, BOUNDS)
        monkeypatch.setattr(intake, "take", counted)
        assert await served(reads, BOUNDS) == expected, reads
    assert taken > CASES // 4, "it is worth comparing"


@compiled
def test_only_what_is_plain_is_taken() -> None:
    raw = (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-B: 1\r\nx-b: 2\r\nContent-Length: 2\r\n"
           b"Connection: keep-alive\r\n\r\n{}")
    assert TAKE(raw, 600, 300) == ("/v1/completions", b"/v1/completions", {
        b"host": b"a", b"x-b": b"1", b"content-length": b"2", b"connection": b"keep-alive"}, b"{}")
    for more in (b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Upgrade: h2c", b"Connection: close", b"Host: b",
                 b"Content-Length: 2", b"TE: trailers", b"Proxy-Connection: close", b"X: a\tb", b"X: \xc3\xbc", b"X:"):
        assert TAKE(raw.replace(b"X-B: 1", more), 600, 300) is None, more
    long = raw.replace(b"X-B: 1", b"Content-Length: 9999999999")
    assert TAKE(long, 600, 300) is None
    both = long.replace(b"Content-Length: 2\r\n", b"Content-Length: 9999999999\r\n")
    assert TAKE(both, 600, 300) is None, "no number of 20 digits"
    assert TAKE(raw, 20, 300) is None
    assert TAKE(raw, 600, 1) is None
    for cut in range(len(raw)):
        assert TAKE(raw[:cut], 600, 300) is None
    assert TAKE(raw + b" ", 600, 300) is None


PLAIN = ['"text"', '"a \\"image_url\\" b"', '""', '"caf\u00e9 \u65e5\u672c"', '"\\u00e9\\n"', "[]", "7", "123456789",
         "true", '[{"role":"user","content":"hi"}]', '{"a" : [ {"b":null} , -2.5 ]}']
ODD = ['"\\ud83d"', "[1,2,3]", "1234567890", "-1", "1.5", "1e3", "-0", "01", "1.", "null", "nul", "{}", "{,}", "[1,]", "[",
       "", '"', '[{"content":[{"type":"image_url"}]}]', '[{"type":"file"}]', '[{"role":"thinking"}]', '["refusal"]',
       '[{"content":"thinking"}]', '[{"content":"video"}]', '["audio', '["file', "[" * 20 + "]" * 20, '"a\x01b"', "'x'",
       '"\\x"', f'"{"long " * 100}"']
NAMES = [*shapes.KINDS, "model", "stream", "n", "temperature"]


def some_body(dice: random.Random) -> bytes:
    """What a client might send, or nearly that."""
    odd = dice.random() < 0.4
    spaces = ["", " ", "\n ", "\t", "\x00", "\x0b"] if odd else ["", "", "", " "]
    fields = []
    for name in dice.sample(NAMES, dice.randrange(1, len(NAMES))) + (dice.sample(NAMES, 1) if odd else []):
        said = dice.choice([name, name, name, 'a\\"b', "caf\u00e9", ""]) if odd else name
        fields.append(dice.choice(spaces).join(('', f'"{said}"', ":", dice.choice([*PLAIN, *ODD] if odd else PLAIN), "")))
    body = f'{dice.choice(spaces)}{{{",".join(fields)}}}{dice.choice(spaces)}'.encode()
    if odd and dice.random() < 0.3:
        at = dice.randrange(len(body))
        body = body[:at] + dice.choice([b"", b",", b"}", b'"', b"\xff", b"\xc3"]) + body[at + 1:]
    return body


@compiled
def test_the_shape_of_a_body_is_found_in_one_call_as_by_python() -> None:
    dice, seen, keys = random.Random(5), Counter[int](), dict[object, object]()
    for _ in range(5 * CASES):
        body, most = some_body(dice), dice.choice([0, 40, shapes.MAX_BYTES, shapes.MAX_BYTES])
        found, plain = intake.looked(body, most), shapes.looked(body, most)
        if found is None:
            continue
        assert plain is not None, body
        assert found[1] == plain[1], body
        assert keys.setdefault(found[0], plain[0]) == plain[0], "equal keys differ in slots alone"
        seen[len(found[1])] += 1
    assert set(seen) >= set(range(5))
    assert seen.total() > CASES, "it is worth comparing"


@compiled
def test_what_clients_send_is_found_in_one_call() -> None:
    for body in (b'{"model":"m","messages":[{"role":"user","content":"\\"hi\\" \xc3\xa9"}],"max_tokens":8,"stream":true}',
                 b' { "prompt" : "a\\nb" , "temperature" : 0.7 , "stream_options" : { "include_usage" : true } }\n'):
        found, plain = intake.looked(body, 1024), shapes.looked(body, 1024)
        assert found is not None
        assert plain is not None
        assert found[1] == plain[1]
    for body in (b'{"prompt":"a","prompt":"b"}', b'{"prompt":"a"} x', b'{"prompt":"a",}', b'{"prompt":"a"', b"[]", b"{}"):
        assert intake.looked(body, 1024) is None
    most = b'{"prompt":"","n":111111111}'
    assert [intake.looked(most, len(most) + more) is None for more in (-3, -2, -1)] == [True, True, False]
    for wrong in (("{}", 1024), (b"{}",), (b"{}", 2**80)):
        with pytest.raises((TypeError, OverflowError)):
            intake.looked(*wrong)  # type: ignore[arg-type]


@compiled
def test_a_message_is_put_together_in_one_call_as_by_python() -> None:
    dice = random.Random(6)
    for _ in range(500):
        values = tuple(os.urandom(dice.choice([0, 1, 30, 3000])) for _ in range(dice.randrange(1, 6)))
        form = tuple(dice.choice([dice.randrange(len(values)), b"literal", b""]) for _ in range(dice.randrange(8)))
        args = (b"POST /x\r\ncontent-length: ", b"\r\n\r\n", form, values)
        assert intake.message(*args) == shapes.message(*args)
    for wrong in ((b"", b"", (3,), (b"",)), (b"", b"", (-1,), (b"",)), (b"", b"", (2**80,), (b"",)), (b"", b"", ("a",), ()),
                  (b"", b"", (0,), (None,)), ("", b"", (), ()), (b"", b"", [], ()), (b"", b"")):
        with pytest.raises((TypeError, IndexError, OverflowError)):
            intake.message(*wrong)  # type: ignore[arg-type]


class Broken(Echo):
    """An application with a bug at the door of the straight course."""

    def enter(self, request: HttpRequest, client: object) -> None:
        raise RuntimeError("a bug")


@compiled
async def test_a_bug_at_the_door_costs_one_request_which_is_answered_once() -> None:
    app = Broken()
    server = Server(app, BOUNDS)
    near = await asyncio.get_running_loop().create_server(lambda: Connection(server), "127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection(*near.sockets[0].getsockname())
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                     b'content-length: 15\r\n\r\n{"prompt":"hi"}')
        answer = await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
    finally:
        near.close()
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1") == 1
    assert not app.seen, "served as well"
