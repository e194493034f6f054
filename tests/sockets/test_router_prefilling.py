"""Generation in dialects of its own, with a prefill leg beside: a router before engines that are plain sockets."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from beats import beat
from router_fleet import request_bytes
from socket_engines import EVENT, HEAD, MESSAGE, D, Leg, P, dead, head_only, silent, site, well

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Incarnation


async def test_prefill_makes_one_token_of_the_same_prompt_and_decode_is_told_of_it() -> None:
    async with site((P, well), (D, well)) as (f, [prefill, decode]):
        body = {**MESSAGE, "stream": True, "temperature": 0.7, "system": "be brief"}
        answer = await f.post("/v1/messages?beta=true", body)
        assert (answer.status, answer.body, answer.complete) == (200, EVENT, True)
        await f.wait(lambda: bool(prefill.legs), "prefill's leg; this decode does not wait for it")
        [sent], [asked] = prefill.legs, decode.legs
        assert {name: sent.body[name] for name in ("max_tokens", "stream", "temperature")} == {
            "max_tokens": 1, "stream": False, "temperature": 0}
        assert "stop_sequences" not in sent.body
        assert (sent.body["messages"], sent.body["system"]) == (MESSAGE["messages"], "be brief")
        told = dict(asked.body)
        wait, push = legs.decode(told.pop(legs.FIELD)), legs.decode(sent.params)
        assert told == body
        assert (push.role, push.transfer, push.attempt) == (P, wait.transfer, 1)
        assert push.peer == legs.Peer("e1", "i-e1", "127.0.0.1:2")
        assert (wait.role, wait.attempt) == (D, 1)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", {"input": "why?" * 30, "tools": [{"type": "web_search_preview"}]}),
    ("/v1/responses", {"input": "why?" * 30, "truncation": "auto"}),
    ("/v1/responses", {"input": "why?"}), ("/v1/messages", {"messages": []}),
    ("/inference/v1/generate", {"token_ids": [1] * 99}),
])
async def test_what_one_engine_must_do_alone_goes_to_decode_as_it_is(path: str, body: dict[str, Any]) -> None:
    async with site((P, well), (D, well), skip_prefill_below=16) as (f, [prefill, decode]):
        assert (await f.post(path, body)).status == 200
        assert ([leg.body for leg in decode.legs], prefill.legs) == ([body], [])


async def test_without_a_prefill_instance_decode_does_it() -> None:
    async with site((D, well)) as (f, [decode]):
        assert (await f.post("/v1/responses", {"input": "why?"})).status == 200
        assert decode.legs[0].body == {"input": "why?"}


async def test_a_prefill_that_dies_is_replaced_while_decode_waits() -> None:
    computed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def computes(leg: Leg) -> None:
        computed[leg.params["transfer"]].set()
        await well(leg)

    async def waits(leg: Leg) -> None:
        await computed[leg.params["transfer"]].wait()
        await well(leg)

    async with site((P, dead), (P, computes), (D, waits)) as (f, engines):
        for _ in range(4):
            assert (await f.post("/v1/messages", MESSAGE)).body == EVENT
        broken, good, decode = engines
        assert broken.legs
        assert len(decode.legs) == 4, "decode's leg waited"
        seconds = [leg for leg in good.legs if leg.params["attempt"] == 2]
        assert {leg.params["transfer"] for leg in seconds} == {leg.params["transfer"] for leg in broken.legs}
        assert {leg.params["transfer"] for leg in good.legs} == {leg.params["transfer"] for leg in decode.legs}


async def test_where_no_prefill_can_do_it_decode_is_asked_again_without_one() -> None:
    async with site((P, dead), (D, head_only)) as (f, [_, decode]):
        answer = await f.post("/v1/messages", {**MESSAGE, "stream": True})
        assert (answer.status, answer.body, answer.complete) == (200, EVENT, True)
        first, second = decode.legs
        assert first.gone.is_set()
        assert second.body == {**MESSAGE, "stream": True}


async def test_a_prompt_that_prefill_refuses_is_decodes_to_judge() -> None:
    async def refuse(leg: Leg) -> None:
        await leg.answer(400, b'{"why": "p"}')
        await leg.stay()

    async def judge(leg: Leg) -> None:
        if leg.params:
            await leg.stay()
        else:
            await leg.answer(422, b'{"why": "d"}')
            await leg.stay()

    async with site((P, refuse), (P, refuse), (D, judge)) as (f, [one, other, _]):
        answer = await f.post("/v1/messages", MESSAGE)
        assert (answer.status, answer.json) == (422, {"why": "d"})
        assert len(one.legs) + len(other.legs) == 1, "another would refuse it as well"
        [record] = f.context.observer.recent
        assert (record.outcome, record.skips) == ("client_error", "refused")


@pytest.mark.parametrize("status", [401, 429])
async def test_what_a_prefill_engine_says_of_itself_makes_another_one_do_it(status: int) -> None:
    async def refuse(leg: Leg) -> None:
        await leg.answer(status, b"{}")
        await leg.stay()

    async def alone(leg: Leg) -> None:
        if leg.params:
            await leg.stay()
        else:
            await leg.answer(200, b"{}")
            await leg.stay()

    async with site((P, refuse), (P, refuse), (D, alone)) as (f, [one, other, _]):
        assert (await f.post("/v1/messages", MESSAGE)).status == 200
        assert len(one.legs) == len(other.legs) == 1
        [record] = f.context.observer.recent
        assert (record.outcome, record.skips) == ("ok", "")


async def test_what_decode_refuses_is_the_answer_and_prefill_is_let_go() -> None:
    async def refuse(leg: Leg) -> None:
        await leg.answer(400, b'{"why": "d"}')
        await leg.stay()

    async with site((P, silent), (D, refuse)) as (f, [prefill, _]):
        answer = await f.post("/v1/messages", MESSAGE)
        assert (answer.status, answer.json) == (400, {"why": "d"})
        await f.wait(lambda: all(leg.gone.is_set() for leg in prefill.legs), "prefill's leg is aborted")


async def test_a_decode_that_dies_before_it_answers_is_replaced_with_an_attempt_of_its_own() -> None:
    async with site((P, well), (D, dead), (D, well)) as (f, [prefill, broken, good]):
        for _ in range(4):
            assert (await f.post("/v1/messages", MESSAGE)).body == EVENT
        assert broken.legs
        told = [(leg.params["transfer"], leg.params["attempt"]) for leg in broken.legs + good.legs]
        assert len(set(told)) == len(told)
        served = {(leg.params["transfer"], leg.params["attempt"], "e2") for leg in good.legs}
        await f.wait(lambda: served <= {(leg.params["transfer"], leg.params["attempt"], leg.params["peer"]["instance"])
                                        for leg in prefill.legs}, "a leg of prefill for each that was served")


async def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    go = asyncio.Event()

    async def late(leg: Leg) -> None:
        await go.wait()

    async def begun(leg: Leg) -> None:
        await leg.say(HEAD + b"2\r\nab\r\n")
        go.set()
        await asyncio.sleep(0.1)
        await leg.say(b"0\r\n\r\n")
        await leg.stay()

    async with site((P, late), (D, begun)) as (f, [prefill, decode]):
        answer = await f.post("/v1/messages", MESSAGE)
        assert (answer.body, answer.complete) == (b"ab", True)
        assert (len(prefill.legs), len(decode.legs)) == (1, 1)


async def test_a_client_that_goes_aborts_both_legs() -> None:
    async with site((P, silent), (D, silent)) as (f, engines):
        _, writer = await f.connect()
        writer.write(request_bytes("/v1/messages", MESSAGE))
        await f.wait(lambda: all(engine.legs for engine in engines), "both legs")
        writer.transport.abort()
        await f.wait(lambda: all(leg.gone.is_set() for engine in engines for leg in engine.legs), "both legs are aborted")


async def test_when_the_time_to_pair_is_over_prefill_is_let_go_and_decode_does_it() -> None:
    bounds = {"pair_timeout_s": 1.0, "load_limit_s": 0.5}  # time enough for both legs to arrive
    async with site((P, silent), (D, head_only), **bounds) as (f, [prefill, decode]):
        assert (await f.post("/v1/messages", MESSAGE)).body == EVENT
        await f.wait(lambda: prefill.legs[0].gone.is_set() and decode.legs[0].gone.is_set(), "both legs to be let go")
        assert [bool(leg.params) for leg in decode.legs] == [True, False]
        await f.wait(lambda: bool(decode.farewells), "a word to the engine that waited for KV")


async def test_a_prefill_that_answers_late_is_counted_where_decode_was_done_before() -> None:
    go = asyncio.Event()

    async def late(leg: Leg) -> None:
        await go.wait()
        await leg.answer()
        await leg.stay()

    async with site((P, late), (D, well)) as (f, _):
        assert (await f.post("/v1/messages", {**MESSAGE, "stream": True})).body == EVENT
        go.set()
        await f.wait(lambda: bool(f.context.observer.recent), "a record")
        [record] = f.context.observer.recent
        assert {leg.role: leg.result for leg in record.legs} == {P: "2xx", D: "2xx"}


async def test_retries_have_the_budget_of_all_requests() -> None:
    async def fails(leg: Leg) -> None:
        await leg.answer(500)
        await leg.stay()

    async with site((P, fails), (P, fails), (D, head_only), retry_budget=0.0) as (f, engines):
        for engine in engines:
            engine.healthy = True
        assert (await f.post("/v1/messages", MESSAGE)).body == EVENT
        assert sum(len(engine.legs) for engine in engines if engine.role is P) == 2
        while f.context.budget.may_retry(f.context.loop.time()):
            pass
        for _ in range(4):
            assert (await f.post("/v1/messages", MESSAGE)).body == EVENT
        assert sum(len(engine.legs) for engine in engines if engine.role is P) == 2 + 4, "no second one is asked"


async def test_a_failure_of_decode_is_tried_elsewhere_once_and_then_its_own_words_are_the_answer() -> None:
    async def fails(leg: Leg) -> None:
        await leg.answer(500, b'{"why": "d"}')
        await leg.stay()

    async with site((P, well), (D, fails), (D, fails), (D, fails)) as (f, engines):
        for engine in engines:
            engine.healthy = True
        answer = await f.post("/v1/messages", MESSAGE)
        assert (answer.status, answer.json) == (500, {"why": "d"})
        assert sum(len(engine.legs) for engine in engines if engine.role is D) == 2


async def test_a_prefill_that_began_anew_meanwhile_is_not_waited_for() -> None:
    async with site((P, silent), (D, head_only)) as (f, [prefill, decode]):
        asking = asyncio.create_task(f.post("/v1/messages", MESSAGE))
        await f.wait(lambda: bool(prefill.legs and decode.legs), "both legs")
        f.context.watch.on_message(beat("e0", P, "127.0.0.1:1", incarnation=Incarnation("i-again"), interval_s=60.0))
        assert (await asking).body == EVENT
        assert len(decode.legs) == 2
