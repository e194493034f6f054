"""Comments of an engine (vLLM's --sse-keep-alive-interval): a client may hear them, and they begin nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from beats import beat
from router_fleet import RouterFleet, fleet, request_bytes
from scripted_engine import Play

from xpyd_sidecar.contract.ids import Role

LOOPS = ("uvloop", "asyncio")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
COMMENT = b": keep-alive\n\n"
EVENT = (b'data: {"id":"c","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"t",'
         b'"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[7],"prompt_token_ids":[1,2]}]}\n\n')
DONE = b"data: [DONE]\n\n"
Engine = Callable[[bytes, asyncio.StreamWriter], Awaitable[bool]]
"""Answers one body; whether the connection stays."""


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


@contextlib.asynccontextmanager
async def site(engine: Engine, prefills: int = 1, decodes: int = 1, *, like_it: int = 1) -> AsyncIterator[RouterFleet]:
    """A router whose first ``like_it`` decode instances answer as ``engine`` says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                sizes = [int(line.split(b":")[1]) for line in lines]
                body = await reader.readexactly(sum(sizes))
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                elif not await engine(body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async with fleet(prefills, decodes) as f, contextlib.AsyncExitStack() as stack:
        for number in range(like_it):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            stack.callback(server.close)
            await f.d[number].stop()
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            f.context.watch.on_message(beat(f"d{number}", Role.DECODE, address, interval_s=60.0))
        yield f
        await f.wait(lambda: not f.context.servings, "the end of all requests")


@pytest.mark.parametrize("comments", [False, True])
@pytest.mark.parametrize("warm", [False, True])
async def test_prefill_dies_while_decode_comments_and_decode_is_asked_alone(warm: bool, comments: bool) -> None:
    waits = False
    asked = asyncio.Event()

    async def engine(body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD)
        while waits and b"kv_transfer_params" in body:  # its KV never comes
            await asyncio.sleep(0.02)
            writer.write(chunk(COMMENT) if comments else b"")
            await writer.drain()
            asked.set()
        writer.write(chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n")
        return True

    async with site(engine) as f:
        if warm:  # the next one finds open connections, and takes the lane
            for _ in range(3):
                assert (await f.complete(stream=True, temperature=0)).body.endswith(DONE)
        waits = True
        f.p[0].default = Play(hold=asyncio.Event())
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True, "temperature": 0}))
        await f.wait(lambda: f.p[0].open == 1, "prefill's leg")
        async with asyncio.timeout(30):
            await asked.wait()
            begun = await reader.readuntil(COMMENT) if comments else b""
            await f.p[0].stop()
            body = begun + await reader.readuntil(chunk(DONE) + b"0\r\n\r\n")
        writer.close()
        assert b'"error"' not in body
        assert (COMMENT in body) is comments
        await f.wait(lambda: not f.context.servings, "the end")
        record = max(f.context.observer.recent, key=lambda one: one.arrived)
        assert (record.outcome, record.tokens, record.retries) == ("ok", 1, 1)
        waits = False


@pytest.mark.parametrize("stays", [False, True])
async def test_decode_dies_after_a_comment_and_another_answers_a_sampled_request(stays: bool) -> None:
    asked = 0

    async def engine(body: bytes, writer: asyncio.StreamWriter) -> bool:
        nonlocal asked
        asked += b'"canary"' not in body  # those are the router's own
        writer.write(HEAD + chunk(COMMENT))
        await asyncio.sleep(0.05)
        if stays:
            writer.write(chunk(b'data: {"error":{"message":"gone","type":"x","param":null,"code":500}}\n\n') + chunk(DONE))
        return False

    async with site(engine, 1, 2) as f:
        for _ in range(4):
            before = asked
            answer = await f.complete(stream=True, temperature=1)
            assert b'"error"' not in answer.body
            assert answer.body.endswith(DONE)
            assert answer.body.startswith(COMMENT) == (asked > before)
        assert asked


async def test_a_comment_reaches_the_client_before_any_token_and_is_no_first_token() -> None:
    go = asyncio.Event()

    async def engine(_: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + chunk(COMMENT))
        await go.wait()
        writer.write(chunk(COMMENT) + chunk(EVENT) + chunk(COMMENT) + chunk(DONE) + b"0\r\n\r\n")
        return True

    async with site(engine) as f:
        for _ in range(2):
            go.clear()
            reader, writer = await f.connect()
            body = json.dumps({"model": "tiny", "prompt": "hi", "stream": True, "temperature": 0}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                assert await reader.readexactly(len(chunk(COMMENT))) == chunk(COMMENT)
                await asyncio.sleep(0.15)
                go.set()
                rest = await reader.readuntil(b"0\r\n\r\n")
            assert rest.count(COMMENT) == 2
            assert b'"token_ids":null' in rest
            writer.close()
            await f.wait(lambda: not f.context.servings, "the end")
            record = max(f.context.observer.recent, key=lambda one: one.arrived)
            assert record.outcome == "ok"
            assert record.first_at - record.arrived > 0.14
            decode = next(leg for leg in record.legs if leg.role is Role.DECODE)
            assert decode.first_at - record.arrived > 0.14


async def test_a_refusal_after_a_comment_is_an_error_event() -> None:
    async def engine(_: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + chunk(COMMENT))
        await asyncio.sleep(0.05)
        return False

    async with site(engine, 1, 2) as f:
        f.d[1].default = Play(status=400, body=b'{"error":\n{"message":"no","code":400}}')
        f.beat(f.d[1], interval_s=60.0)
        seen = set()
        for _ in range(8):
            answer = await f.complete(stream=True, temperature=1)
            if answer.status == 400:
                continue
            seen.add(answer.body)
            assert answer.body == COMMENT + b'data: {"error":\ndata: {"message":"no","code":400}}\n\n'
            assert answer.complete
        assert seen
        await f.d[1].stop()
        answer = await f.complete(stream=True, temperature=1)
        while COMMENT not in answer.body:
            answer = await f.complete(stream=True, temperature=1)
        error = json.loads(answer.body.replace(COMMENT, b"").removeprefix(b"data: "))["error"]
        assert (answer.status, error["type"], error["code"]) == (200, "upstream_error", "engine_failed")


async def test_a_stream_goes_on_behind_its_tokens_whatever_comments_it_had() -> None:
    broken = False

    async def engine(body: bytes, writer: asyncio.StreamWriter) -> bool:
        nonlocal broken
        event = EVENT.replace(b'"finish_reason":"length"', b'"finish_reason":null')
        if not broken:
            broken = True
            writer.write(HEAD + chunk(COMMENT) + chunk(event) + chunk(COMMENT))
            await asyncio.sleep(0.05)
            return False
        asked.append(json.loads(body)["prompt"])
        writer.write(HEAD + chunk(COMMENT) + chunk(EVENT.replace(b"[1,2]", b"[1,2,7]")) + chunk(DONE) + b"0\r\n\r\n")
        return True

    asked: list[Any] = []
    async with site(engine, 1, 2, like_it=2) as f:
        answer = await f.complete(stream=True, temperature=0)
        assert asked == [[1, 2, 7]]
        events = [event for event in answer.body.split(b"\n\n") if event.startswith(b"data: {")]
        assert [json.loads(event[6:])["choices"][0]["text"] for event in events] == ["t", "t"]
        assert answer.body.count(COMMENT) == 3
        assert answer.body.endswith(DONE)
