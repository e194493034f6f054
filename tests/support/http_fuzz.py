"""Seeded HTTP against a real server: malformed, slow, split, pipelined, smuggling shapes, and what must hold after each.

    async with fleet(...) as f:
        report = await Fuzz(port, seed).run(rounds=500)

What must hold
  * No hang: every connection is answered or closed within ``DEADLINE_S``.
  * No desync: answers come in the order of the requests and name them (X-Request-Id); bytes that were sent as a body are
    never answered as a request. Every answer is whole HTTP.
  * No harm: a request on another connection is answered right, while and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from beats import beat
from router_fleet import Answer, RouterFleet, fleet, read_answer

from xpyd_sidecar.contract.ids import Role

DEADLINE_S = 20.0
ROUNDS = 6
"""Times that the deadline may go by while this process hardly runs."""
RUN_S = 2.0
"""Processor time of this process that must have gone by too, before an answer counts as missing; not for shorter waits."""
QUIET_S = 0.3
"""After so long without an answer to what may be half a request, its connection is ended."""
SMUGGLED = b"smuggled"
"""Request id of requests that stand inside bodies: an answer to one is a desync."""


class Anything:
    """An engine that reads any whole request and answers it: a stream where ``"stream":true`` is asked for."""

    async def start(self) -> str:
        """Listen; the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                body = await self._body((await reader.readuntil(b"\r\n\r\n")).lower(), reader)
                if b'"stream":true' in body:
                    event = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n'
                    parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (event, b"data: [DONE]\n\n", b""))
                    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    writer.write(head + parts)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
                await writer.drain()
        writer.transport.abort()

    @staticmethod
    async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
        if b"transfer-encoding: chunked" not in head:
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return await reader.readexactly(int(length or b"0"))
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return body


@contextlib.asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[RouterFleet]:
    """A router before engines that take anything. It waits longer for a request than the fuzz for an answer: on a starved
    machine a 408 would hide what is looked for.
    """
    engines = [Anything() for _ in range(3)]
    made: dict[str, Any] = {"max_header_bytes": 16 << 10, "receive_timeout_s": 300.0, "max_body_bytes": 1 << 20}
    async with fleet(0, 0, **(made | settings)) as f:
        for number, engine in enumerate(engines):
            role = Role.PREFILL if number == 0 else Role.DECODE
            f.context.watch.on_message(beat(f"e{number}", role, await engine.start(), interval_s=1e6))
        try:
            yield f
        finally:
            for engine in engines:
                engine.stop()


@dataclass
class Shape:
    """Bytes of one connection and what must come back."""

    name: str
    data: bytes
    ids: list[str]
    """Request ids that must be answered, in order."""
    refused: bool = False
    """After those, one error answer with a 4xx or 5xx, and the end."""
    maybe: bool = False
    """Nothing is known of the answers but that they are whole, and none is of a smuggled request."""


@dataclass
class Report:
    """What was seen."""

    rounds: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


class Fuzz:
    """One seeded run against one port."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._count = 0
        self._seed = seed
        self.report = Report()

    # ---- requests

    def _id(self) -> str:
        self._count += 1
        return f"r{self._count}"

    def _good(self) -> tuple[bytes, str]:
        """A request that is right, of a random kind, and its id."""
        rng, name = self._rng, self._id()
        body = rng.choice([b"", b'{"model":"tiny","prompt":"hi","max_tokens":2}',
                           b'{"model":"tiny","prompt":"hi","stream":true}', self._smuggled(), b"x" * rng.randrange(3000)])
        path = rng.choice([b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/nothing",
                           b"/v1/audio/transcriptions"])
        if rng.random() < 0.3:
            method, path, body = b"GET", rng.choice([b"/health", b"/v1/models", b"/metrics", b"http://a/health"]), b""
        else:
            method = b"POST"
        lines = [b"Host: a", b"x-request-id: " + name.encode()]
        if rng.random() < 0.8:
            lines.append(rng.choice([b"Content-Type: application/json", b"content-type: application/json; charset=utf-8"]))
        lines += rng.sample([b"Accept: */*", b"X-Empty:", b"X-Spaces: \t a b \t", b"traceparent: 00-1-2-01",
                             b"X-Long: " + b"y" * rng.randrange(500), b"Cookie: a=b; c=d",
                             b"User-Agent: \xff\xfe"], rng.randrange(4))
        if method == b"POST" and rng.random() < 0.5:
            lines.append(rng.choice([b"Transfer-Encoding: chunked", b"transfer-encoding: CHUNKED"]))
            rng.shuffle(lines)
            return self._head(method, path, lines) + self._chunked(body), name
        if method == b"POST":
            lines.append(b"Content-Length: %d" % len(body))
        rng.shuffle(lines)
        return self._head(method, path, lines) + body, name

    @staticmethod
    def _head(method: bytes, path: bytes, lines: list[bytes]) -> bytes:
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, path, b"".join(line + b"\r\n" for line in lines))

    def _chunked(self, body: bytes) -> bytes:
        out, at = b"", 0
        while at < len(body):
            size = self._rng.randrange(1, 400)
            part = body[at:at + size]
            extension = self._rng.choice([b"", b"", b";a=b", b';a="b;c"'])
            out += b"%x%b\r\n%b\r\n" % (len(part), extension, part)
            at += size
        return out + b"0\r\n" + self._rng.choice([b"", b"X-Trailer: t\r\nx-request-id: smuggled\r\n"]) + b"\r\n"

    @staticmethod
    def _smuggled() -> bytes:
        return b"GET /health HTTP/1.1\r\nHost: a\r\nx-request-id: smuggled\r\n\r\n"

    # ---- shapes

    def shape(self) -> Shape:
        """A random one."""
        make: Callable[[], Shape] = self._rng.choice([
            self._pipelined, self._pipelined, self._ambiguous, self._ambiguous, self._mangled, self._cut, self._endless])
        return make()

    def _some(self, most: int) -> tuple[bytes, list[str]]:
        goods = [self._good() for _ in range(self._rng.randrange(most + 1))]
        return b"".join(data for data, _ in goods), [name for _, name in goods]

    def _pipelined(self) -> Shape:
        data, ids = self._some(8)
        return Shape("pipelined", data, ids)

    def _ambiguous(self) -> Shape:
        before, ids = self._some(2)
        tail = self._smuggled()
        return Shape("ambiguous", before + self._rng.choice(AMBIGUOUS) + tail, ids, refused=True)

    def _mangled(self) -> Shape:
        data, _ = self._some(3)
        raw = bytearray(data or self._good()[0])
        for _ in range(self._rng.randrange(1, 6)):
            at = self._rng.randrange(len(raw))
            match self._rng.randrange(4):
                case 0:
                    raw[at] = self._rng.randrange(256)
                case 1:
                    del raw[at:at + self._rng.randrange(1, 20)]
                case 2:
                    raw[at:at] = self._rng.choice([b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b"\xff", b"\t"])
                case 3:
                    raw[at:at] = raw[self._rng.randrange(len(raw)):][:50]
            if not raw:
                raw = bytearray(b"\r\n")
        return Shape("mangled", bytes(raw), [], maybe=True)

    def _cut(self) -> Shape:
        data, _ = self._good()
        return Shape("cut", data[:self._rng.randrange(len(data))], [], maybe=True)

    def _endless(self) -> Shape:
        what = self._rng.choice([b"GET /" + b"a" * 9000, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"b" * 400_000,
                                 b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 3000,
                                 b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n",
                                 _POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: "
                                 + b"t" * 600_000,
                                 _POST + b"Transfer-Encoding: chunked\r\n\r\n1;"
                                 + b"e" * 600_000])
        return Shape("endless", what, [], refused=True)

    # ---- running

    async def run(self, rounds: int, beside: int = 4) -> Report:
        """Shapes, several connections at a time; after each of them a request on a connection of its own."""
        gate = asyncio.Semaphore(beside)

        async def one(shape: Shape, style: int) -> None:
            async with gate:
                await self._one(shape, style)

        async with asyncio.TaskGroup() as group:
            for _ in range(rounds):
                group.create_task(one(self.shape(), self._rng.randrange(4)))
        return self.report

    async def _one(self, shape: Shape, style: int) -> None:
        self.report.rounds += 1
        self.report.shapes[shape.name] += 1
        try:
            answers = await self._talk(shape, style)
            self._judge(shape, answers)
            await self._canary()
        except (AssertionError, ValueError, LookupError, OSError, asyncio.IncompleteReadError) as error:
            self.report.bad.append(f"seed {self._seed}: {shape.name}: {error!r}: {shape.data[:300]!r}")

    async def _talk(self, shape: Shape, style: int) -> list[Answer]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        try:
            sending = asyncio.ensure_future(self._send(writer, shape.data, style))
            answers: list[Answer] = []
            reading: asyncio.Future[Answer] | None = None
            expected = len(shape.ids) + shape.refused
            ended = False
            while shape.maybe or len(answers) < expected:
                reading = reading or asyncio.ensure_future(read_answer(reader, 1e6))
                if not await _done(reading, QUIET_S if shape.maybe and not ended else DEADLINE_S):
                    assert shape.maybe, f"no answer after {len(answers)} of {expected}"
                    assert not ended, "neither answered nor closed"
                    await sending
                    ended = True
                    with contextlib.suppress(OSError):  # the server may have closed by now
                        writer.write_eof()  # whatever was understood of it: this ends the rest
                    continue
                try:
                    answer, reading = reading.result(), None
                except (asyncio.IncompleteReadError, ConnectionError):
                    assert shape.maybe or shape.refused, f"closed after {len(answers)} of {expected} answers"
                    break
                if answer.status != 100:
                    answers.append(answer)
                    self.report.statuses[answer.status] += 1
                    if answer.headers.get("connection") == "close":
                        break
            await asyncio.gather(sending, return_exceptions=True)
            if shape.refused or shape.maybe:
                return answers
            writer.write_eof()
            rest = asyncio.ensure_future(reader.read())
            assert await _done(rest, DEADLINE_S), "not closed"
            assert rest.result() == b"", f"bytes that nobody asked for: {rest.result()[:80]!r}"
            return answers
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes, style: int) -> None:
        with contextlib.suppress(ConnectionError):
            if style == 0:
                writer.write(data)
            elif style == 1 and len(data) < 4000:  # byte by byte
                for at in range(len(data)):
                    writer.write(data[at:at + 1])
                    if at % 16 == 0:
                        await asyncio.sleep(0)
            else:
                rng, at = random.Random(len(data)), 0
                while at < len(data):
                    size = rng.randrange(1, max(2, len(data) // 8))
                    writer.write(data[at:at + size])
                    at += size
                    await asyncio.sleep(0.001 if style == 3 else 0)
            await writer.drain()

    @staticmethod
    def _judge(shape: Shape, answers: list[Answer]) -> None:
        ids = [answer.headers["x-request-id"] for answer in answers]
        # A mangled length can make a body the next request, rightly so.
        assert shape.name == "mangled" or SMUGGLED.decode() not in ids, "DESYNC: a body was answered as a request"
        assert all(answer.complete for answer in answers), "an answer is not whole"
        if shape.maybe:
            return
        assert ids[:len(shape.ids)] == shape.ids, f"answers {ids}, asked {shape.ids}"
        if shape.refused and len(answers) > len(shape.ids):
            last = answers[len(shape.ids)]
            assert 400 <= last.status < 600, f"refused with {last.status}"
            assert last.headers.get("connection") == "close"
        assert len(answers) <= len(shape.ids) + shape.refused

    async def _canary(self) -> None:
        name = self._id()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nx-request-id: %b\r\n\r\n" % name.encode())
            reading = asyncio.ensure_future(read_answer(reader, 1e6))
            assert await _done(reading, DEADLINE_S), "canary"
            answer = reading.result()
            assert (answer.status, answer.body, answer.headers["x-request-id"]) == (200, b"ok\n", name), "canary"
        finally:
            writer.transport.abort()


async def _done(future: asyncio.Future[Any], seconds: float) -> bool:
    """Whether it is done in time. Time in which this process did not run is nobody's: client and server are both in it."""
    began = time.process_time()
    for _ in range(ROUNDS):
        await asyncio.wait({future}, timeout=seconds)
        if future.done() or seconds < RUN_S or time.process_time() - began >= RUN_S:
            break
    return future.done()


_POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
_TE = b"Transfer-Encoding: chunked\r\n"


def _ambiguous(lines: bytes, body: bytes = b"0\r\n\r\n", start: bytes = _POST) -> bytes:
    return start + lines + b"\r\n" + body


AMBIGUOUS = tuple(_ambiguous(lines) for lines in (
    b"Content-Length: 5\r\n" + _TE, _TE + b"Content-Length: 5\r\n", b"Content-Length: 5\r\nContent-Length: 5\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length: +5\r\n",
    b"Content-Length: -5\r\n",
    b"Content-Length: 0x5\r\n", b"Content-Length: 5 5\r\n", b"Content-Length:\r\n",
    b"Content-Length: 99999999999999999999999\r\n",
    b"Content-Length : 5\r\n", b"Transfer-Encoding : chunked\r\n", b"Transfer-Encoding\t: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: chunked, gzip\r\n",
    b"Transfer-Encoding: chunked, chunked\r\n",
    _TE + _TE, b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n", b"X: a\r\n b\r\nContent-Length: 5\r\n",
    b"X: a\r\n\tb\r\nContent-Length: 5\r\n",
    b" X: a\r\nContent-Length: 5\r\n", b"X: a\nContent-Length: 5\r\n", b"X: a\rContent-Length: 5\r\n",
    b"X: \0\r\nContent-Length: 5\r\n",
    b"X\0: a\r\nContent-Length: 5\r\n", b": a\r\nContent-Length: 5\r\n", b"Host: b\r\nContent-Length: 5\r\n",
)) + tuple(_ambiguous(_TE, body) for body in (
    b"0x5\r\nabcde\r\n0\r\n\r\n", b"-5\r\nabcde\r\n0\r\n\r\n", b"+5\r\nabcde\r\n0\r\n\r\n", b"5 \r\nabcde\r\n0\r\n\r\n",
    b" 5\r\nabcde\r\n0\r\n\r\n", b"10000000000000005\r\nabcde\r\n0\r\n\r\n", b"5\nabcde\n0\n\n",
    b"5\r\nabcde\n0\r\n\r\n",
    b"5\r\nabcdef0\r\n\r\n", b"5;a\nb\r\nabcde\r\n0\r\n\r\n", b"5;a\rb\r\nabcde\r\n0\r\n\r\n",
    b"\r\nabcde\r\n0\r\n\r\n",
    b"5\r\nabcde\r\n0\r\nContent-Length: 5\r\n\r\n", b"5\r\nabcde\r\n0\r\nTransfer-Encoding: gzip\r\n\r\n",
)) + (
    _ambiguous(_TE, start=b"POST /v1/completions HTTP/1.0\r\nHost: a\r\nContent-Type: application/json\r\n"),
    _ambiguous(b"", b"", b"GET /health HTTP/1.1\r\n"),
    _ambiguous(b"Content-Length: 5\r\n", b"abcde", b"POST /v1/completions HTTP/1.1\nHost: a\n"),
    _ambiguous(b"", b"", b"GET /health HTTP/1.1\nHost: a\n"),
    _ambiguous(b"", b"", b"GET /health HTTP/2.0\r\nHost: a\r\n"),
    _ambiguous(b"", b"", b"GET /health x HTTP/1.1\r\nHost: a\r\n"),
    _ambiguous(b"", b"", b"GET\t/health\tHTTP/1.1\r\nHost: a\r\n"),
    b"GET /health\r\n\r\n",
)
"""Requests whose framing two readers could understand differently; each must be refused, and nothing after it answered."""
