"""Addresses of engines stay with the operator: whatever an engine does, no answer to a client names a host or a port."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from raw_engines import STREAM, Engine, Request, standing
from router_fleet import Answer, RouterFleet, request_bytes
from socket_engines import joined

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api.faults import FailureReason
from xpyd_sidecar.router.fleet.member import InstanceLost

LOOPS = ("uvloop",)
P, D = Role.PREFILL, Role.DECODE
PORT = "127.0.0.1"
EVENT = json.dumps({"id": "r", "object": "text_completion", "created": 1, "model": "tiny", "choices": [
    {"index": 0, "text": "t0 ", "logprobs": None, "finish_reason": None, "stop_reason": None}]}).encode()
SAID = b'{"error":{"message":"no route to 127.0.0.1:4321","type":"x","code":500}}'


def chunk(data: bytes) -> bytes:
    data = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(data), data)


def saying(*parts: bytes) -> Callable[[Request], Awaitable[None]]:
    """An engine that says this and hangs up."""
    async def serve(request: Request) -> None:
        for part in parts:
            await request.say(part)
        request.hang_up()
    return serve


FAILURES = {
    "closes": saying(), "no http": saying(b"smtp 127.0.0.1:4321\r\n\r\n"),
    "wrong header": saying(b"HTTP/1.1 200 OK\r\nx: 127.0.0.1:4321\0\r\n\r\n"),
    "closes in a stream": saying(STREAM, chunk(EVENT)), "error event": saying(STREAM, chunk(EVENT), chunk(SAID)),
    "error event at once": saying(STREAM, chunk(SAID)), "wrong chunk": saying(STREAM, chunk(EVENT), b"127.0.0.1:4321\r\n"),
    "short": saying(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}"),
}
HEADS = ("closes", "no http", "wrong header")
"""Those that come before an answer: what passes through is the engine's own words."""
ASKED = {
    "whole": ("/v1/completions", {"prompt": "hi", "temperature": 0}),
    "stream": ("/v1/completions", {"prompt": "hi", "temperature": 0, "stream": True}),
    "passed": ("/tokenize", {"prompt": "hi"}), "dialect": ("/v1/messages", {"messages": [], "max_tokens": 1}),
}


def told(answer: Answer) -> str:
    """All that a client sees."""
    return f"{answer.headers} {answer.body.decode()}"


async def ready(f: RouterFleet) -> str:
    return told(await f.get("/ready"))


@pytest.mark.parametrize(("ask", "failure"), [(ask, failure) for ask in ASKED for failure in FAILURES
                                              if ask in {"whole", "stream"} or failure in HEADS])
@pytest.mark.parametrize("roles", [(D,), (P, D, D)], ids=["alone", "pairs"])
async def test_a_failure_names_the_instance_and_not_its_address(roles: tuple[Role, ...], ask: str, failure: str,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (path, body), serve = ASKED[ask], FAILURES[failure]
    settings = {"on_no_prefill": "reject"} if P in roles else {}
    async with standing(*[(role, serve) for role in roles], failover="error", **settings) as (f, _):
        answer = await f.post(path, body)
        assert PORT not in told(answer)
        assert answer.status == 200 or answer.json["error"]["code"] in {"engine_failed", "unavailable"}
        assert PORT not in await ready(f)
    lines = [record for record in caplog.records if "failed: " in record.getMessage()]
    assert lines, "the log tells of it"
    assert all(PORT in str(record.__dict__.get("address", "")) for record in lines if hasattr(record, "kind"))


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED.keys())
async def test_nor_where_nobody_listens(path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with standing() as (f, _):
        engines = [Engine(name, role, saying()) for name, role in (("p0", P), ("d0", D), ("d1", D))]
        for number, engine in enumerate(engines):
            (await joined(f, engine.name, engine.role, number, engine.accept)).close()
        answers = [await f.post(path, body) for _ in range(4)]
        assert {answer.status for answer in answers} <= {502, 503}
        assert not [answer for answer in answers if PORT in told(answer)]
        await f.wait(lambda: not f.context.roster.pickable(D), "both are suspended")
        f.context.roster._started -= 99.0  # every agent had its time
        told_of = await ready(f)
        assert "d0 suspended" in told_of
        assert PORT not in told_of
        last = await f.post(path, body)
        assert (last.status, PORT in told(last)) == (503, False)
        shown = [each.suspended for each in f.context.roster.fleet(0.0) if each.suspended]
        assert any("cannot connect" in why or "GET /health" in why for why in shown), "operators see why"
    assert any(PORT in record.getMessage() for record in caplog.records), "and so does the log"


async def test_nor_where_an_engine_is_lost_in_mid_stream() -> None:
    held = asyncio.Event()

    async def serve(request: Request) -> None:
        await request.say(STREAM + chunk(EVENT))
        await held.wait()

    async with standing((D, serve), failover="error") as (f, [engine]):
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"prompt": "hi", "stream": True}))
        await f.wait(lambda: bool(engine.asked), "the leg")
        await reader.readuntil(b"t0 ")
        why = FailureReason("d0 failed its health check", "GET /health: connect to 127.0.0.1:4321")
        member = f.context.roster.members()[0]
        f.context.servings.on_lost(InstanceLost(member.name, member.incarnation, why))
        rest = await asyncio.wait_for(reader.read(), 30)
        assert b"d0 failed its health check" in rest
        assert PORT.encode() not in rest
        writer.transport.abort()
