"""What a router knows afterwards of requests in dialects that pass through: metrics, totals, timeline, queue."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from router_fleet import RouterFleet, request_bytes
from socket_engines import HEAD, MESSAGE, D, Leg, P, Serve, dead, silent, site, well

from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.router.observing import timeline
from xpyd_sidecar.router.observing.record import Record

STREAM = {**MESSAGE, "stream": True}
INPUT = {"input": "why?" * 30, "stream": True}
USAGE = {"input_tokens": 42, "output_tokens": 7}


def chunk(*told: dict[str, Any]) -> bytes:
    data = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in told)
    return b"%x\r\n%b\r\n" % (len(data), data)


def streams(*parts: bytes, pause_s: float = 0.01) -> Serve:
    """A decode engine that streams these chunks, and its end unless the last is empty."""
    async def serve(leg: Leg) -> None:
        if leg.engine.role is P:
            await leg.answer()
        else:
            await leg.say(HEAD)
            for part in parts:
                await asyncio.sleep(pause_s)
                await leg.say(part)
            if parts[-1]:
                await leg.say(b"0\r\n\r\n")
            else:
                return
        await leg.stay()

    return serve


message = streams(chunk({"type": "message_start"}), chunk({"type": "content_block_delta"}),
                  chunk({"type": "message_delta", "usage": USAGE}))
CREATED = chunk({"type": "response.created", "response": {}}, {"type": "response.in_progress", "response": {}})
ADDED = chunk({"type": "response.output_item.added"})
COMPLETED = chunk({"type": "response.completed", "response": {"usage": USAGE}})


def value(f: RouterFleet, name: str, **labels: str) -> float:
    f.context.observer.settle()
    return f.context.observer.metrics.registry.get_sample_value(name, labels) or 0.0


async def last(f: RouterFleet) -> Record:
    await f.wait(lambda: bool(f.context.observer.recent), "a record")
    return f.context.observer.recent[-1]


async def test_a_stream_counts_as_generation_does() -> None:
    async with site((P, well), (D, message)) as (f, _):
        assert (await f.post("/v1/messages", STREAM)).status == 200
        record = await last(f)
        assert value(f, "xpyd_router_requests_total", api="messages", outcome="ok") == 1
        assert value(f, "xpyd_router_passed_requests_total", path="/v1/messages", outcome="complete") == 1
        for name in ("ttft", "tpot", "request"):
            assert value(f, f"xpyd_router_{name}_seconds_count", api="messages") == 1, name
        assert value(f, "xpyd_router_tokens_total") == 7
        assert value(f, "xpyd_router_relayed_bytes_total") > 0
        for role in ("prefill", "decode"):
            assert value(f, "xpyd_router_legs_total", role=role, result="2xx") == 1
        assert value(f, "xpyd_router_pair_handovers_total", prefill="e0", decode="e1") == 1
        told = f.context.observer.counting.totals()
        assert (told.arrivals, told.measured, told.prompt_tokens, told.output_tokens) == (1, 1, 42, 7)
        assert told.arrived_tokens == told.measured_size == record.prompt_size > 0
        assert told.handovers == 1
        events = [event.name for event in timeline.of_request(record, []).events]
        assert events.count("prefill leg") == events.count("decode leg") == 1
        assert (record.attempt, record.retries, record.skips, f.context.observer.metrics.in_flight) == (1, 0, "", 0)


async def test_a_whole_answer_has_lengths_and_no_ttft() -> None:
    go = asyncio.Event()

    async def whole(leg: Leg) -> None:
        await go.wait()
        await leg.answer(body=json.dumps({"content": [], "usage": USAGE}).encode())
        await leg.stay()

    async with site((P, well), (D, whole)) as (f, [prefill, _]):
        asking = asyncio.create_task(f.post("/v1/messages", MESSAGE))
        await f.wait(lambda: bool(prefill.legs) and [m.in_flight for m in f.context.roster.members()] == [0, 1],
                     "prefill's answer")
        go.set()
        assert (await asking).json["usage"] == USAGE
        record = await last(f)
        assert (record.prompt_tokens, record.tokens, record.stream) == (42, 7, False)
        assert value(f, "xpyd_router_ttft_seconds_count", api="messages") == 0
        assert value(f, "xpyd_router_handover_seconds_count") == 1


async def test_the_first_token_of_a_response_is_not_the_word_that_it_was_created() -> None:
    async with site((P, well), (D, streams(CREATED, ADDED, COMPLETED, pause_s=0.2))) as (f, _):
        answer = await f.post("/v1/responses", INPUT)
        assert [event["type"] for event in answer.events] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.completed"]
        record = await last(f)
        assert record.first_at - record.arrived >= 0.4
        assert record.tokens == 7


async def test_until_its_first_output_a_response_is_not_lost_with_its_engine() -> None:
    async with site((P, well), (D, streams(CREATED, b"")), (D, streams(CREATED, ADDED, COMPLETED))) as (f, [_, bad, _good]):
        for _ in range(3):
            answer = await f.post("/v1/responses", INPUT)
            assert (answer.complete, len(answer.events)) == (True, 4)
        assert bad.legs, "it was tried"
        assert value(f, "xpyd_router_retries_total") == 2 * len(bad.legs)
        assert value(f, "xpyd_router_requests_total", api="responses", outcome="ok") == 3


async def test_where_no_prefill_is_left_a_response_that_was_only_created_is_asked_for_again() -> None:
    async def waits(leg: Leg) -> None:
        await leg.say(HEAD + CREATED)
        if not leg.params:
            await leg.say(ADDED + COMPLETED + b"0\r\n\r\n")
        await leg.stay()

    go = asyncio.Event()

    async def late(leg: Leg) -> None:
        await go.wait()

    async with site((P, late), (D, waits)) as (f, [prefill, decode]):
        asking = asyncio.create_task(f.post("/v1/responses", INPUT))
        await f.wait(lambda: bool(prefill.legs) and any(call.head for call in f.context.pool.calls), "decode's first word")
        go.set()
        answer = await asking
        assert (answer.complete, len(answer.events), len(decode.legs)) == (True, 4, 2)
        record = await last(f)
        assert [leg.result for leg in record.legs] == ["lost", "cancelled", "2xx"]
        assert (record.attempt, record.retries) == (1, 1)
        assert not record.handovers()


@pytest.mark.parametrize(("serve", "outcome", "passed"), [
    (streams(chunk({"type": "message_start"}), chunk({"type": "error"})), "failed", "engine_error"),
    (streams(chunk({"type": "message_start"}), b""), "broken", "broken"), (dead, "failed", "failed"),
])
async def test_failures_count_as_such(serve: Serve, outcome: str, passed: str) -> None:
    async with site((P, well), (D, serve)) as (f, _):
        await f.post("/v1/messages", STREAM)
        record = await last(f)
        assert record.outcome == outcome
        assert record.detail
        assert value(f, "xpyd_router_requests_total", api="messages", outcome=outcome) == 1
        assert value(f, "xpyd_router_passed_requests_total", path="/v1/messages", outcome=passed) == 1
        assert f.context.observer.metrics.requests_failed == 1


@pytest.mark.parametrize(("status", "outcome"), [(422, "client_error"), (500, "failed")])
async def test_what_the_engine_refuses(status: int, outcome: str) -> None:
    async def refuse(leg: Leg) -> None:
        await leg.answer(status)
        await leg.stay()

    async with site((D, refuse)) as (f, _):
        assert (await f.post("/v1/messages", MESSAGE)).status == status
        assert (await last(f)).outcome == outcome


async def test_a_client_that_goes_and_one_that_asks_for_another_model() -> None:
    async with site((P, silent), (D, silent)) as (f, [_, decode]):
        _, writer = await f.connect()
        writer.write(request_bytes("/v1/messages", MESSAGE))
        await f.wait(lambda: bool(decode.legs), "its leg")
        assert f.context.observer.metrics.in_flight == 1
        writer.transport.abort()
        assert (await last(f)).outcome == "client_gone"
        assert f.context.observer.metrics.in_flight == 0
        assert (await f.post("/v1/messages", {**MESSAGE, "model": "other"})).status == 404
        assert value(f, "xpyd_router_requests_total", api="messages", outcome="refused") == 1
        assert value(f, "xpyd_router_passed_requests_total", path="/v1/messages", outcome="refused") == 1


async def test_nobody_to_serve_it() -> None:
    async with site((P, well)) as (f, _):
        assert (await f.post("/v1/messages", MESSAGE)).status == 503
        assert (await last(f)).outcome == "unavailable"
        assert f.context.observer.metrics.in_flight == 0


@pytest.mark.parametrize(("body", "by"), [
    ({"input": "why?" * 30, "tools": [{"type": "web_search_preview"}]}, "tools"),
    ({"input": "why?" * 30, "truncation": "auto"}, "truncation"), ({"input": "why?"}, "short"),
])
async def test_why_one_skips_prefill(body: dict[str, Any], by: str) -> None:
    async with site((P, well), (D, message), skip_prefill_below=16) as (f, [prefill, _]):
        assert (await f.post("/v1/responses", body)).status == 200
        assert ((await last(f)).skips, prefill.legs) == (by, [])
        assert value(f, "xpyd_router_skipped_prefill_total", by=by) == 1


async def test_other_paths_are_no_generation() -> None:
    async with site((P, well), (D, message)) as (f, _):
        assert (await f.post("/v1/embeddings", {"input": "hi"})).status == 200
        assert value(f, "xpyd_router_passed_requests_total", path="/v1/embeddings", outcome="complete") == 1
        assert (f.context.observer.metrics.requests_total, f.context.observer.counting.totals().arrivals) == (0, 0)


async def test_they_wait_in_the_queue_with_the_others() -> None:
    go = asyncio.Event()

    async def slow(leg: Leg) -> None:
        if leg.engine.role is D:
            await go.wait()
        await well(leg)

    async with site((P, slow), (D, slow), max_per_instance=1, queue_size=1) as (f, [_, decode]):
        first = asyncio.create_task(f.post("/v1/messages", MESSAGE))
        await f.wait(lambda: bool(decode.legs), "the first")
        _, writer = await f.connect()
        writer.write(request_bytes("/v1/messages", MESSAGE))
        await f.wait(lambda: len(f.context.line) == 1, "the second waits")
        full = await f.post("/v1/messages", MESSAGE)
        assert full.status in {429, 503}
        assert "retry-after" in full.headers
        writer.transport.abort()
        await f.wait(lambda: not len(f.context.line), "it left")
        assert value(f, "xpyd_router_requests_total", api="messages", outcome="client_gone") == 1
        third = asyncio.create_task(f.post("/v1/messages", MESSAGE))
        await f.wait(lambda: len(f.context.line) == 1, "the third waits")
        assert len(decode.legs) == 1
        go.set()
        assert {(await first).status, (await third).status} == {200}
        record = await last(f)
        assert record.queued_s > 0
        assert record.last_at - record.arrived >= record.queued_s


async def test_the_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with site((P, well), (D, message)) as (f, _):
        with caplog.at_level(logging.INFO, "xpyd_sidecar.access"):
            await f.post("/v1/messages", STREAM)
            await last(f)
            await f.post("/v1/embeddings", {"input": "hi"})
            f.context.observer.tell()
        [one, other] = [record.__dict__ for record in caplog.records if record.name == "xpyd_sidecar.access"]
        assert (one["message"], one["api"], one["path"], one["prefill"], one["decode"]) == (
            "ok", "messages", "/v1/messages", InstanceName("e0"), InstanceName("e1"))
        assert one["first_byte_s"] > 0
        assert (other["message"], other["path"], other["decode"]) == ("complete", "/v1/embeddings", "e1")
