from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from scripted_engine import Play, ScriptedEngine

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.http.wire import request_bytes
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.upstream import pool as up
from xpyd_sidecar.router.upstream.call import UpstreamCall
from xpyd_sidecar.router.upstream.pool import EnginePool

LOOPS = ("asyncio", "uvloop")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (engine and pool have no event for it)
            await asyncio.sleep(0.005)


def ask(pool: EnginePool, address: HostPort, request: bytes, sink: Any, events: EventStream | None = None) -> UpstreamCall:
    """Send a request."""
    call = UpstreamCall(pool, address, sink, events)
    pool.send(call, lambda: request)
    return call


class Notes:
    """A sink that writes down what it hears, and can wait for the end."""

    def __init__(self) -> None:
        self.events = self.comments = b""
        self.body = b""
        self.outcome = ""
        self.reason = ""
        self.done = asyncio.Event()

    def on_comments(self, call: UpstreamCall, data: bytes) -> None:
        assert not self.events
        self.comments += data

    def on_events(self, call: UpstreamCall, data: bytes) -> None:
        assert not self.outcome
        assert data
        self.events += data

    def on_end(self, call: UpstreamCall) -> None:
        self._end("end")

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:
        self.body = body
        self._end("whole")

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:
        self.reason = reason.full
        self._end(kind.value)

    def _end(self, outcome: str) -> None:
        assert not self.outcome, "heard of the end twice"
        self.outcome = outcome
        self.done.set()

    async def wait(self) -> str:
        async with asyncio.timeout(30):
            await self.done.wait()
        return self.outcome


def post(engine: ScriptedEngine, body: bytes = b'{"stream": true, "max_tokens": 9}') -> bytes:
    return request_bytes(b"POST", b"/v1/completions", HostPort(engine.address), [(b"x-request-id", b"r")], body)


@contextlib.asynccontextmanager
async def engine_and_pool() -> AsyncIterator[tuple[ScriptedEngine, EnginePool]]:
    engine = await ScriptedEngine("e").start()
    pool = EnginePool(asyncio.get_running_loop())
    try:
        yield engine, pool
    finally:
        pool.close()
        await engine.stop()
        assert not pool.calls


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[HostPort]:
    """A server whose connections do what ``handler`` says."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield HostPort(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_streams_and_whole_answers_on_one_connection() -> None:
    async with engine_and_pool() as (engine, pool):
        for _ in range(3):
            notes = Notes()
            ask(pool, HostPort(engine.address), post(engine), notes, events=EventStream(framed=True))
            assert await notes.wait() == "end"
            assert notes.events.count(b"data: ") == 4
            notes = Notes()
            call = ask(pool, HostPort(engine.address), post(engine, b"{}"), notes)
            assert await notes.wait() == "whole"
            assert b"t0 t1 t2" in notes.body
            assert call.head is not None
            assert call.head.status == 200
        assert engine.connections == 1


async def test_a_stream_that_is_not_wanted_as_such_is_collected() -> None:
    async with engine_and_pool() as (engine, pool):
        notes = Notes()
        ask(pool, HostPort(engine.address), post(engine), notes)
        assert await notes.wait() == "whole"
        assert notes.body.endswith(b"data: [DONE]\n\n")


async def test_unframed_for_old_clients() -> None:
    async with engine_and_pool() as (engine, pool):
        notes = Notes()
        ask(pool, HostPort(engine.address), post(engine), notes, events=EventStream(framed=False))
        assert await notes.wait() == "end"
        assert notes.events.startswith(b"data: {")


@pytest.mark.parametrize(("play", "outcome"), [
    (Play(die_at="request"), "lost"), (Play(die_at="head"), "lost"), (Play(die_after=1), "lost"),
    (Play(cut_after=1), "lost"),
    (Play(error_after=1), "aborted"), (Play(abort_after=1), "aborted"), (Play(garbage=b"SMTP ready\r\n\r\n"), "broken"),
    (Play(garbage=b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"), "broken"),
    (Play(garbage=b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort"), "lost"),
    (Play(garbage=b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ntoo long"), "broken"),
    (Play(garbage=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "broken"),
    (Play(garbage=b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000), "broken"),
    (Play(garbage=b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"), "whole"),
    (Play(garbage=b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nA: b\r\n\r\n"
                  b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
     "whole"),
])
async def test_every_way_an_engine_can_end(play: Play, outcome: str) -> None:
    async with engine_and_pool() as (engine, pool):
        engine.plays.append(play)
        notes = Notes()
        ask(pool, HostPort(engine.address), post(engine), notes, events=EventStream(framed=True))
        assert await notes.wait() == outcome
        assert len(engine.seen) == 1, "a fresh connection that breaks is not tried again"


async def test_nobody_listens() -> None:
    async with engine_and_pool() as (engine, pool):
        address = HostPort(engine.address)
        await engine.stop()
        notes = Notes()
        ask(pool, address, b"", notes)
        assert notes.outcome == "", "a sink never hears before the call is returned"
        assert await notes.wait() == "refused"
        assert notes.reason.startswith("cannot connect: ")
        for bad in ("no-port", "host:99999"):
            notes = Notes()
            ask(pool, HostPort(bad), b"", notes)
            assert await notes.wait() == "refused"


async def test_connecting_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "CONNECT_S", 0.05)
    loop = asyncio.get_running_loop()

    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    pool = EnginePool(loop)
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(AttributeError):
            patch.setattr(loop, "create_connection", never)
        notes = Notes()
        ask(pool, HostPort("192.0.2.1:9"), b"", notes)
        assert await notes.wait() == "refused"
    pool.close()


async def test_a_pooled_connection_that_died_is_replaced_by_a_fresh_one() -> None:
    served = 0

    async def once_then_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % served)
        served += 1
        await reader.readuntil(b"\r\n\r\n")  # the second request is read, and the connection closed without a byte

    async with raw_server(once_then_gone) as address:
        pool = EnginePool(asyncio.get_running_loop())
        request = request_bytes(b"GET", b"/", address, [], b"")
        for expected in (b"0", b"1", b"2"):
            notes = Notes()
            ask(pool, address, request, notes)
            assert (await notes.wait(), notes.body) == ("whole", expected)
        pool.close()


async def test_a_connection_that_dies_after_its_first_byte_is_a_failure() -> None:
    async def half_the_second_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n0")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 2")
        await writer.drain()

    async with raw_server(half_the_second_time) as address:
        pool = EnginePool(asyncio.get_running_loop())
        request = request_bytes(b"GET", b"/", address, [], b"")
        outcomes = []
        for _ in range(2):
            notes = Notes()
            ask(pool, address, request, notes)
            outcomes.append(await notes.wait())
        assert outcomes == ["whole", "lost"]
        pool.close()


async def test_cancel_closes_the_connection_and_the_sink_hears_nothing() -> None:
    async with engine_and_pool() as (engine, pool):
        for wait in (False, True):
            engine.plays.append(Play(hold=asyncio.Event()))
            notes = Notes()
            call = ask(pool, HostPort(engine.address), post(engine), notes, events=EventStream(framed=True))
            if wait:
                await until(lambda: bool(engine.open))
            call.cancel()
            call.cancel()
            await asyncio.sleep(0.05)
            assert notes.outcome == ""
        await until(lambda: not engine.open)


async def test_idle_connections_are_closed_in_time_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "IDLE_MAX", 2)
    async with engine_and_pool() as (engine, pool):
        held = asyncio.Event()
        engine.default = Play(hold=held)
        notes = [Notes() for _ in range(4)]
        for note in notes:
            ask(pool, HostPort(engine.address), post(engine), note, events=EventStream(framed=True))
        held.set()
        assert [await note.wait() for note in notes] == ["end"] * 4
        await until(lambda: len(pool.connections) <= 2)
        pool.sweep()
        await asyncio.sleep(0.05)
        assert len(pool.connections) == 2
        monkeypatch.setattr(up, "IDLE_S", -1.0)
        pool.sweep()
        await until(lambda: not pool.connections)


async def test_pausing_stops_reading_and_a_paused_connection_is_resumed_for_the_next() -> None:
    async with engine_and_pool() as (engine, pool):
        engine.plays.append(Play(chunks=3, delay=0.01))
        notes = Notes()
        call = ask(pool, HostPort(engine.address), post(engine), notes, events=EventStream(framed=True))
        call.read(False)
        await asyncio.sleep(0.1)
        assert notes.events == b""
        call.read(True)
        assert await notes.wait() == "end"
        again = Notes()
        ask(pool, HostPort(engine.address), post(engine), again, events=EventStream(framed=True))
        assert await again.wait() == "end"


async def test_bytes_on_an_idle_connection_close_it() -> None:
    async def chatty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(1)

    async with raw_server(chatty) as address:
        pool = EnginePool(asyncio.get_running_loop())
        notes = Notes()
        ask(pool, address, request_bytes(b"GET", b"/", address, [], b""), notes)
        assert await notes.wait() == "whole"
        await until(lambda: not pool.connections)
        pool.close()


def test_a_request_is_framed() -> None:
    assert request_bytes(b"POST", b"/p", HostPort("h:1"), [(b"a", b"b")], b"{}") == (
        b"POST /p HTTP/1.1\r\nhost: h:1\r\ncontent-type: application/json\r\ncontent-length: 2\r\na: b\r\n\r\n{}")
    assert request_bytes(b"GET", b"/", HostPort("h:1"), [], b"") == b"GET / HTTP/1.1\r\nhost: h:1\r\n\r\n"
