"""Streams that break off anywhere, any number of times, and go on: the client has the same answer.

A made-up model stands behind the engines (``made_streams``): tokens with no text (half characters), one or several
characters; chunks with several tokens; text held back for stop strings.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import msgspec
import pytest
from made_streams import MAX, MadeReplay, made_fields, made_line
from recorded import Line, Seen, Step, seen_of

from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.api.faults import FailureKind
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.stream.continuation import Going, first_request, go_on, position_of, speaks_first
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of
from xpyd_sidecar.router.stream.splice import Splicer
from xpyd_sidecar.router.stream.token_recorder import NotedStream


class Run:
    """One request, by the rules of the router, on engines that break off."""

    def __init__(self, api: Api, line: Line, fields: dict[str, Any], draw: random.Random, *, framed: bool = True) -> None:
        self.line, self.draw, self.framed = line, draw, framed
        self.engine = MadeReplay(line)
        self.request = bodies.parse(api, json.dumps(fields).encode())
        position = position_of(self.request, goes_on=True)
        assert position is not None
        self.position: Position = position
        self.out: list[bytes] = []
        self.goings: list[Going] = []
        self.made = itertools.count(1000)

    def answer(self, request: bodies.GenerationRequest, *, legs: int = 0) -> list[bytes]:
        """What an engine sends for a request, event by event."""
        body = json.loads(bodies.decode_body(request, None))
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
        cut = len(given) - len(self.line.prompt) if isinstance(given, list) else 0
        if isinstance(given, list):
            assert given == self.line.prompt + self.line.ids[:cut]
            assert cut > 0
        sizes = [self.draw.choice([1, 1, 1, 1, 2, 5]) for _ in range(MAX)] if self.draw.random() < 0.7 else []
        self.engine.created = next(self.made)
        events = self.engine.composed(self.line, cut, body, f"r{legs}", sizes)
        found = [b"data: " + json.dumps(e, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n" for e in events]
        return [*found, b"data: [DONE]\n\n"]

    def stream(self, *, first: bool) -> EventStream:
        if first:
            return stream_of(self.position, framed=self.framed)
        self.goings.append(go_on(self.request, self.position))
        return NotedStream(self.position, Splicer(self.position, self.goings[-1]), framed=self.framed)

    def run(self, breaks: int) -> list[Any]:
        """The client's events, when the first ``breaks`` engines break off at a random byte."""
        for leg in range(breaks + 1):
            first = not any(self.out)
            stream = self.stream(first=first)
            request = first_request(self.request, self.position) if first else self.goings[-1].request
            raw = b"".join(map(chunk_of, self.answer(request, legs=leg))) + b"0\r\n\r\n"
            if leg < breaks:
                raw = raw[:self.draw.randrange(len(raw))]
            while raw and not stream.failure:
                size = self.draw.choice([1, 7, 100, 400, 5000])
                self.out.append(stream.feed(raw[:size]))
                raw = raw[size:]
            assert not stream.failure
            if stream.ended:
                break
            tail = self.position.tail()
            if tail is not None:
                self.out.append(chunk_of(tail) if self.framed else tail)
                break
        return self.events()

    def events(self) -> list[Any]:
        raw = b"".join(self.out)
        if self.framed:
            payload = b""
            while raw:
                size, _, rest = raw.partition(b"\r\n")
                payload += rest[:int(size, 16)]
                assert rest[int(size, 16):][:2] == b"\r\n"
                raw = rest[int(size, 16) + 2:]
            raw = payload
        parts = raw.decode().split("\n\n")
        assert parts[-1] == ""
        return parts[:-1]


def same(seen: Seen, wanted: Seen) -> None:
    assert len(seen.names) == len(seen.created) == 1
    assert (seen.texts, seen.finish, seen.logprobs) == (wanted.texts, wanted.finish, wanted.logprobs)
    assert (seen.usage, seen.roles, seen.error, seen.after_finish) == (wanted.usage, wanted.roles, None, 0)
    assert (seen.tokens, seen.prompt) == (wanted.tokens, wanted.prompt)
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in seen.usages)
    assert [one["completion_tokens"] for one in seen.usages] == sorted(one["completion_tokens"] for one in seen.usages)


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("seed", range(400))
def test_whatever_breaks_wherever_the_client_has_the_same_answer(api: Api, seed: int) -> None:
    draw = random.Random(f"{api}{seed}")
    line = made_line(api, draw)
    fields = made_fields(line, draw)
    run = Run(api, line, fields, draw, framed=draw.random() < 0.8)
    wanted = seen_of([part.removeprefix("data: ") for part in _plain(run, fields)])
    events = run.run(draw.choice([0, 1, 1, 2, 5]))
    assert events[-1] == "data: [DONE]"
    if events[0] != "data: [DONE]":
        same(seen_of([event.removeprefix("data: ") for event in events]), wanted)


def _plain(run: Run, fields: dict[str, Any]) -> list[str]:
    """What the client would see without the router."""
    events = run.engine.composed(run.line, 0, fields, "r0")
    return [json.dumps(event) for event in events]


def test_an_unbroken_stream_is_what_it_would_be_without_the_ids() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        api: Api = "chat" if seed % 2 else "completions"
        line = made_line(api, draw)
        fields = made_fields(line, draw) | {"return_token_ids": False}
        run = Run(api, line, fields, draw)
        asked = first_request(run.request, run.position)
        stream = run.stream(first=True)
        draw.seed(seed)
        with_ids = run.answer(asked)
        draw.seed(seed)
        without = run.answer(run.request)
        out = b"".join(stream.feed(chunk_of(event)) for event in with_ids)
        created = [b'"created":%d' % number for number in (1000, 1001)]
        assert out == b"".join(map(chunk_of, without)).replace(created[1], created[0])


def run_of(api: Api = "completions", **fields: Any) -> Run:
    draw = random.Random(3)
    line = made_line(api, draw)
    for at, step in enumerate(line.steps):
        line.steps[at] = Step(100 + at, step.text or "t", step.logprobs)
    return Run(api, line, {"model": "tiny", **line.body, "stream": True, "max_tokens": 20, **fields}, draw)


def feed(run: Run, count: int) -> None:
    stream = run.stream(first=True)
    for event in run.answer(first_request(run.request, run.position))[:count]:
        run.out.append(stream.feed(chunk_of(event)))


def test_the_other_engine_is_asked_for_the_very_next_token() -> None:
    run = run_of(min_tokens=8, truncate_prompt_tokens=-1)
    feed(run, 6)
    body = json.loads(bodies.decode_body(go_on(run.request, run.position).request, None))
    assert body["prompt"] == run.line.prompt + run.line.ids[:6]
    assert (body["max_tokens"], body["min_tokens"], body["return_token_ids"]) == (14, 2, True)
    assert "truncate_prompt_tokens" not in body
    assert (run.position.tokens, run.position.prompt_tokens) == (6, len(run.line.prompt))


def test_absent_max_tokens_means_16_for_completions_and_nothing_for_chat() -> None:
    for api, left in (("completions", 10), ("chat", None)):
        run = run_of(api, max_tokens=None) if api == "chat" else run_of()  # type: ignore[arg-type]
        fields = {name: raw for name, raw in run.request.fields.items() if name != "max_tokens"}
        run.request = msgspec.structs.replace(run.request, fields=fields)
        feed(run, 6 if api == "completions" else 7)
        going = go_on(run.request, run.position)
        body = json.loads(bodies.decode_body(going.request, None))
        assert (going.keep, body.get("max_tokens")) == (6, left)
        if api == "chat":
            assert body["kv_transfer_params"] == {"prompt_token_ids": run.line.prompt + run.line.ids[:6]}
            assert body["messages"] == run.line.body["messages"]


def test_an_engine_that_ignores_the_ids_is_noticed_and_the_next_try_replays() -> None:
    run = run_of("chat")
    feed(run, 9)
    stream = run.stream(first=False)
    for event in run.answer(first_request(run.request, run.position)):
        assert stream.feed(chunk_of(event)) == b""
    assert (stream.kind, run.position.replays) == (FailureKind.BROKEN, True)
    assert go_on(run.request, run.position).keep == 0


@pytest.mark.parametrize("way", [FailoverMode.CONTINUE, FailoverMode.REPLAY])
def test_another_answer_is_a_difference_and_none_of_it_reaches_the_client(way: FailoverMode) -> None:
    run = run_of(frequency_penalty=1.0) if way is FailoverMode.REPLAY else run_of()
    feed(run, 9)
    run.position.forgets = True
    stream = run.stream(first=False)
    run.line.steps[4] = Step(5, "something else", {})
    out = b"".join(stream.feed(chunk_of(event)) for event in run.answer(first_request(run.request, run.position)))
    assert (out, stream.kind) == (b"", FailureKind.DIFFERS)
    assert "where the client has" in stream.failure


def test_an_answer_that_ends_early_is_a_difference() -> None:
    run = run_of(frequency_penalty=1.0)
    feed(run, 9)
    stream = run.stream(first=False)
    events = run.answer(first_request(run.request, run.position))
    out = b"".join(stream.feed(chunk_of(event)) for event in [*events[:4], b"data: [DONE]\n\n"])
    assert (out, stream.kind) == (b"", FailureKind.DIFFERS)


def test_what_is_kept_of_a_stream_is_small() -> None:
    run = run_of(max_tokens=40)
    feed(run, 40)
    assert len(run.position.log) < 40 * 24
    replayed = run_of(max_tokens=40, frequency_penalty=1.0)
    stream = replayed.stream(first=True)
    event = chunk_of(replayed.answer(replayed.request)[3])
    for _ in range(2000):
        stream.feed(event)
    assert sum(map(len, replayed.position.pending)) <= 16 << 10


def chat_event(delta: dict[str, Any], finish: str | None = None, created: int = 1) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    event = {"id": f"c{created}", "created": created, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


@pytest.mark.parametrize(("more", "way"), [
    ({}, FailoverMode.CONTINUE), ({"temperature": 0.7}, FailoverMode.CONTINUE), ({"tools": [{"type": "function"}]}, None),
    ({"tools": [{"type": "function"}], "stream_options": {"include_usage": True}}, FailoverMode.REPLAY)])
def test_a_sampled_stream_is_followed_for_its_lengths_alone(more: dict[str, Any], way: FailoverMode | None) -> None:
    request = bodies.parse("chat", json.dumps({"messages": [], "stream": True, **more}).encode())
    position = position_of(request, goes_on=True)
    assert (None if position is None else position.way) == way
    assert position is None or not position.goes_on
    assert not speaks_first(request, position)
    asked = first_request(request, position).fields.get("return_token_ids")
    assert (asked is not None) == (way is FailoverMode.CONTINUE)
    assert position_of(request, goes_on=False) is None


@pytest.mark.parametrize("at_once", [True, False])
def test_of_a_stream_that_cannot_be_run_again_only_the_usage_is_kept(at_once: bool) -> None:
    fields = {"messages": [], "tools": [{"type": "function"}], "stream": True, "stream_options": {"include_usage": True}}
    position = position_of(bodies.parse("chat", json.dumps(fields).encode()), goes_on=True)
    assert position is not None
    stream = stream_of(position, framed=False)
    usage = {"id": "c1", "created": 1, "model": "m", "choices": [], "usage": {"prompt_tokens": 42, "completion_tokens": 7}}
    events = [chat_event({"content": "x" * 100}).replace(b": ", b":", 1).replace(b"data:{", b"data: {") for _ in range(200)]
    events += [b"data: " + json.dumps(usage, separators=(",", ":")).encode() + b"\n\n", b"data: [DONE]\n\n"]
    chunks = [chunk_of(event) for event in events]
    out = b"".join(stream.feed(part) for part in ([b"".join(chunks)] if at_once else chunks))
    assert (stream.ended, stream.failure, out) == (True, "", b"".join(events))
    assert (position.prompt_tokens, position.tokens, position.usage_sent) == (42, 7, True)
    assert not position.pending
    assert not position.have().texts


def test_tool_calls_go_on_by_replay_with_the_id_that_the_client_has() -> None:
    fields = {"messages": [], "tools": [{"type": "function"}], "temperature": 0, "stream": True}
    request = bodies.parse("chat", json.dumps(fields).encode())
    position = position_of(request, goes_on=True)
    assert position is not None
    assert position.way is FailoverMode.REPLAY

    def deltas(name: str, cut: list[str]) -> list[dict[str, Any]]:
        tools = [{"index": 0, "id": name, "type": "function", "function": {"name": "look", "arguments": ""}}]
        calls = [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in cut]
        return [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"tool_calls": tools}, *calls]

    stream = stream_of(position, framed=False)
    out = b"".join(stream.feed(chunk_of(chat_event(delta))) for delta in deltas("first", ['{"a"', ": 1"]))
    going = go_on(request, position)
    stream = NotedStream(position, Splicer(position, going), framed=False)
    for delta in deltas("second", ['{"a": ', "12", "}"]):
        out += stream.feed(chunk_of(chat_event(delta, created=2)))
    out += stream.feed(chunk_of(chat_event({}, "tool_calls", 2) + b"data: [DONE]\n\n"))
    assert stream.ended
    seen = seen_of([part.removeprefix("data: ") for part in out.decode().split("\n\n")[:-1]])
    assert seen.texts[0] == {"reasoning": "hm", "tool 0": '{"a": 12}', "tool 0 name": "look"}
    assert (seen.names, seen.roles, seen.finish[0][0]) == ({"c1"}, {0: 1}, "tool_calls")
    assert b'"second"' not in out


def test_prompt_details_of_a_stream_that_went_on_are_of_its_own_prompt() -> None:
    """Of 40 tokens 10 were generated elsewhere; what is said of the prompt fits the 30 that the client sent."""
    asked = {"prompt": "a", "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
    request = bodies.parse("completions", json.dumps(asked).encode())
    position = Position("completions", FailoverMode.CONTINUE, wants_usage=True, id="c0", created=1, model="m", prompt=b"1")
    splicer = Splicer(position, Going(request, 10, b"", {}, {}, {}))
    for cached, created, shown in ((32, 8, (30, 0)), (16, 24, (16, 14)), (0, 40, (0, 30))):
        position.usage_sent = False
        usage = {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42,
                 "prompt_tokens_details": {"cached_tokens": cached, "created_cache_tokens": created}}
        event = {"id": "c1", "created": 2, "model": "m", "choices": [], "usage": usage}
        said = json.loads(splicer.take(b"data: " + json.dumps(event).encode() + b"\n\n")[6:])["usage"]
        assert (said["prompt_tokens"], said["completion_tokens"]) == (30, 12)
        details = said["prompt_tokens_details"]
        assert (details["cached_tokens"], details["created_cache_tokens"]) == shown
