"""A long prompt between two engines stepped by hand, on a clock that tests move on: what prefill does, piece by piece.

    one = LongPrompt(p, d, tokens=96)
    one.begin()                     both legs; prefill announces, decode asks; nothing is computed yet
    one.compute(16); skip(3.0)      a step of prefill, which tells of the one before; then time passes
    one.wait_told()                 decode has heard what prefill said of its work
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from connector_sides import BLOCK, ByHand, Engine, decode_leg, prefill_leg, request, until

PROMPT = 7


class Time:
    """``time.monotonic`` of all threads, which goes on by itself and can be moved."""

    def __init__(self) -> None:
        self._real = time.monotonic
        self._ahead = 0.0

    def monotonic(self) -> float:
        return self._real() + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds


class LongPrompt:
    """One request."""

    def __init__(self, p: Engine, d: Engine, tokens: int, *, limit_s: float | None = None) -> None:
        self.p, self.d, self.tokens = p, d, tokens
        count = -(-tokens // BLOCK)
        self.source, self.target = list(range(1, count + 1)), list(range(count, 0, -1))
        transfer = uuid.uuid4().hex
        self.ours = request(decode_leg(transfer, wait_s=1e6, limit_s=limit_s), tokens)
        self.theirs = request(prefill_leg(transfer, d), tokens)
        self.done = 0
        """Tokens that were computed, or are in the last step."""

    def begin(self) -> None:
        """Both legs are there, decode has blocks, and has asked prefill."""
        self.d.scheduler.new_request(self.ours)
        self.p.scheduler.new_request(self.theirs)
        self.p.scheduler.on_allocated(self.theirs, (self.source,), 0)
        until(lambda: self.d.scheduler.match_tokens(self.ours, 0) == (self.tokens, True), self.d)
        self.d.scheduler.on_allocated(self.ours, (self.target,), self.tokens)
        self.d.step()
        until(lambda: self.p.workers[0]._publisher._machine._early, self.d)
        self.p.fill(self.source, PROMPT)

    def _run(self, tokens: int) -> dict[str, Any]:
        first, run = self.done == 0, (self.theirs, self.source if self.done == 0 else [], self.done, tokens)
        self.done += tokens
        return {"new": (run,)} if first else {"cached": (run,)}

    def compute(self, tokens: int) -> None:
        """A step of prefill."""
        self.p.step(**self._run(tokens))
        if self.done == self.tokens:
            self.p.scheduler.on_request_ended(self.theirs)

    def hang(self, tokens: int) -> None:
        """Prefill begins a step and never ends it; its threads live on."""
        run, first = self._run(tokens), self.done == tokens
        orders = self.p.scheduler.build_orders(SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=self.theirs.request_id, num_computed_tokens=0)] if first else [],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[] if first else [self.theirs.request_id],
                num_computed_tokens=[done for *_, done, _ in run.get("cached", ())]),
            kv_connector_block_state=self.p.tables.now(run.get("new", ()), run.get("cached", ())),
            num_scheduled_tokens={self.theirs.request_id: tokens}, preempted_req_ids=None))
        for worker in self.p.workers:
            worker.begin(orders)

    @property
    def _leg(self) -> Any:
        return self.d.scheduler._pairing.leg(self.ours.request_id)

    @property
    def told(self) -> tuple[int, int]:
        """What decode has heard of prefill's work."""
        return self._leg.tokens_done, self._leg.steps_waited

    def wait_told(self, tokens: int, steps: int = 0) -> None:
        """Decode has heard of so much work, and has made a step since."""
        until(lambda: self.told == (tokens, steps), self.d)
        self.d.step()

    def wait_arrived(self) -> None:
        """The last whole block that was computed is in its place."""
        whole = self.done // BLOCK if self.done < self.tokens else len(self.source)
        if whole:
            until(lambda: self.over or self.d.holds(self.target[whole - 1:whole], PROMPT, first=whole - 1), self.p, self.d)

    @property
    def over(self) -> bool:
        return self.ours.request_id in self.d.recved

    def wait_loaded(self) -> None:
        until(lambda: self.over, self.p, self.d)
        assert self.d.failed == []
        assert self.d.holds(self.target, PROMPT, first=0)

    def wait_failed(self, *engines: ByHand, skip: Callable[[float], None], each_s: float, most_s: float,
                    meanwhile: Callable[[], object] = bool) -> float:
        """Decode gives it up; seconds that were skipped until then. ``engines`` are stepped as decode is."""
        skipped = 0.0
        while not self.over:
            assert skipped < most_s, "it is waited for longer than it may be"
            skip(each_s)
            skipped += each_s
            meanwhile()
            for _ in range(3):
                for engine in (*engines, self.d):
                    engine.step()
                time.sleep(0.002)
        assert self.d.failed == [self.ours.request_id]
        return skipped
