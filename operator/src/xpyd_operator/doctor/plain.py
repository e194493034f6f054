"""The same requests on the same GPUs: as prefill and decode engines, and as plain engines with chunked prefill. Pure.

    plain engine    a step has a token for each of n that decode, and up to ``CHUNK - n`` tokens of prompts, by arrival
                    base + n * per_request + tokens * per_token                        seconds of a step
    P/D             a prefill engine does one prompt after the other; its KV takes the hand-over; a decode engine is a
                    plain engine whose prompts are computed

Requests go to the engine with the fewest tokens to do. KV memory and what differs in parallel sizes are left out: where
memory is what P/D or plain engines lack, this does not say it. Stretches in which nothing begins or ends are one event, so
an hour of traffic takes seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from xpyd_operator.doctor.learned import Learned
from xpyd_sidecar.contract.sample import SampledRequest

CHUNK: Final = 2048
"""Tokens of one step, as vLLM's ``max_num_batched_tokens``."""
MOST_RUNNING: Final = 256


class Played(msgspec.Struct):
    """One request as it was played. Times from the beginning of the sample."""

    arrived: float
    prompt: int
    left: int
    """Tokens of the prompt that are not computed yet."""
    output: int
    """Tokens that are not given out yet."""
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    begun: float = 0.0
    """When this engine had it; arrival where nobody had it before."""


class PlainEngine:
    """One engine. Its clock is its own and goes on in ``until``."""

    def __init__(self, model: Learned) -> None:
        self._model = model
        self.now = 0.0
        self._waiting: deque[Played] = deque()
        """Prompts that are not computed whole, in order."""
        self._ends: list[tuple[int, int, Played]] = []
        """Those that decode, by the step in which they end."""
        self._steps = 0
        self._count = 0
        self.work = 0.0
        """Tokens of prompts and answers that it has to do."""

    def take(self, request: Played) -> None:
        """A request comes; the clock stands at its time, or later."""
        self.now = max(self.now, request.begun)
        self._waiting.append(request)
        self.work += request.left + request.output

    def until(self, end: float) -> None:
        """Work until then, or until nothing is left; the last step may go beyond."""
        while self.now < end and (self._waiting or self._ends):
            if self._waiting and len(self._ends) < MOST_RUNNING:
                self._mixed()
            else:
                self._decode(end)
        if not (self._waiting or self._ends):
            self.now = max(self.now, end) if end < float("inf") else self.now

    def _mixed(self) -> None:
        """One step with a chunk of prompts."""
        model, running = self._model, len(self._ends)
        room, done = max(1, CHUNK - running), 0
        begun: list[Played] = []
        while self._waiting and done < room and running + len(begun) < MOST_RUNNING:
            head = self._waiting[0]
            part = min(head.left, room - done)
            head.left -= part
            done += part
            if head.left:
                break
            begun.append(self._waiting.popleft())
        starts = model.prefill_start if begun else 0.0
        base = model.step_s(running) if running else 0.0
        self._pass(1, base + starts + done * model.prefill_per_token)
        self.work -= done
        for one in begun:
            one.first = self.now
            one.output -= 1
            self.work -= 1
            if one.output > 0:
                self._count += 1
                heapq.heappush(self._ends, (self._steps + one.output, self._count, one))
            else:
                one.ended = self.now

    def _decode(self, end: float) -> None:
        """Steps of nothing but decode, until one ends or the time is over."""
        each = self._model.step_s(len(self._ends))
        until_end = self._ends[0][0] - self._steps
        self._pass(min(until_end, max(1, int((end - self.now) / each) + 1) if end < float("inf") else until_end), None)

    def _pass(self, steps: int, seconds: float | None) -> None:
        running = len(self._ends)
        self.now += steps * self._model.step_s(running) if seconds is None else seconds
        self._steps += steps
        self.work -= steps * running
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, one = heapq.heappop(self._ends)
            one.ended = self.now


class LatencyFigures(msgspec.Struct, frozen=True):
    """What became of the requests, seconds."""

    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float


def as_plain(requests: Sequence[SampledRequest], model: Learned, engines: int) -> LatencyFigures:
    """On so many plain engines."""
    fleet = [PlainEngine(model) for _ in range(engines)]
    return _outcome(_run(_played(requests, model), fleet))


def as_pd(requests: Sequence[SampledRequest], model: Learned, prefills: int, decodes: int) -> LatencyFigures:
    """On so many prefill and decode engines."""
    played = _played(requests, model)
    free = [0.0] * prefills
    for one in played:
        start = max(one.arrived, heapq.heappop(free))
        done = start + model.prefill_s(one.prompt)
        heapq.heappush(free, done)
        one.begun, one.left = done + model.way_s, 0
    decoding = msgspec.structs.replace(model, prefill_start=0.0)
    return _outcome(_run(sorted(played, key=lambda one: one.begun), [PlainEngine(decoding) for _ in range(decodes)]))


def measured(requests: Sequence[SampledRequest]) -> LatencyFigures:
    """As it was."""
    streams = [one for one in requests if one.ttft > 0]
    tpots = [(one.total - one.ttft) / (one.output - 1) for one in streams if one.output > 1]
    return _quantiles([one.ttft for one in streams], tpots)


def _played(requests: Sequence[SampledRequest], model: Learned) -> list[Played]:
    mean = max(1, round(model.output))
    return [Played(one.at, one.prompt, max(0, one.prompt), one.output if one.output > 0 else mean,
                   tokens=one.output if one.output > 0 else mean, begun=one.at)
            for one in sorted(requests, key=lambda one: one.at)]


def _run(played: list[Played], fleet: list[PlainEngine]) -> list[Played]:
    for one in played:
        for engine in fleet:
            engine.until(one.begun)
        min(fleet, key=lambda engine: engine.work).take(one)
    for engine in fleet:
        engine.until(float("inf"))
    return played


def _outcome(played: Sequence[Played]) -> LatencyFigures:
    return _quantiles([one.first - one.arrived for one in played],
                      [(one.ended - one.first) / (one.tokens - 1) for one in played if one.tokens > 1])


def _quantiles(ttfts: list[float], tpots: list[float]) -> LatencyFigures:
    def at(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0

    return LatencyFigures(at(ttfts, 0.5), at(ttfts, 0.95), at(tpots, 0.5), at(tpots, 0.95))
