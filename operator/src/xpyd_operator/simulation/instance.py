"""One simulated instance: prefill one prompt after the other, decode all of a batch at once, or both in one.

A batch is a clock of its own: ``steps`` counts decode steps, a request that comes at step v with n tokens ends at step v
+ n. Between two events the batch does not change, so time and steps follow from each other in closed form:

    time of k steps = k (base + n per_request + per_token (kv + n k / 2))

Where an instance computes prompts beside its batch (decode without prefill, a plain engine), each step that does so is an
event of its own: it takes a chunk of the prompts in the order in which they came, and gives every request of the batch one
token. What comes meanwhile waits for the step's end.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.prefix import Hashes, PrefixCache

PREFILL, DECODE = 0, 1
STARTING, READY, DRAINING, GONE = 0, 1, 2, 3
AHEAD_S = 2.0
"""Work that a router leaves queued in an engine; the rest waits in the router, for whichever is free first."""

ROOM = 0.95
"""Share of KV up to which requests are admitted. What runs grows on; that engines preempt then is left out."""
Entered = list[tuple[int, float]]
"""Requests whose first token is there, and when."""


class _Prompt:
    """One that is computed beside the batch."""

    __slots__ = ("begun", "done", "output", "request", "tokens")

    def __init__(self, request: int, tokens: int, output: int, cached: int) -> None:
        self.request, self.tokens, self.output = request, tokens, output
        self.done = cached
        self.begun = False


class SimulatedInstance:
    """Its role, its state, and what it works on."""

    __slots__ = ("arriving", "backlog", "batch", "born", "cache", "count", "free_at", "gone", "kv", "link_at", "model",
                 "now", "number", "prompts", "reserved", "role", "state", "step_at", "steps", "to", "version", "waiting")

    def __init__(self, model: EngineModel, role: int, born: float, number: int) -> None:
        self.model = model
        self.number = number
        self.role, self.state = role, STARTING
        self.to = -1
        """The role that it takes once its work is done; -1: it goes."""
        self.born, self.gone = born, math.inf
        self.count = 0
        """Requests in it."""
        self.free_at = 0.0
        """Prefill: when all that is queued is done."""
        self.link_at = 0.0
        """When its link is through with all that was given to it."""
        self.cache = PrefixCache(model.kv_tokens)
        self.version = 0
        self.begin(role, STARTING, born)

    def begin(self, role: int, state: int, now: float) -> None:
        """Empty, in a role. What it has cached it keeps."""
        self.role, self.state, self.to, self.count = role, state, -1, 0
        self.free_at = now
        self.arriving = 0
        """Decode: requests whose KV is on its way; they are in ``count``."""
        self.now, self.steps, self.kv = now, 0.0, 0.0
        self.batch: list[tuple[float, int, int]] = []
        self.waiting: deque[tuple[int, int, int]] = deque()
        self.prompts: deque[_Prompt] = deque()
        """That are to be computed here; they are in ``count``."""
        self.backlog = 0.0
        """Seconds of computing that they take."""
        self.reserved = 0
        """Tokens of KV of those that have begun."""
        self.step_at = math.inf
        """When the step ends that computes prompts; infinite: there is none."""
        self.version += 1

    def carry(self, tokens: int, begins: float) -> float:
        """Give the KV of so many tokens to the link, from ``begins`` on at the earliest; when it is through."""
        self.link_at = max(self.link_at, begins) + self.model.link_s(tokens)
        return self.link_at

    def cached_tokens(self, hashes: Hashes, prompt: int) -> int:
        """Tokens of a prompt whose KV the instance still has."""
        return self.cache.match(hashes, prompt) if hashes else 0

    # ---- prefill

    def prefill(self, now: float, prompt: int, hashes: Hashes = ()) -> tuple[float, float]:
        """Queue a prompt; when it is begun, and when decode may begin with it."""
        took = self.model.prefill_s(prompt, self.cached_tokens(hashes, prompt))
        self.cache.insert(hashes)
        begins = max(self.free_at, now)
        self.free_at = begins + took
        self.count += 1
        return begins, self.free_at + self.model.handover_s(prompt)

    # ---- decode

    def expect(self, tokens: int, begins: float) -> float:
        """A request of which the KV of so many tokens comes; when it is here."""
        self.count += 1
        self.arriving += 1
        return self.carry(tokens, begins)

    def receive(self, now: float, request: int, prompt: int, output: int) -> Entered:
        """The KV of a request that was expected is here; what ``admit`` says."""
        self.count -= 1
        self.arriving -= 1
        return self.admit(now, request, prompt, output)

    def admit(self, now: float, request: int, prompt: int, output: int) -> Entered:
        """A request whose KV is there; who enters the batch now, and when its first token is there."""
        self.count += 1
        self.waiting.append((request, prompt, output))
        self._advance(now)
        return self._enter()

    def compute(self, now: float, request: int, prompt: int, output: int, hashes: Hashes = ()) -> None:
        """A request whose prompt is to be computed here."""
        self.count += 1
        cached = self.cached_tokens(hashes, prompt)
        self.cache.insert(hashes)
        self.prompts.append(_Prompt(request, prompt, output, cached))
        self.backlog += self.model.prefill_s(prompt, cached)
        self._advance(now)
        self._begin_step()

    def ends(self, now: float) -> tuple[list[int], Entered]:
        """Who is through at ``now``, and who has its first token, then or thereafter."""
        entered: Entered = []
        out: list[int] = []
        if self.step_at < math.inf:
            self._end_step(now, entered, out)
        else:
            self._advance(now)
        while self.batch and self.batch[0][0] <= self.steps + 1e-6:
            _, request, size = heapq.heappop(self.batch)
            self.kv -= size
            out.append(request)
        self.count -= len(out)
        if not self.batch:
            self.kv = 0.0
        came = self._enter()
        self._begin_step()
        if self.step_at < math.inf:
            came = [(request, self.step_at) for request, _ in came]
        return out, entered + came

    def next_end(self) -> float:
        """When a request is through next, or a step that computes prompts, if nothing changes; infinite without any."""
        if self.step_at < math.inf or not self.batch:
            return self.step_at
        model, n = self.model, len(self.batch)
        left = max(0.0, self.batch[0][0] - self.steps)
        each = model.step_base + n * model.step_per_request + model.step_per_token * (self.kv + n * left / 2)
        return self.now + left * each

    def _advance(self, now: float) -> None:
        if self.step_at < math.inf:
            return
        n = len(self.batch)
        if n and now > self.now:
            model = self.model
            first = model.step_base + n * model.step_per_request + model.step_per_token * self.kv
            slope = model.step_per_token * n / 2
            past = now - self.now
            # k first + k² slope = past
            k = past / first if slope <= 0 else (math.sqrt(first * first + 4 * slope * past) - first) / (2 * slope)
            self.steps += k
            self.kv += n * k
        self.now = now

    def _enter(self) -> Entered:
        if self.step_at < math.inf:
            return []
        entered: list[int] = []
        while self.waiting and self._has_room(self.waiting[0][1]):
            request, prompt, output = self.waiting.popleft()
            self.kv += prompt
            heapq.heappush(self.batch, (self.steps + output, request, prompt + output))
            entered.append(request)
        if not entered:
            return []
        first = self.now + self.model.step_s(len(self.batch), self.kv)
        return [(request, first) for request in entered]

    def _has_room(self, prompt: int) -> bool:
        begun = sum(each.begun for each in self.prompts) if self.reserved else 0
        if not self.batch and not begun:
            return True
        return (len(self.batch) + begun < self.model.max_requests
                and self.kv + self.reserved + prompt <= ROOM * self.model.kv_tokens)

    # ---- steps that compute prompts beside the batch

    def _begin_step(self) -> None:
        """The next one, if there is something to compute and room for it."""
        if self.step_at < math.inf or not self.prompts:
            return
        model, n = self.model, len(self.batch)
        room = max(1, model.chunk - n)
        seconds = 0.0
        for each in self.prompts:
            if room <= 0:
                break
            if not each.begun:
                if not self._has_room(each.tokens):
                    break
                each.begun = True
                self.reserved += each.tokens
                seconds += model.prefill_start
            part = min(room, each.tokens - each.done)
            seconds += model.chunk_s(each.done, each.done + part)
            each.done += part
            room -= part
        if seconds:
            self.backlog = max(0.0, self.backlog - seconds)
            beside = n * model.step_per_request + self.kv * model.step_per_token
            self.step_at = self.now + max(model.step_base, seconds) + beside

    def _end_step(self, now: float, entered: Entered, out: list[int]) -> None:
        self.now, self.step_at = now, math.inf
        self.steps += 1
        self.kv += len(self.batch)
        while self.prompts and self.prompts[0].begun and self.prompts[0].done >= self.prompts[0].tokens:
            one = self.prompts.popleft()
            self.reserved -= one.tokens
            entered.append((one.request, now))
            if one.output > 1:  # the step has given the first one
                self.kv += one.tokens + 1
                heapq.heappush(self.batch, (self.steps + one.output - 1, one.request, one.tokens + one.output))
            else:
                out.append(one.request)
        if not self.prompts:
            self.backlog = 0.0


def through_first(ready: list[SimulatedInstance], now: float, prompt: int, hashes: Hashes) -> SimulatedInstance | None:
    """The prefill instance that is through with a prompt first, of equals the one that is idle for longest; None where all
    have enough to do.
    """
    best: SimulatedInstance | None = None
    least = (math.inf, math.inf)
    for each in ready:
        if each.free_at - now <= AHEAD_S:
            saved = each.cached_tokens(hashes, prompt) / each.model.prefill_rate if hashes else 0.0
            key = (max(each.free_at, now) - saved, each.free_at)
            if key < least:
                best, least = each, key
    return best
