"""One simulated instance: prefill one prompt after the other, decode all of a batch at once.

A batch is a clock of its own: ``steps`` counts decode steps, a request that comes at step v with n tokens ends at step v
+ n. Between two events the batch does not change, so time and steps follow from each other in closed form:

    time of k steps = k (base + n per_request + per_token (kv + n k / 2))
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from xpyd_operator.simulation.engine import EngineModel

PREFILL, DECODE = 0, 1
STARTING, READY, DRAINING, GONE = 0, 1, 2, 3
AHEAD_S = 2.0
"""Work that a router leaves queued in an engine; the rest waits in the router, for whichever is free first."""

ROOM = 0.95
"""Share of KV up to which requests are admitted. What runs grows on; that engines preempt then is left out."""


class SimulatedInstance:
    """Its role, its state, and what it works on."""

    __slots__ = ("arriving", "batch", "born", "count", "free_at", "gone", "kv", "link_at", "model", "now", "number", "role",
                 "state", "steps", "to", "version", "waiting")

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
        self.begin(role, STARTING, born)

    def begin(self, role: int, state: int, now: float) -> None:
        """Empty, in a role."""
        self.role, self.state, self.to, self.count = role, state, -1, 0
        self.free_at = now
        self.arriving = 0
        """Decode: requests whose KV is on its way; they are in ``count``."""
        self.now, self.steps, self.kv = now, 0.0, 0.0
        self.batch: list[tuple[float, int, int]] = []
        self.waiting: deque[tuple[int, int, int]] = deque()
        self.version = 0

    def carry(self, prompt: int, begins: float) -> float:
        """Give the KV of a prompt to the link, from ``begins`` on at the earliest; when it is through."""
        self.link_at = max(self.link_at, begins) + self.model.link_s(prompt)
        return self.link_at

    # ---- prefill

    def prefill(self, now: float, prompt: int) -> float:
        """Queue a prompt; when decode may begin with it."""
        self.free_at = max(self.free_at, now) + self.model.prefill_s(prompt)
        self.count += 1
        return self.free_at + self.model.handover_s(prompt)

    # ---- decode

    def expect(self, prompt: int, begins: float) -> float:
        """A request whose KV comes; when it is here."""
        self.count += 1
        self.arriving += 1
        return self.carry(prompt, begins)

    def receive(self, now: float, request: int, prompt: int, output: int) -> list[tuple[int, float]]:
        """The KV of a request that was expected is here; what ``admit`` says."""
        self.count -= 1
        self.arriving -= 1
        return self.admit(now, request, prompt, output)

    def admit(self, now: float, request: int, prompt: int, output: int) -> list[tuple[int, float]]:
        """A request whose KV is there; who enters the batch now, and when its first token is there."""
        self.count += 1
        self.waiting.append((request, prompt, output))
        self._advance(now)
        return self._enter()

    def ends(self, now: float) -> tuple[list[int], list[tuple[int, float]]]:
        """Who is through at ``now``, and who enters the batch in their place."""
        self._advance(now)
        out = []
        while self.batch and self.batch[0][0] <= self.steps + 1e-6:
            _, request, size = heapq.heappop(self.batch)
            self.kv -= size
            out.append(request)
        self.count -= len(out)
        if not self.batch:
            self.kv = 0.0
        return out, self._enter()

    def next_end(self) -> float:
        """When the next request is through, if nothing changes; infinite with an empty batch."""
        if not self.batch:
            return math.inf
        model, n = self.model, len(self.batch)
        left = max(0.0, self.batch[0][0] - self.steps)
        each = model.step_base + n * model.step_per_request + model.step_per_token * (self.kv + n * left / 2)
        return self.now + left * each

    def _advance(self, now: float) -> None:
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

    def _enter(self) -> list[tuple[int, float]]:
        entered: list[int] = []
        model = self.model
        while self.waiting and len(self.batch) < model.max_requests:
            request, prompt, output = self.waiting[0]
            if self.kv + prompt > ROOM * model.kv_tokens and self.batch:
                break
            self.waiting.popleft()
            self.kv += prompt
            heapq.heappush(self.batch, (self.steps + output, request, prompt + output))
            entered.append(request)
        if not entered:
            return []
        first = self.now + model.step_s(len(self.batch), self.kv)
        return [(request, first) for request in entered]
