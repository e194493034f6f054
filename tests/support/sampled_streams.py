"""Sampled streams by the rules of the router, without sockets, on engines that draw: whole, or cut at a random byte.

    samples = run(2000, seed=1)                      for ``seam_judge``; deterministic
    samples = run(2000, seed=1, plant=PLANTS["temperature lost"])     with an error planted where a stream goes on
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw
from seam_judge import Sample
from toy_model import END, PROMPT, ToyReplay, encode

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import EngineDefaults, FailoverMode, SamplingTerms, told_of
from xpyd_sidecar.router.http.wire import Chunks, chunk_of
from xpyd_sidecar.router.stream import continuation
from xpyd_sidecar.router.stream.continuation import Going
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of
from xpyd_sidecar.router.stream.splice import Splicer
from xpyd_sidecar.router.stream.token_recorder import NotedStream

PATH = "/v1/completions"
MAX_TOKENS = 24
BYTES = MAX_TOKENS * 300
"""About what the longest stream has."""
FIELDS: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "stream": True, "temperature": 0.5, "min_tokens": 16,
                          "max_tokens": MAX_TOKENS, "stop_token_ids": [END], "repetition_penalty": 1.1,
                          "logit_bias": {"97": 0.5}}
TERMS = SamplingTerms(True, told_of([Sampling()]))
GoOn = Callable[[bodies.GenerationRequest, Position, EngineDefaults], Going]


@dataclass(frozen=True)
class Plant:
    """An error in how streams go on."""

    go_on: GoOn
    fields: dict[str, Any]
    """Beside ``FIELDS``: with these it would be one."""


def _again_from_clean(request: bodies.GenerationRequest, position: Position, told: EngineDefaults) -> Going:
    lines = bytes(position.log).split(b"\n")[:-1]
    while lines and lines[-1].startswith(b'""'):
        lines.pop()
    position.log[:] = b"".join(line + b"\n" for line in lines)
    return continuation.go_on(request, position, told)


def _without(*names: str) -> GoOn:
    def go_on(request: bodies.GenerationRequest, position: Position, told: EngineDefaults) -> Going:
        going = continuation.go_on(request, position, told)
        left = {name: raw for name, raw in going.request.fields.items() if name not in names}
        return msgspec.structs.replace(going, request=msgspec.structs.replace(going.request, fields=left))
    return go_on


def _min_tokens_kept(request: bodies.GenerationRequest, position: Position, told: EngineDefaults) -> Going:
    going = continuation.go_on(request, position, told)
    fields = {**going.request.fields, "min_tokens": Raw(b"%d" % FIELDS["min_tokens"])}
    return msgspec.structs.replace(going, request=msgspec.structs.replace(going.request, fields=fields))


PLANTS = {
    "sampled again from the last clean token": Plant(_again_from_clean, {"min_tokens": MAX_TOKENS}),
    "temperature lost": Plant(_without("temperature"), {"temperature": 0.3}),
    "min_tokens not reduced": Plant(_min_tokens_kept, {}),
    "a penalty without its history": Plant(continuation.go_on, {"presence_penalty": 2.0, "min_tokens": MAX_TOKENS}),
}


def seam_of(passed: bytes) -> int:
    """Tokens whose events are whole in so much of a chunked stream."""
    count = 0
    for event in b"".join(payload for _, payload in Chunks().feed(passed)).split(b"\n\n")[:-1]:
        if event.startswith(b"data: {"):
            count += sum(len(choice.get("token_ids") or ()) for choice in json.loads(event[6:])["choices"])
    return count


def tokens_of(text: str, finish: str | None) -> tuple[int, ...]:
    """The tokens of an answer, by its text. One that is left inside a character at its end has no text, and is left out."""
    return (*encode(text), *([END] if finish == "stop" else []))


def run(streams: int, seed: int, plant: Plant | None = None, fields: dict[str, Any] | None = None) -> list[Sample]:
    """So many streams, every second one cut."""
    draw = random.Random(f"cuts {seed}")
    engines = [ToyReplay(seed * 1000 + number) for number in (1, 2)]
    body = {**FIELDS, **(fields or {}), **({} if plant is None else plant.fields)}
    go_on = continuation.go_on if plant is None else plant.go_on
    return [_one({**body, "user": str(number)}, draw.randrange(BYTES), engines, go_on, cut=number % 2 == 0)
            for number in range(streams)]


def _one(body: dict[str, Any], at: int, engines: list[ToyReplay], go_on: GoOn, *, cut: bool) -> Sample:
    request = bodies.parse("completions", json.dumps(body).encode())
    position = continuation.position_of(request, goes_on=True, terms=TERMS)
    if position is None or not position.sampled:  # by the error that is planted it would be
        position = Position("completions", FailoverMode.CONTINUE, sampled=True)
    raw = _answer(engines[0], continuation.first_request(request, position))
    seam = seam_of(raw[:at]) if at < len(raw) else None
    stream = stream_of(position, framed=True)
    out = [stream.feed(raw[:at] if cut else raw)]
    tail = None if stream.ended else position.tail()
    if tail is not None:
        out.append(chunk_of(tail))
    elif not stream.ended:
        assert continuation.may_go_on(request, position, TERMS, TERMS)
        going = go_on(request, position, TERMS.told)
        stream = NotedStream(position, Splicer(position, going), framed=True)
        out.append(stream.feed(_answer(engines[1], going.request)))
        assert stream.ended, stream.failure
    events = b"".join(payload for _, payload in Chunks().feed(b"".join(out))).split(b"\n\n")[:-2]
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    text = "".join(choice["text"] for choice in choices)
    return Sample(tokens_of(text, choices[-1]["finish_reason"]), seam, cut)


def _answer(engine: ToyReplay, request: bodies.GenerationRequest) -> bytes:
    body = json.loads(bodies.decode_body(request, None))
    events = [b"data: " + event + b"\n\n" for event in engine.stream(PATH, body, "r")]
    return b"".join(map(chunk_of, [*events, b"data: [DONE]\n\n"])) + b"0\r\n\r\n"
