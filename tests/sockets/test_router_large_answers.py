"""Whole answers that are large: they pass through, count, and are never shown as whole where they are not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import strangers
from router_fleet import RouterFleet, fleet, read_answer, request_bytes

from beats import beat  # isort: skip
from xpyd_sidecar.contract.ids import Role

LOOPS = ("uvloop",)
PIECE = 64 << 10
USAGE = b'"usage":{"prompt_tokens":7,"total_tokens":18,"completion_tokens":11,"prompt_tokens_details":{"cached_tokens":5}}}'


class Large:
    """A decode engine whose whole answers are as it is told; what is sent of them, and how they end."""

    def __init__(self) -> None:
        self.size = 1 << 20
        self.end = USAGE
        self.chunked = False
        self.stops = False
        """It closes the connection before the last byte."""
        self.sent = self.asked = 0
        self.address = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = re.search(rb"content-length: ([0-9]+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith(b"get /health"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.asked += b"x-request-id: xpyd-canary-" not in head  # those are the router's own
                framing = b"transfer-encoding: chunked" if self.chunked else b"content-length: %d" % self.size
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + framing + b"\r\n\r\n")
                body = b'{"choices":[{"text":"' + b"x" * (self.size - 21 - len(self.end) - 4) + b'"}],'[:4] + self.end
                for at in range(0, len(body) - self.stops, PIECE):
                    piece = body[at:min(at + PIECE, len(body) - self.stops)]
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
                    self.sent += len(piece)
                    await writer.drain()
                if self.stops:
                    break
                if self.chunked:
                    writer.write(b"0\r\n\r\n")
        writer.close()


@contextlib.asynccontextmanager
async def large(decodes: int = 1, **settings: object) -> AsyncIterator[tuple[RouterFleet, list[Large]]]:
    """A router before such engines."""
    async with fleet(1, 0, **settings) as f, contextlib.AsyncExitStack() as stack:
        engines = [Large() for _ in range(decodes)]
        for number, engine in enumerate(engines):
            server = await stack.enter_async_context(await asyncio.start_server(engine.answer, "127.0.0.1", 0))
            engine.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            f.context.watch.on_message(beat(f"d{number}", Role.DECODE, engine.address, interval_s=60.0))
        yield f, engines
        await f.router.end()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1000, 70_000, 3 << 20])
async def test_it_comes_as_the_engine_wrote_it_and_its_lengths_are_known(size: int, chunked: bool) -> None:
    async with large() as (f, [engine]):
        records = f.records()
        engine.size, engine.chunked = size, chunked
        answer = await f.complete()
        assert (answer.status, answer.complete, len(answer.body)) == (200, True, size)
        assert answer.body.endswith(USAGE)
        await f.wait(lambda: bool(records), "a record")
        assert [(one.outcome, one.prompt_tokens, one.tokens) for one in records] == [("ok", 7, 11)]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("how", ["closed", "aborted"])
async def test_one_that_fails_when_its_client_has_part_of_it_ends_incomplete(how: str, chunked: bool) -> None:
    async with large(2) as (f, engines):
        for engine in engines:
            engine.chunked, engine.stops = chunked, how == "closed"
            engine.end = b'"finish_reason":"abort"}' if how == "aborted" else USAGE
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi"}))
        if chunked:
            answer = await read_answer(reader)
            assert (answer.status, answer.complete) == (200, False)
            assert b'"abort"' not in answer.body
        else:
            with pytest.raises(asyncio.IncompleteReadError):
                await read_answer(reader)
        assert await reader.read() == b"", "and no other answer comes on it"
        assert sum(engine.asked for engine in engines) == 1, "nobody else is asked when the client has part of it"
        writer.transport.abort()


@pytest.mark.parametrize("chunked", [False, True])
async def test_one_that_fails_in_its_beginning_is_asked_elsewhere(chunked: bool) -> None:
    async with large(2) as (f, engines):
        for engine in engines:
            engine.chunked, engine.size = chunked, 40_000
        engines[0].end = engines[1].end = b'"finish_reason":"abort"}'
        answer = await f.complete()
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["code"] == "engine_failed"
        assert [engine.asked for engine in engines] == [1, 1]


async def test_what_a_client_does_not_read_stays_with_the_engine() -> None:
    """Thirty of them took 90 MiB each time over."""
    async with large() as (f, [engine]):
        engine.size = 64 << 20
        writers = []
        for _ in range(4):
            _, writer = await f.connect_narrow(4096)
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi"}))
            writers.append(writer)
        await f.wait(lambda: engine.asked == 4 and engine.sent > 0, "answers that begin")
        await asyncio.sleep(1.0)
        assert engine.sent < 4 * (16 << 20), "the rest waits in the engine"
        assert all(not writer.transport.is_closing() for writer in writers)
        for writer in writers:
            writer.transport.abort()
        await f.wait(lambda: not f.context.servings, "they end with their clients")


@pytest.mark.unsanitized
@pytest.mark.timeout(90)
async def test_large_answers_that_nobody_reads_do_not_take_the_memory_of_a_router(tmp_path: Path) -> None:
    """Thirty answers of 60 MiB took 2.9 GiB."""
    engine, count = Large(), 30
    engine.size = 60 << 20
    server = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
    async with server, strangers.router(tmp_path / "a", decode=f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as r:
        r.forget_peak()
        before, writers = r.rss, []
        for _ in range(count):
            _, writer = await r.connect()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi"}))
            writers.append(writer)
        async with asyncio.timeout(60):
            while engine.asked < count:  # noqa: ASYNC110 (another process asks)
                await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)
        assert await r.ask(request_bytes("/health", method="GET")) == 200
        assert r.peak - before <= count * 1.5, f"{r.peak - before:.0f} MiB"
        for writer in writers:
            writer.transport.abort()
