"""Legs that fail: another prefill while decode waits, another decode before the first event, an error event after it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router_fleet import fleet, read_answer, request_bytes
from scripted_engine import Play, Seen, attempts, wait_for_kv

from xpyd_sidecar.contract.ids import Incarnation

LOOPS = ("uvloop",)
FULL = "t0 t1 t2 "


@pytest.mark.parametrize("play", [Play(die_at="request"), Play(status=500), Play(status=429), Play(abort_after=0),
                                  Play(garbage=b"what?\r\n\r\n")])
@pytest.mark.parametrize("stream", [True, False])
async def test_prefill_dies_and_another_takes_over_with_attempt_2(play: Play, stream: bool) -> None:
    async with fleet(2, 1) as f:
        begun = wait_for_kv(f.d[0])
        for engine in f.p:
            engine.plays.append(replace(play, hold=begun))
        assert (await f.complete(stream=stream)).status == 200
        assert sorted(attempts(f.p[0]) + attempts(f.p[1]), key=str) == [1, 2]
        assert len(f.d[0].seen) == 2, "both prefills failed, so decode was asked again, alone"
        assert attempts(f.d[0]) == [1, None]
        await f.wait_quiet()


async def test_decode_keeps_waiting_while_prefill_is_retried() -> None:
    async with fleet(2, 1) as f:
        done = asyncio.Event()
        for engine in f.p:
            engine.plays.append(Play(hold=done))
        f.d[0].plays.append(Play(hold=done))
        task = asyncio.create_task(f.complete(stream=True))
        await f.wait(lambda: bool((f.p[0].seen or f.p[1].seen) and f.d[0].seen), "both legs")
        first, other = (f.p[0], f.p[1]) if f.p[0].seen else (f.p[1], f.p[0])
        await first.stop()
        await f.wait(lambda: attempts(other) == [2], "the second attempt")
        assert other.seen[0].body["kv_transfer_params"]["transfer"] == first.seen[0].body["kv_transfer_params"]["transfer"]
        assert (len(f.d[0].seen), f.d[0].aborts) == (1, 0)
        done.set()
        assert (await task).text == FULL
        await f.wait_quiet()


async def test_refused_prefill_is_replaced_and_not_asked_again() -> None:
    async with fleet(2, 1) as f:
        await f.p[0].stop()
        answers = await asyncio.gather(*(f.complete(stream=True) for _ in range(6)))
        assert [a.text for a in answers] == [FULL] * 6
        await f.wait_quiet()
        f.p[1].seen.clear()
        for _ in range(4):
            assert (await f.complete()).status == 200
        await f.wait_quiet()
        assert attempts(f.p[1]) == [1] * 4, "it is suspended, so nobody tries it first"


async def test_without_any_prefill_decode_serves_alone_or_refuses() -> None:
    async with fleet(1, 1) as f:
        await f.p[0].stop()
        assert (await f.complete(stream=True)).text == FULL
        assert attempts(f.d[0])[-1] is None
        await f.wait_quiet()
    async with fleet(1, 1, on_no_prefill="reject") as f:
        await f.p[0].stop()
        answer = await f.complete(stream=True)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "p0" in answer.json["error"]["message"]
        await f.wait_quiet()
    async with fleet(0, 1, on_no_prefill="reject") as f:
        assert (await f.complete()).json["error"]["message"] == "no prefill instance is known"
        assert (await f.complete(n=2)).status == 200, "what skips prefill needs none"


@pytest.mark.parametrize("play",
                         [Play(die_at="request"), Play(die_at="head"), Play(die_after=0), Play(error_after=0),
                          Play(cut_after=0),
                                  Play(abort_after=0), Play(status=500), Play(status=503),
                          Play(garbage=b"HTTP/1.1 xx\r\n\r\n")])
async def test_decode_dies_before_its_first_event_and_another_answers(play: Play) -> None:
    async with fleet(1, 2) as f:
        for engine in f.d:
            engine.default = Play(chunks=3)
        f.d[0].plays.append(play)
        f.d[1].plays.append(Play())
        answers = [await f.complete(stream=True) for _ in range(2)]
        assert [a.status for a in answers] == [200, 200]
        assert [a.text for a in answers] == [FULL, FULL]
        assert sorted(attempts(f.d[0]) + attempts(f.d[1]), key=str) == [1, 1, 2]
        transfers = {s.body["kv_transfer_params"]["transfer"] for e in f.d for s in e.seen}
        assert len(transfers) == 2, "a retry keeps its transfer"
        await f.wait_quiet()


@pytest.mark.parametrize("play", [Play(die_at="request"), Play(die_after=0), Play(abort_after=0), Play(status=500)])
async def test_a_whole_answer_is_retried_elsewhere_too(play: Play) -> None:
    async with fleet(1, 2) as f:
        f.d[0].plays.append(play)
        assert [(await f.complete()).json["choices"][0]["text"] for _ in range(2)] == [FULL, FULL]
        assert len(f.d[0].seen) + len(f.d[1].seen) == 3
        await f.wait_quiet()


@pytest.mark.parametrize(("play", "words"), [
    (Play(chunks=5, die_after=2), "closed the connection"), (Play(chunks=5, error_after=2), "reported an error"),
    (Play(chunks=5, abort_after=2), "aborted"), (Play(chunks=5, cut_after=2), "without [DONE]"),
])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_second_head(play: Play, words: str,
                                                                                version: str) -> None:
    async with fleet(1, 2) as f:
        for engine in f.d:
            engine.default = play
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"prompt": "hi", "stream": True}, version=version))
        answer = await read_answer(reader)
        assert (answer.status, answer.complete) == (200, True)
        assert b"HTTP/1.1" not in answer.body
        assert answer.text == "t0 t1 "
        assert (len(answer.events), answer.events[-1]["error"]["code"]) == (3, "engine_failed")
        assert words in answer.events[-1]["error"]["message"]
        assert await reader.read() == b"", "and the connection is closed"
        writer.transport.abort()
        assert len(f.d[0].seen) + len(f.d[1].seen) == 1
        await f.wait_quiet()


async def test_a_lonely_decode_that_dies_is_told() -> None:
    async with fleet(1, 1) as f:
        f.d[0].default = Play(die_at="request")
        answer = await f.complete(stream=True)
        assert (answer.status, answer.json["error"]["type"]) == (502, "upstream_error")
        await f.d[0].stop()
        assert (await f.complete(stream=True)).status in {502, 503}, "its probe fails, or its port refuses"
        answer = await f.complete()
        assert answer.status == 503
        assert "suspended" in answer.json["error"]["message"]
        await f.wait(lambda: f.p[0].open == 0, "no orphan leg on prefill")


async def test_an_engines_own_error_is_relayed_and_the_other_leg_cleaned_up() -> None:
    async with fleet(1, 2) as f:
        begun = asyncio.Event()

        def holds(_: Seen) -> Play:
            begun.set()
            return Play(hold=asyncio.Event())

        f.p[0].choose = holds
        for engine in f.d:
            engine.default = Play(hold=begun, status=400, body=b'{"error":{"message":"too long","code":400}}')
        answer = await f.complete(stream=True)
        assert (answer.status, answer.body, answer.headers["x-engine"]) == (
            400, b'{"error":{"message":"too long","code":400}}', answer.headers["x-engine"])
        await f.wait(lambda: f.p[0].aborts == 1, "prefill's leg aborted")
        asked = wait_for_kv(*f.d)
        f.p[0].choose = lambda _: Play(hold=asked, status=404)
        for engine in f.d:
            engine.default = Play(status=422)
        answer = await f.complete(stream=True)
        assert (answer.status, answer.json["error"]["message"][2:]) == (422, " says 422")
        await f.wait(lambda: f.d[0].aborts + f.d[1].aborts == 1, "decode's waiting leg aborted")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_prefill_refuses_is_served_by_decode_alone_and_counted(stream: bool, warm: bool) -> None:
    async with fleet(2, 1) as f:
        for _ in range(3 * warm):
            assert (await f.complete(stream=stream)).status == 200
            await f.wait_quiet()
        before = len(f.d[0].seen)
        f.p[0].default = f.p[1].default = Play(
            hold=wait_for_kv(f.d[0]), status=400, body=b'{"error":{"message":"no tool parser","code":400}}')
        answer = await f.complete(stream=stream)
        assert answer.status == 200
        assert (answer.text if stream else answer.json["choices"][0]["text"]) == FULL
        assert ["kv_transfer_params" in seen.body for seen in f.d[0].seen[before:]] == [True, False]
        refused = [seen for engine in f.p for seen in engine.seen][3 * warm:]
        assert len(refused) == 1, "another prefill would refuse it as well"
        await f.wait_quiet()
        [record] = [one for one in f.context.observer.recent if one.skips]
        assert (record.outcome, record.skips, record.retries) == ("ok", "refused", 1)
        assert [leg.result for leg in record.legs] == ["4xx", "cancelled", "2xx"]
        text = (await f.get("/metrics")).body.decode()
        assert 'xpyd_router_skipped_prefill_total{by="refused"} 1.0' in text


async def test_an_error_that_every_decode_gives_is_relayed() -> None:
    async with fleet(1, 3) as f:
        for engine in f.d:
            engine.default = Play(status=500)
        answer = await f.complete()
        assert (answer.status, answer.json["error"]["code"]) == (500, 500)
        assert sum(len(engine.seen) for engine in f.d) == 2, "elsewhere once"


async def test_a_restarted_engine_loses_its_legs_at_once() -> None:
    async with fleet(1, 2) as f:
        held = asyncio.Event()
        for engine in f.d:
            engine.plays.append(Play(hold=held))
        task = asyncio.create_task(f.complete(stream=True))
        await f.wait(lambda: bool(f.d[0].seen or f.d[1].seen), "a decode leg")
        first, other = (f.d[0], f.d[1]) if f.d[0].seen else (f.d[1], f.d[0])
        other.plays.clear()
        f.beat(first, incarnation=Incarnation("new"))
        assert (await task).text == FULL
        assert attempts(other) == [2]
        await f.wait(lambda: first.aborts == 1, "the leg on the old one is closed")


async def test_a_silent_engine_that_refuses_connections_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.serving.waiting.STALL_S", 0.1)
    async with fleet(1, 1) as f:
        held = asyncio.Event()
        f.d[0].plays.append(Play(hold_after=(1, held)))
        task = asyncio.create_task(f.complete(stream=True))
        await f.wait(lambda: bool(f.d[0].seen), "a decode leg")
        f.d[0].refuse()
        answer = await task
        assert (answer.text, answer.events[-1]["error"]["code"]) == ("t0 ", "engine_failed")
        assert "health" in answer.events[-1]["error"]["message"]


async def test_a_pooled_connection_that_died_is_replaced_without_a_trace() -> None:
    async with fleet() as f:
        assert (await f.complete()).status == 200
        await f.wait_quiet()
        for engine in (*f.p, *f.d):
            port = engine.port
            await engine.stop()
            engine.port = port
            await engine.start()
        assert (await f.complete(stream=True)).text == FULL
        assert attempts(f.d[0]) == [1, 1]
