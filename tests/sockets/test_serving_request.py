"""The whole path of a request over real sockets, where nothing fails or the request itself is at fault."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from beats import FINGERPRINT
from router_fleet import RouterFleet, fleet, read_answer, request_bytes
from scripted_engine import Play, attempts

from xpyd_sidecar.contract.ids import Fingerprint
from xpyd_sidecar.process import patience
from xpyd_sidecar.router.http.reply import Reply

LOOPS = ("uvloop",)
FULL = "t0 t1 t2 "
GONE_S = 20.0
"""The goal of a second is the campaign's: here other programs may have the processors."""


async def test_a_stream_is_relayed_and_both_legs_are_told_who_they_are() -> None:
    async with fleet() as f:
        answer = await f.complete(stream=True, temperature=0.5)
        assert (answer.status, answer.complete, answer.events[-1]) == (200, True, "[DONE]")
        assert answer.text == FULL
        assert answer.headers["x-engine"] == "d0"
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        await f.wait_quiet()
        prefill, decode = f.p[0].seen[0].body, f.d[0].seen[0].body
        assert (prefill["max_tokens"], prefill["stream"], prefill["prompt"]) == (1, False, "hi")
        assert (decode["max_tokens"], decode["stream"], decode["temperature"]) == (8, True, 0.5)
        p_leg, d_leg = prefill["kv_transfer_params"], decode["kv_transfer_params"]
        assert p_leg["transfer"] == d_leg["transfer"]
        assert (p_leg["role"], d_leg["role"]) == ("prefill", "decode")
        assert p_leg["peer"] == {"instance": "d0", "incarnation": "i-d0", "control": "127.0.0.1:9"}
        assert "peer" not in d_leg
        assert (await f.complete(stream=True)).text == FULL
        assert f.d[0].connections == 1, "connections are reused"


@pytest.mark.parametrize("stream", [True, False])
async def test_chat_and_whole_answers(stream: bool) -> None:
    async with fleet() as f:
        answer = await f.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}],
                                                       "stream": stream})
        assert (answer.status, answer.complete) == (200, True)
        if stream:
            assert [e["choices"][0]["delta"]["content"] for e in answer.events[:-1]] == ["t0 ", "t1 ", "t2 "]
        else:
            assert answer.json["choices"][0]["message"]["content"] == FULL
            await f.wait_quiet()
            [record] = f.context.observer.recent
            assert (record.prompt_tokens, record.tokens) == (1, 1), "as its usage has it"
            f.context.observer.settle()
            assert f.context.observer.counting.totals().measured == 1
        assert (await f.complete()).json["choices"][0]["text"] == FULL
        await f.wait_quiet()
        assert f.p[0].seen[0].path == "/v1/chat/completions"


async def test_the_request_id_goes_to_both_engines_and_back_other_headers_stay() -> None:
    async with fleet() as f:
        headers = {"X-Request-Id": "req-7", "Authorization": "Bearer secret", "X-data-parallel-rank": "3",
                   "traceparent": "00-ab",
                   "Cookie": "c"}
        answer = await f.post("/v1/completions", {"prompt": "x", "stream": True}, headers=headers)
        assert answer.headers["x-request-id"] == "req-7"
        assert answer.events[0]["id"] == "cmpl-req-7"
        await f.wait_quiet()
        for engine in (*f.p, *f.d):
            seen = engine.seen[0].headers
            assert (seen["x-request-id"], seen["traceparent"]) == ("req-7", "00-ab")
            assert not {"authorization", "cookie", "x-data-parallel-rank"} & set(seen)


async def test_the_bytes_of_a_stream_are_not_touched() -> None:
    async with fleet() as f:
        nasty = ["data: [DONE]\n\n", '"finish_reason":"abort"', "ü€😀\u2028", "\r\n0\r\n\r\n"]
        f.d[0].default = Play(chunks=4, text=lambda i: nasty[i])
        for split in (0, 1, 7):
            f.d[0].default.split = split
            answer = await f.complete(stream=True)
            assert answer.text == "".join(nasty)


async def test_http_1_0_clients_get_the_same_events_unframed() -> None:
    async with fleet() as f:
        answer = await f.post("/v1/completions", {"prompt": "x", "stream": True}, version="1.0")
        assert "transfer-encoding" not in answer.headers
        assert (answer.text, answer.events[-1]) == (FULL, "[DONE]")


async def test_two_by_two_uses_all_four_pairs() -> None:
    async with fleet(2, 2) as f:
        for _ in range(8):
            await f.complete()
        await f.wait_quiet()
        pairs = {(engine.name,
                  seen.body["kv_transfer_params"]["peer"]["instance"]) for engine in f.p for seen in engine.seen}
        assert pairs == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}
        assert [len(engine.seen) for engine in (*f.p, *f.d)] == [4, 4, 4, 4]


@pytest.mark.parametrize("when", ["waiting", "streaming"])
async def test_a_client_that_goes_aborts_both_legs_soon(when: str) -> None:
    async with fleet() as f:
        held = asyncio.Event()
        f.p[0].default = Play(hold=held)
        f.d[0].default = Play(hold=held) if when == "waiting" else Play(chunks=9, hold_after=(1, held))
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"prompt": "x", "stream": True}))
        await f.wait(lambda: bool(f.p[0].seen and f.d[0].seen), "both legs")
        if when == "streaming":
            await reader.readuntil(b"t0")
        gone = asyncio.get_running_loop().time()
        writer.close()
        await f.wait(lambda: f.p[0].aborts == f.d[0].aborts == 1, "both aborted")
        assert max(f.p[0].seen[0].gone_at, f.d[0].seen[0].gone_at) - gone < GONE_S
        await f.wait_quiet()


async def test_back_pressure_reaches_the_engine_and_nothing_is_lost() -> None:
    async with fleet() as f:
        f.d[0].default = Play(chunks=400, text=lambda i: f"{i:05}" + "x" * 50_000)
        reader, writer = await asyncio.open_connection("127.0.0.1", f.router.port, limit=1 << 16)
        writer.write(request_bytes("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 400}))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)
        assert f.d[0].open == 1, "the engine is held back"
        body = bytearray()
        async with asyncio.timeout(30):
            while b"[DONE]" not in body[-40:]:
                data = await reader.read(1 << 20)
                assert data
                body += data
        assert [int(number) for number in re.findall(rb'"text":"(\d{5})x', body)] == list(range(400))
        writer.transport.abort()


async def test_decode_alone_after_the_time_to_pair() -> None:
    async with fleet(1, 1, pair_timeout_s=1.0, load_limit_s=0.5) as f:  # time enough for both legs to arrive
        held = asyncio.Event()
        f.p[0].default = Play(hold=held)
        f.d[0].plays.append(Play(hold=held))
        assert (await f.complete(stream=True)).text == FULL
        assert attempts(f.d[0]) == [1, None]
        assert f.d[0].seen[0].body["kv_transfer_params"]["remaining_s"] == 1.0
        assert f.d[0].seen[0].body["kv_transfer_params"]["limit_s"] == 1.5
        await f.wait(lambda: f.p[0].aborts == f.d[0].aborts == 1, "both first legs aborted")


async def test_a_request_that_takes_too_long_is_ended() -> None:
    async with fleet(1, 1, request_timeout_s=0.5) as f:
        held = asyncio.Event()
        f.d[0].plays.append(Play(hold=held))
        answer = await f.complete(stream=True)
        assert (answer.status, answer.json["error"]["code"]) == (504, "engine_timeout")
        f.d[0].default = Play(hold_after=(1, held))
        async with asyncio.timeout(60):
            while (answer := await f.complete(stream=True)).status == 504:
                pass  # it had no time for a first token
        assert (answer.text, answer.events[-1]["error"]["code"]) == ("t0 ", "engine_timeout")
        await f.wait(lambda: f.d[0].aborts == len(f.d[0].seen) >= 2, "all aborted")


async def test_a_deadline_that_was_far_away_at_first_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SOON_S", 0.1)
    async with fleet(1, 1, request_timeout_s=4.0) as f:  # so long it is far away
        f.d[0].plays.append(Play(hold=asyncio.Event()))
        task = asyncio.ensure_future(f.complete(stream=True))
        await f.wait(lambda: bool(f.d[0].seen), "decode asked")
        [open_] = f.context.servings
        assert open_._reminder._alarm is None
        answer = await task
        assert (answer.status, answer.json["error"]["code"]) == (504, "engine_timeout")


async def test_pairs_only_within_one_fingerprint() -> None:
    async with fleet(1, 2) as f:
        f.beat(f.d[0], fingerprint=Fingerprint("0" * 32), interval_s=60.0)
        for _ in range(4):
            assert (await f.complete()).status == 200
        assert (len(f.d[0].seen), len(f.d[1].seen)) == (0, 4)
        assert FINGERPRINT != "0" * 32


async def test_requests_that_skip_prefill_go_to_decode_as_they_are() -> None:
    async with fleet() as f:
        assert (await f.complete(n=2)).status == 200
        assert not f.p[0].seen
        assert f.d[0].seen[0].body == {"model": "tiny", "prompt": "hi", "max_tokens": 8, "n": 2}


@pytest.mark.parametrize(("body", "status", "code", "param"), [
    (b"{nope", 400, "invalid_json", None),
    ({"prompt": "x", "kv_transfer_params": {"transfer": "0" * 32}}, 400, "refused_field", "kv_transfer_params"),
    ({"prompt": "x", "model": "other"}, 404, "model_not_found", "model"),
    ({"prompt": "x", "stream": "maybe"}, 400, 400, "stream"),
])
async def test_bad_requests_reach_no_engine(body: Any, status: int, code: Any, param: str | None) -> None:
    async with fleet() as f:
        answer = await f.post("/v1/completions", body)
        assert (answer.status, answer.json["error"]["code"], answer.json["error"]["param"]) == (status, code, param)
        assert not f.p[0].seen
        assert not f.d[0].seen


async def test_absent_max_tokens_is_fine() -> None:
    async with fleet() as f:
        assert (await f.post("/v1/completions", {"prompt": "x"})).status == 200
        await f.wait_quiet()
        assert "max_tokens" not in f.d[0].seen[0].body
        assert f.p[0].seen[0].body["max_tokens"] == 1


async def test_no_instance_alive_is_said_at_once() -> None:
    async with fleet(0, 0) as f:
        answer = await f.complete()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json["error"]["message"] == "no decode instance is known"


async def test_at_most_so_many_requests_are_served_at_once() -> None:
    async with fleet(1, 1, max_in_flight=2, queue_size=0) as f:
        held = asyncio.Event()
        f.d[0].default = Play(hold=held)
        tasks = [asyncio.create_task(f.complete()) for _ in range(2)]
        await f.wait(lambda: len(f.d[0].seen) == 2, "two requests")
        answer = await f.complete()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        held.set()
        assert [(await task).status for task in tasks] == [200, 200]
        assert (await f.complete()).status == 200


async def test_every_request_has_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xpyd_sidecar.access")
    async with fleet() as f:
        await f.post("/v1/completions", {"prompt": "x", "stream": True}, headers={"X-Request-Id": "abc"})
        await f.post("/v1/completions", b"{", headers={"X-Request-Id": "def"})
        await f.wait_quiet()
    lines = {r.__dict__["request"]: r.__dict__ for r in caplog.records if r.name == "xpyd_sidecar.access"}
    line = lines["abc"]
    assert (line["message"], line["status"], line["prefill"], line["decode"], line["attempt"]) == ("ok", 200, "p0", "d0", 1)
    assert len(line["transfer"]) == 32
    assert 0 < line["first_byte_s"] <= line["seconds"]
    assert (lines["def"]["message"], lines["def"]["status"]) == ("refused", 400)


async def test_pipelined_streams_come_one_after_the_other() -> None:
    async with fleet() as f:
        reader, writer = await f.connect()
        for i in range(4):
            writer.write(request_bytes("/v1/completions", {"prompt": str(i), "stream": bool(i % 2)}))
        answers = [await read_answer(reader) for _ in range(4)]
        assert [a.status for a in answers] == [200] * 4
        assert [s.body["prompt"] for s in f.d[0].seen] == ["0", "1", "2", "3"]
        writer.transport.abort()


async def test_chaos_every_answer_is_right_or_an_error_and_nothing_stays_open() -> None:
    async with fleet(2, 3, pair_timeout_s=2.0) as f:
        plays = [Play(), Play(delay=0.002), Play(die_at="request"), Play(die_after=0), Play(die_after=1),
                 Play(error_after=1),
                 Play(abort_after=0), Play(status=500), Play(status=400), Play(cut_after=1), Play(split=5)]
        for i, engine in enumerate((*f.p, *f.d)):
            engine.plays.extend(plays[(i + k) % len(plays)] for k in range(40))
        answers = await asyncio.gather(*(_one_of_many(f, i) for i in range(60)))
        good = 0
        for answer in answers:
            if answer is None:
                continue
            if answer.status == 200 and answer.events[-1] == "[DONE]":
                assert answer.text == FULL
                good += 1
            else:
                last = answer.json if answer.status != 200 else answer.events[-1]
                assert "error" in last
        assert good > 5
        await f.wait_quiet()


async def _one_of_many(f: RouterFleet, i: int) -> Any:
    await asyncio.sleep(0.01 * (i % 7))
    if i % 10:
        return await f.complete(stream=True)
    reader, writer = await f.connect()
    writer.write(request_bytes("/v1/completions", {"prompt": "x", "stream": True}))
    await asyncio.sleep(0.005)
    writer.transport.abort()
    assert reader is not None
    return None


@pytest.mark.parametrize("where", ["before", "streaming"])
async def test_a_bug_costs_one_request_and_leaves_nothing_open(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet() as f:
        f.d[0].default = Play(chunks=9, delay=0.02)
        broken, name = (f.context, "leg_opened") if where == "before" else (Reply, "begin")

        begin = Reply.begin

        def bug(*given: Any, **named: Any) -> None:
            if where == "before" or given[1] != 500:
                raise RuntimeError("a bug")
            begin(*given, **named)

        monkeypatch.setattr(broken, name, bug)
        answer = await f.complete(stream=True)
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal")
        monkeypatch.undo()
        await f.wait_quiet()
        f.d[0].default = Play()
        assert (await f.complete(stream=True)).text == FULL


async def test_the_access_log_says_why_a_request_was_refused_in_the_words_that_the_client_has() -> None:
    async with fleet(0, 0) as f:
        records = f.records()
        answer = await f.complete()
        assert (answer.status, answer.json["error"]["message"] != "") == (503, True)
        assert [(record.outcome, record.detail) for record in records] == [
            ("unavailable", answer.json["error"]["message"])]
