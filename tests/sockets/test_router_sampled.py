"""Sampled streams over sockets, cut between router and engine at any byte: they go on elsewhere, or end with an error."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from beats import beat
from cutting_relay import Cut, CuttingRelay
from router_fleet import Answer, RouterFleet, fleet, request_bytes
from sampled_streams import BYTES, FIELDS, MAX_TOKENS, seam_of, tokens_of
from scripted_engine import Play
from seam_judge import Sample, judge
from toy_model import END, PROMPT, ToyReplay, encode

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.observing.record import Record

PLAIN = Sampling()
HEAD = 170
"""About the bytes of an engine's head."""


class Cuts:
    """Where streams are cut, by user."""

    def __init__(self) -> None:
        self.left: dict[str, Cut] = {}

    def cut(self, user: str, at: int, *, real: bool = True) -> Cut:
        """Cut the next one of a user."""
        self.left[user] = cut = Cut(at, real)
        return cut

    def __call__(self, body: dict[str, Any]) -> Cut | None:
        return self.left.pop(str(body.get("user")), None) if body.get("stream") else None


@asynccontextmanager
async def drawing(cuts: Cuts, *, told: Sampling | None = PLAIN, decodes: int = 2,
                  **settings: Any) -> AsyncIterator[tuple[RouterFleet, list[Record]]]:
    async with fleet(1, decodes, ToyReplay(9), **settings) as f:
        relays = [await CuttingRelay(engine.port, cuts).start() for engine in f.d]
        records: list[Record] = f.records()
        try:
            for number, relay in enumerate(relays):
                tell(f, f.d[number].name, relay.port, 2, told)
            yield f, records
            await f.wait_quiet()
        finally:
            for relay in relays:
                await relay.stop()


def tell(f: RouterFleet, name: str, port: int, seq: int, told: Sampling | None) -> None:
    f.context.watch.on_message(beat(name, http=f"127.0.0.1:{port}", interval_s=60.0, seq=seq, sampling=told))


def text_of(answer: Answer) -> str:
    return "".join(one["choices"][0]["text"] for one in answer.events if isinstance(one, dict) and one.get("choices"))


def finish_of(answer: Answer) -> dict[str, Any]:
    """The event with the finish reason."""
    [event] = [one for one in answer.events if isinstance(one, dict) and one.get("choices")
               and one["choices"][0]["finish_reason"]]
    assert isinstance(event, dict)
    return event


async def test_200_streams_half_of_them_cut_at_a_random_byte() -> None:
    cuts, draw = Cuts(), random.Random(4)
    samples: list[Sample] = []
    went_on = 0
    async with drawing(cuts) as (f, records):
        for number in range(200):
            user = f"{number}"
            cut = cuts.cut(user, HEAD + draw.randrange(BYTES), real=number % 2 == 0)
            body = {**FIELDS, "user": user, "stream_options": {"include_usage": True}}
            answer = await f.post("/v1/completions", body)
            assert answer.events[-1] == "[DONE]", answer.events[-1]
            finish = finish_of(answer)
            tokens = tokens_of(text_of(answer), finish["choices"][0]["finish_reason"])
            usage = answer.events[-2]["usage"]
            assert usage["prompt_tokens"] == len(encode(PROMPT))
            assert len(tokens) <= usage["completion_tokens"] <= len(tokens) + 3, "its end may be inside a character"
            went_on += finish.get("xpyd_continued", 0)
            assert b'"token_ids":[' not in answer.body
            samples.append(Sample(tokens, seam_of(cut.body) if cut.reached else None, cut.real))
        await f.wait_quiet()
        assert went_on == sum(record.continued for record in records) > 50
        assert {record.outcome for record in records} == {"ok"}
    verdict = judge(samples, MAX_TOKENS)
    assert not verdict.rejects, verdict.worst


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_stream_goes_on_at_every_byte_also_inside_characters(api: str) -> None:
    """The same draw, cut at each of many bytes: what the client has got stays, and every character is whole."""
    cuts = Cuts()
    body = {name: value for name, value in FIELDS.items() if name != "prompt"} | {"min_tokens": MAX_TOKENS}
    body |= {"prompt": PROMPT} if api == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    path = "/v1/completions" if api == "completions" else "/v1/chat/completions"
    went_on = 0
    async with drawing(cuts) as (f, records):
        # Of a chat's prompt the text is not known: inside a character it goes on where the answer has eight characters.
        for at in range(2000 if api == "completions" else 4500, 7000, 61):
            cuts.cut("u", at)
            for engine in f.d:
                assert isinstance(engine.replay, ToyReplay)
                engine.replay._asked.clear()
            answer = await f.post(path, {**body, "user": "u"})
            assert answer.events[-1] == "[DONE]", answer.events[-1]
            texts = [one["choices"][0].get("text") if api == "completions" else one["choices"][0]["delta"].get("content")
                     for one in answer.events[:-1]]
            text = "".join(one or "" for one in texts)
            assert "\ufffd" not in text
            assert PROMPT not in text
            assert MAX_TOKENS - 3 <= len(encode(text)) <= MAX_TOKENS
            went_on += finish_of(answer).get("xpyd_continued", 0)
        assert went_on == sum(record.continued for record in records) > 20


@pytest.mark.parametrize(("fields", "settings"), [
    ({}, {"told": None}), ({}, {"told": Sampling((("presence_penalty", 0.5),))}), ({}, {"failover": "exact"}),
    ({}, {"failover": "error"}), ({"presence_penalty": 0.5}, {}), ({"stop": ["zz"]}, {}), ({}, {"decodes": 1})])
async def test_where_it_may_not_go_on_it_ends_with_an_error_event(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    cuts = Cuts()
    async with drawing(cuts, **settings) as (f, records):
        cuts.cut("u", 3000)
        answer = await f.post("/v1/completions", {**FIELDS, "min_tokens": MAX_TOKENS, "user": "u", **fields})
        assert answer.events[-1]["error"]["code"] == "engine_failed"
        await f.wait_quiet()
        assert (records[0].outcome, records[0].continued) == ("broken", 0)


async def test_a_stream_goes_on_twice_and_says_so() -> None:
    cuts = Cuts()
    async with drawing(cuts, decodes=3) as (f, records):
        played = 0

        def choose(_: Any) -> Play | None:
            nonlocal played
            played += 1
            return Play(close_after=5) if played < 3 else None

        for engine in f.d:
            engine.choose = choose
        answer = await f.post("/v1/completions", {**FIELDS, "min_tokens": MAX_TOKENS, "user": "u"})
        assert answer.events[-1] == "[DONE]"
        await f.wait_quiet()
        assert finish_of(answer)["xpyd_continued"] == 2
        assert [event.get("xpyd_continued") for event in answer.events[:-2]] == [None] * (len(answer.events) - 2)
        await f.wait_quiet()
        assert records[0].continued == 2
        last = [seen.body for engine in f.d for seen in engine.seen if seen.body["max_tokens"] == MAX_TOKENS - 10]
        assert len(last) == 1
        assert len(last[0]["prompt"]) == len(encode(PROMPT)) + 10
        assert last[0]["min_tokens"] == MAX_TOKENS - 10


async def test_profiles_are_judged_anew_when_engines_tell_something_else() -> None:
    cuts = Cuts()
    async with drawing(cuts) as (f, records):
        for number in range(3):
            await f.post("/v1/completions", {**FIELDS, "user": f"{number}"})
        for engine in f.d:
            port = int(f.context.roster.find_by_name(engine.name).http[0].rpartition(":")[2])
            tell(f, engine.name, port, 3, Sampling((("frequency_penalty", 0.5),)))
        cuts.cut("u", 3000)
        answer = await f.post("/v1/completions", {**FIELDS, "min_tokens": MAX_TOKENS, "user": "u"})
        assert answer.events[-1]["error"]["code"] == "engine_failed"
        await f.wait_quiet()
        assert records[-1].outcome == "broken"


async def test_an_unseeded_stream_that_is_not_cut_is_relayed_as_it_was() -> None:
    async with drawing(Cuts()) as (f, _):
        answer = await f.raw(request_bytes("/v1/completions", {**FIELDS, "user": "u"}))
        assert "xpyd_continued" not in finish_of(answer)


def test_tokens_that_came_are_counted_by_whole_events() -> None:
    events = [b'data: {"choices":[{"token_ids":[1,2]}]}\n\n', b'data: {"choices":[{"token_ids":[%d]}]}\n\n' % END]
    raw = b"".join(map(chunk_of, events))
    first = len(chunk_of(events[0]))
    assert [seam_of(raw[:at]) for at in (0, first // 2, first, len(raw) - 3, len(raw))] == [0, 0, 2, 2, 3]
    assert json.loads(events[1][6:])["choices"][0]["token_ids"] == [END]
