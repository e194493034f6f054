"""Passed requests: a router before engines that are plain sockets, so that every byte is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from beats import beat
from router_fleet import RouterFleet, fleet, read_answer, request_bytes

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.http import body_budget
from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.serving import waiting

LOOPS = ("asyncio", "uvloop")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """Accepts, reads heads, and does what ``serve`` says."""

    def __init__(self, name: str, serve: Serve) -> None:
        self.name, self.serve = name, serve
        self.heads: list[str] = []
        """Of requests; probes of the router's own are not among them."""
        self.tasks: set[asyncio.Task[None]] = set()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if not head.startswith("GET /health "):
                self.heads.append(head)
            await self.serve(reader, writer)
            writer.close()  # what is written leaves first
            await writer.wait_closed()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self.tasks.discard(task)


@contextlib.asynccontextmanager
async def site(*serves: Serve, buffer: int = 0, **settings: Any) -> AsyncIterator[tuple[RouterFleet, list[Engine]]]:
    """``buffer``: bytes that the kernel keeps for an engine before it has read them; 0: as many as the kernel likes."""
    async with fleet(0, 0, **settings) as f, contextlib.AsyncExitStack() as stack:
        engines = []
        for number, serve in enumerate(serves):
            engine = Engine(f"d{number}", serve)
            listening = socket.create_server(("127.0.0.1", 0))
            if buffer:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            server = await asyncio.start_server(engine._one, sock=listening, limit=1 << 16)
            stack.callback(server.close)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            f.context.watch.on_message(beat(engine.name, Role.DECODE, address, interval_s=60.0))
            engines.append(engine)
        try:
            yield f, engines
            assert all(not m.in_flight for m in f.context.roster.members()), "a leg was left open"
        finally:
            for task in [task for engine in engines for task in engine.tasks]:
                task.cancel()


def header(head: str, name: str) -> str | None:
    return next((line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith(f"{name}:")), None)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with the first bytes of the body."""
    body = await reader.readexactly(3)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: x/y\r\ncontent-length: %d\r\nx-own: 1\r\n\r\n%b" % (len(body), body))
    await writer.drain()


async def dead(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    """Close at once."""


def form(pieces: list[bytes], **headers: str) -> bytes:
    """A chunked upload."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n{lines}\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def blocked(connection: ClientConnection) -> bool:
    """Whether a client's upload is held back."""
    upload = connection._incoming.upload
    return upload is not None and upload.blocked


async def at_end(reader: asyncio.StreamReader) -> bool:
    """The router closed."""
    async with asyncio.timeout(30):
        return await reader.read() == b""


async def test_a_json_request_and_its_answer_pass_as_they_are() -> None:
    async with site(echo) as (f, [engine]):
        answer = await f.post("/v1/embeddings?a=b", b"{ }", headers={
            "X-Request-Id": "mine", "Content-Type": "application/json", "Authorization": "Bearer secret", "Cookie": "c",
            "traceparent": "00-1-2-01", "Accept": "x/y"})
        assert (answer.status, answer.body, answer.headers["x-own"]) == (200, b"{ }", "1")
        assert answer.headers["x-request-id"] == "mine"
        [head] = engine.heads
        assert head.startswith("POST /v1/embeddings?a=b HTTP/1.1\r\n")
        names = ("x-request-id", "content-type", "traceparent", "accept", "content-length")
        assert [header(head, name) for name in names] == ["mine", "application/json", "00-1-2-01", "x/y", "3"]
        assert header(head, "authorization") is header(head, "cookie") is None


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/responses", {"kv_transfer_params": {}}, "kv_transfer_params"),
    ("/v1/messages", {"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
    ("/v1/messages", {"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
    ("/v1/responses", {"previous_response_id": "r"}, "previous_response_id"),
    ("/v1/responses", {"background": True}, "background"),
    ("/invocations", {"model": 5}, "model"), ("/tokenize", [], None),
])
async def test_fields_that_a_client_must_not_send_are_refused(path: str, body: Any, param: str | None) -> None:
    async with site(echo) as (f, [engine]):
        answer = await f.post(path, body)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert not engine.heads


async def test_null_and_false_are_no_wish_and_another_model_is_404() -> None:
    async with site(echo) as (f, _):
        nothing = {"previous_response_id": None, "background": False, "kv_transfer_params": None, "model": "tiny"}
        assert (await f.post("/v1/responses", nothing)).status == 200
        answer = await f.post("/v1/embeddings", {"model": "an-adapter"})
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
    async with fleet(0, 0) as f:
        answer = await f.post("/v1/embeddings", {})
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_an_engine_that_refuses_or_breaks_before_it_answers_is_replaced() -> None:
    async with site(dead, dead, echo) as (f, engines):
        f.context.watch.on_message(beat("d3", Role.DECODE, "127.0.0.1:1", interval_s=60.0))
        for number in range(6):
            answer = await f.post("/tokenize", {"prompt": str(number)})
            assert answer.status in {200, 502}  # three instances at most see one request
        assert len(engines[2].heads) >= 2
    async with site(dead) as (f, [engine]):
        assert (await f.post("/tokenize", b"{ }")).status == 502
        assert len(engine.heads) == 1


async def test_an_answer_of_chunks_is_relayed_while_it_comes_and_cut_where_it_breaks() -> None:
    go = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await go.wait()
        writer.write(b"5\r\nhe")
        await writer.drain()

    async with site(stream) as (f, _):
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/messages", b"{}"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert await reader.readuntil(b"hello\r\n") == b"5\r\nhello\r\n"
        go.set()
        assert await at_end(reader), "no last chunk: the client knows that something is missing"
        writer.transport.abort()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_an_answer_until_the_end_of_the_connection(version: str) -> None:
    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nabc")
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"def")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with site(old) as (f, _):
        answer = await f.get("/version", version=version)
        assert (answer.body, answer.complete) == (b"abcdef", True)


async def test_head_has_no_body_and_interim_answers_are_dropped() -> None:
    async def with_length(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n1234567")
        await writer.drain()
        await reader.read()

    async with site(with_length) as (f, [engine]):
        reader, writer = await f.connect()
        writer.write(request_bytes("/version", method="HEAD") + request_bytes("/health", method="GET"))
        assert b"content-length: 7" in await reader.readuntil(b"\r\n\r\n")
        assert (await read_answer(reader)).body == b"ok\n"
        assert engine.heads[0].startswith("GET /version ")
        writer.transport.abort()


async def test_an_upload_is_handed_on_while_it_comes() -> None:
    got = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(8) == b"3\r\nabc\r\n"
        got.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(rest), rest))
        await writer.drain()

    async with site(slow) as (f, [engine]):
        reader, writer = await f.connect()
        raw = form([b"abc", b"defg"], **{"Content-Type": "multipart/form-data; boundary=x"})
        at = raw.index(b"4\r\ndefg")
        writer.write(raw[:at])
        async with asyncio.timeout(30):
            await got.wait()
        writer.write(raw[at:] + request_bytes("/health", method="GET"))
        assert (await read_answer(reader)).body == b"4\r\ndefg\r\n0\r\n\r\n"
        assert (await read_answer(reader)).body == b"ok\n", "the connection goes on"
        assert header(engine.heads[0], "content-type") == "multipart/form-data; boundary=x"
        writer.transport.abort()


async def test_a_slow_engine_holds_the_client_back_and_a_slow_client_the_engine() -> None:
    size, piece = 16 << 20, 1 << 16
    read = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read.wait()
        body = await reader.readexactly(size)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for at in range(0, size, piece):
            writer.write(body[at:at + piece])
            await writer.drain()

    async def send(writer: asyncio.StreamWriter, body: bytes) -> None:
        for at in range(0, size, piece):
            writer.write(body[at:at + piece])
            await writer.drain()

    async with site(stuck, buffer=piece) as (f, _):
        reader, writer = await f.connect_narrow(piece)
        body = random.Random(1).randbytes(size)
        writer.write(f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n".encode())
        sending = asyncio.create_task(send(writer, body))
        await f.wait(lambda: bool(f.router.server.connections), "the connection")
        [connection] = f.router.server.connections
        await f.wait(lambda: blocked(connection), "an upload that is held back")
        await f.wait(lambda: bool(f.context.pool.connections), "a way to the engine")
        [engine] = f.context.pool.connections
        assert engine._transport is not None
        tunnel = engine._transport
        looks: list[bool] = []

        def stays() -> bool:
            looks.append(connection._paused)
            return len(looks) >= 20 and all(looks[-20:])

        await f.wait(stays, "an engine that reads nothing lets the client wait")
        assert tunnel.get_write_buffer_size() < 1 << 20
        read.set()
        await sending
        await f.wait(lambda: connection._blocked_at > 0, "an answer that nobody reads")
        await f.wait(lambda: not tunnel.is_reading(), "a client that reads nothing to let the engine wait")
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 1 << 20
        answer = await read_answer(reader)
        assert answer.body == body
        writer.transport.abort()


@pytest.mark.parametrize(("raw", "status"), [
    (form([b'--x\r\nname="vllm_xargs"\r\n\r\n{}']), 400), (form([b"vllm_", b"xargs"]), 400),
    (form([b"kv_transfer_params"]), 400), (form([b"abc"])[:-5] + b"zz\r\n", 400), (form([b"x" * 5000]), 413),
])
async def test_an_upload_that_is_wrong_is_refused(raw: bytes, status: int) -> None:
    async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with site(patient, max_body_bytes=4000) as (f, _):
        reader, writer = await f.connect()
        writer.write(raw)
        answer = await read_answer(reader)
        assert answer.status == status
        if answer.headers.get("connection") != "close":  # the whole body had come: the connection goes on
            writer.write(request_bytes("/health", method="GET"))
            assert (await read_answer(reader)).body == b"ok\n"
        else:
            assert await at_end(reader)
        writer.transport.abort()


async def test_an_upload_that_stops_is_told_408() -> None:
    async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with site(patient, receive_timeout_s=0.2) as (f, _):
        reader, writer = await f.connect()
        writer.write(form([b"abc", b"def"])[:-9])
        assert (await read_answer(reader)).status == 408
        writer.transport.abort()


async def test_an_engine_that_answers_before_it_has_read_everything_is_heard() -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 3\r\n\r\nbig")
        await writer.drain()
        await asyncio.sleep(0.2)

    async with site(hasty) as (f, _):
        reader, writer = await f.connect()
        writer.write(form([b"abc"])[:-5])
        answer = await read_answer(reader)
        assert (answer.status, answer.body, answer.headers["connection"]) == (413, b"big", "close")
        assert await at_end(reader)
        writer.transport.abort()


async def test_a_client_that_goes_aborts_the_engines_work() -> None:
    gone = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        assert await reader.read() == b""
        gone.set()

    async with site(waits) as (f, [engine]):
        _, writer = await f.connect()
        writer.write(request_bytes("/v1/messages", b"{}"))
        await f.wait(lambda: bool(engine.heads), "the request")
        writer.transport.abort()
        async with asyncio.timeout(30):
            await gone.wait()
        assert not f.context.servings


async def test_a_pipelined_upload_waits_for_its_turn_and_is_bounded() -> None:
    async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = 1 << 20
        await reader.readexactly(size)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    first = asyncio.Event()

    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first.is_set():
            await sink(reader, writer)
            return
        await first.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1")
        await writer.drain()

    async with site(both) as (f, _):
        reader, writer = await f.connect()
        head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Length: {1 << 20}\r\n\r\n".encode()
        writer.write(request_bytes("/version", method="GET") + head + b"y" * (1 << 20))
        await f.wait(lambda: any(map(blocked, f.router.server.connections)), "an upload that is held back")
        await asyncio.sleep(0.1)
        [connection] = f.router.server.connections
        assert connection._incoming.upload is not None
        assert body_budget.HELD < connection._incoming.upload._size < 3 * body_budget.HELD
        first.set()
        assert (await read_answer(reader)).body == b"1"
        assert (await read_answer(reader)).status == 200
        writer.transport.abort()


async def test_passed_requests_count_among_those_in_flight_and_end_with_the_router() -> None:
    async def forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with site(forever, max_in_flight=1, queue_size=0, drain_timeout_s=0.2) as (f, _):
        first = asyncio.create_task(f.post("/tokenize", b"{}"))
        await f.wait(lambda: len(f.context.servings) == 1, "the first")
        assert (await f.post("/tokenize", b"{}")).status == 503
        await f.router.stop()
        answer = await first
        assert (answer.status, json.loads(answer.body)["error"]["message"]) == (503, "the router stopped")
        assert not f.context.servings


async def keeps(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request after the other, each with its body of two bytes, until the router closes."""
    while True:
        body = await reader.readexactly(2)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + body)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")


async def test_passed_requests_share_the_pools_connections_and_a_form_has_a_fresh_one() -> None:
    upload = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    async with site(keeps) as (f, [engine]):
        for _ in range(30):
            assert (await f.post("/v1/embeddings", b"{}")).body == b"{}"
        assert len(engine.heads) == 1, "all came on one connection"
        reader, writer = await f.connect()
        for _ in range(2):
            writer.write(upload + b"Content-Length: 2\r\n\r\nab")
            assert (await read_answer(reader)).body == b"ab"
        assert len(engine.heads) == 3, "a body that is handed on cannot be sent again"
        assert (await f.post("/v1/embeddings", b"{}")).body == b"{}"
        assert len(engine.heads) == 3, "and its connection is a pooled one afterwards"
        writer.transport.abort()


@pytest.mark.parametrize("framing", [b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"content-length: 0\r\n\r\n"])
async def test_an_empty_answer_is_one(framing: bytes) -> None:
    async def empty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 200 OK\r\nx-own: 1\r\n" + framing)
        await writer.drain()

    async with site(empty) as (f, _):
        answer = await f.post("/pooling", b"{}")
        assert (answer.status, answer.body, answer.complete, answer.headers["x-own"]) == (200, b"", True, "1")


async def test_a_form_of_which_an_engine_took_a_part_is_not_sent_to_another() -> None:
    async def takes_and_dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)

    async with site(takes_and_dies, takes_and_dies) as (f, engines):
        reader, writer = await f.connect()
        writer.write(form([b"abc"], **{"Content-Type": "multipart/form-data; boundary=x"}))
        answer = await read_answer(reader)
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_failed")
        assert sum(len(engine.heads) for engine in engines) == 1
        writer.transport.abort()


async def test_a_form_that_no_engine_has_seen_goes_to_the_next_one() -> None:
    async with site(keeps) as (f, [engine]):
        for name in ("d1", "d2"):
            f.context.watch.on_message(beat(name, Role.DECODE, "127.0.0.1:1", interval_s=60.0))
        for _ in range(3):
            reader, writer = await f.connect()
            writer.write(b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n"
                         b"Content-Type: multipart/form-data; boundary=x\r\n\r\nab")
            assert (await read_answer(reader)).body == b"ab"
            writer.transport.abort()
        assert len(engine.heads) == 3


async def test_an_engine_that_takes_no_more_of_a_form_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stands(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(waiting, "STALL_S", 0.5)
    async with site(stands, buffer=4096) as (f, [engine]):
        doubted: list[str] = []
        monkeypatch.setattr(f.context.watch, "request_probe", lambda target: doubted.append(target.instance))
        reader, writer = await f.connect()
        writer.write(form([b"abc"], **{"Content-Type": "multipart/form-data; boundary=x"})[:-5])
        await f.wait(lambda: bool(engine.heads), "the engine to have the head")
        await asyncio.sleep(2.5)
        assert not doubted, "its client is slow"
        piece = bytes(1 << 20)
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) * 16)
        await f.wait(lambda: bool(doubted), "the engine to be doubted")
        for task in list(engine.tasks):
            task.cancel()
        assert (await read_answer(reader)).status == 502
        writer.transport.abort()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_answer_that_breaks_off_never_looks_whole(version: str) -> None:
    async def breaks(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"5\r\n[1,2,\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.transport.abort()

    async with site(breaks) as (f, _):
        reader, writer = await f.connect()
        writer.write(request_bytes("/tokenize", {"prompt": "a"}, version=version))
        if version == "1.0":
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.transport.abort()


async def test_a_connection_on_which_half_a_form_was_sent_is_no_pooled_one() -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 3\r\n\r\nbig")
        await writer.drain()
        await reader.read(-1)

    async with site(hasty) as (f, [engine]):
        reader, writer = await f.connect()
        writer.write(form([b"abc"])[:-5])
        assert (await read_answer(reader)).status == 413
        await f.wait(lambda: not f.context.pool.connections, "its connection to end")
        writer.transport.abort()
        assert (await f.post("/v1/embeddings", b"{}")).status == 413
        assert len(engine.heads) == 2
