"""A fleet under a trace, event by event.

    arrival ─▶ router's queue ─▶ prefill instance ─▶ hand-over ─▶ links ─▶ decode instance ─▶ end
                (FIFO, first to be            │         │          │        (fewest requests, then its own queue)
                 through with it)             │         │          └ into the decode instance, FIFO
                    │                         │         └ out of the prefill instance, FIFO
                    │                         └ what its prefix cache has is not computed
                    └────▶ decode instance, which computes the prompt beside its batch: short prompts, and all of them where
                           no prefill instance serves. A fleet of plain engines is one without prefill.

KV is sent while the prompt is computed, so the links take a prompt from the beginning of its prefill on: where they are
not used up they add nothing. What decode has cached is not sent. Who waits in the queue for too long is refused, as is
who finds it full (``RouterRules``).

A controller is asked every interval what counts it wants. Devices cost from the creation of their instance to its end,
cold start and drain included. Starts vary and fail as the engine model says; nothing else is random: the same trace and
seed give the same outcome.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from xpyd_operator.simulation.chance import spread
from xpyd_operator.simulation.engine import Engines, pools_of
from xpyd_operator.simulation.fleet import SimulatedFleet
from xpyd_operator.simulation.instance import AHEAD_S, DECODE, DRAINING, PREFILL, Entered, SimulatedInstance, through_first
from xpyd_operator.simulation.outcome import Controller, ControllerLook, Mark, Pair, Run
from xpyd_operator.simulation.rules import RouterRules
from xpyd_operator.simulation.trace import Trace
from xpyd_operator.simulation.window import FiguresWindow

SAMPLE_S = 5.0
"""Between two looks at what instances do, as the operator asks routers: on average, since agents beat whenever they like
and traces have their arrivals at full seconds."""
LATE_S = 3.0
"""A controller is asked at the end of its interval, up to so much later."""
TAIL_S = 900.0
"""After the last arrival the fleet runs on so long at most; what is not answered then counts as missed."""
BOUND = 1.25
"""Whoever computes prompts beside a batch has at most so many times the mean of requests, and one more: of these the one
that is through with the prompt first is taken (consistent hashing with bounded loads, Mirrokni et al. 2018, has the same
bound)."""
_HANDED, _END, _BORN, _SAMPLE, _ASK, _CARRIED = 0, 1, 2, 3, 4, 5


class World:
    """One replay."""

    def __init__(
        self, trace: Trace, engines: Engines, start: Pair, controller: Controller, *, rules: RouterRules | None = None,
        seed: int = 1,
    ) -> None:
        self.run = Run(trace)
        self._trace, self._controller, self._rules = trace, controller, rules or RouterRules()
        self._pools = pools_of(engines)
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = self._samples = 0
        self._asks, self._asked_at = 1, 0.0
        self._fleet = SimulatedFleet(self._pools, start, self.run, self._born_at, seed=seed, switching=controller.switching)
        self._queue: deque[int] = deque()
        self._parked: deque[int] = deque()
        """Requests that are through prefill while no decode instance serves."""
        self._first = [0.0] * len(trace)
        self._begun = [0.0] * len(trace)
        """When the prefill began; then when the KV began to come."""
        self._coming: dict[int, float] = {}
        """Bytes by request, of those whose KV is on its way."""
        self._received: dict[int, float] = {}
        """Bytes by decode instance."""
        self._window = FiguresWindow()

    def play(self) -> Run:
        """From the first arrival until all is answered, or the tail is over."""
        trace, events, run = self._trace, self._events, self.run
        last = trace[-1].at if trace else 0.0
        self._at(SAMPLE_S, _SAMPLE)
        self._at(self._controller.interval_s, _ASK)
        index, count = 0, len(trace)
        end = last + TAIL_S
        while index < count or events:
            if index < count and trace[index].at <= events[0][0]:
                self._arrive(trace[index].at, index)
                index += 1
                continue
            now, _, kind, what, version = heapq.heappop(events)
            if now > end:
                break
            if now > last and kind in (_SAMPLE, _ASK):
                continue
            if kind == _HANDED:
                self._handed(now, what, version)
            elif kind == _END:
                self._end(now, self._fleet.all[what], version)
            elif kind == _CARRIED:
                self._carried(now, what, self._fleet.all[version])
            elif kind == _BORN:
                self._born(now, self._fleet.all[what], version)
            elif kind == _SAMPLE:
                self._sample(now)
                self._samples += 1
                self._at(self._samples * SAMPLE_S + SAMPLE_S * (0.5 + spread(self._samples)), _SAMPLE)
            else:
                self._ask(now)
                self._asks += 1
                self._at(self._asks * self._controller.interval_s + LATE_S * spread(self._asks), _ASK)
        self._fleet.bill(last)
        run.link_peak = max(self._received.values(), default=0.0) / max(1.0, last)
        run.ends_at = last
        return run

    # ---- requests

    def _arrive(self, now: float, request: int) -> None:
        self._window.arrivals += 1
        self._window.arrived += self._trace[request].prompt
        self._queue.append(request)
        self._dispatch(now)
        if len(self._queue) > self._rules.most_waiting(self._fleet.wanted[DECODE]):
            self._queue.pop()  # itself
            self.run.refused += 1

    def _expire(self, now: float) -> None:
        """Refuse who has waited for too long."""
        for waiting in (self._queue, self._parked):
            while waiting and now - self._trace[waiting[0]].at > self._rules.queue_timeout_s:
                waiting.popleft()
                self.run.refused += 1

    def _dispatch(self, now: float) -> None:
        self._expire(now)
        queue, ready = self._queue, self._fleet.ready[PREFILL]
        while queue:
            request = queue[0]
            _, prompt, _, hashes = self._trace[request]
            if not ready or prompt < self._rules.skip_below:
                if not ready and not self._rules.onto_decode:
                    queue.popleft()
                    self.run.refused += 1
                    continue
                if not self._onto_decode(now, request):
                    return
                queue.popleft()
                continue
            best = through_first(ready, now, prompt, hashes)
            if best is None:
                return
            queue.popleft()
            cached = best.cached_tokens(hashes, prompt)
            self._count_cached(prompt, cached)
            self._window.read += prompt
            self._window.cached += cached
            self._begun[request], done = best.prefill(now, prompt, hashes)
            self._at(done, _HANDED, request, best.number)

    def _onto_decode(self, now: float, request: int) -> bool:
        """Let decode compute a prompt; whether one can take it now."""
        ready = self._fleet.ready[DECODE]
        _, prompt, output, hashes = self._trace[request]
        most = BOUND * sum(each.count for each in ready) / max(1, len(ready)) + 1
        best, least = None, math.inf
        for each in ready:
            if each.count <= most and each.backlog <= AHEAD_S and each.count < each.model.max_requests:
                through = each.backlog + each.model.prefill_s(prompt, each.cached_tokens(hashes, prompt))
                if through < least or (through == least and best is not None and each.count < best.count):
                    best, least = each, through
        if best is None:
            return False
        self._count_cached(prompt, best.cached_tokens(hashes, prompt))
        self._first[request] = -1.0
        best.compute(now, request, prompt, output, hashes)
        self._plan_end(best)
        return True

    def _count_cached(self, prompt: int, cached: int) -> None:
        self.run.cached_tokens += cached
        self.run.computed_tokens += prompt - cached

    def _handed(self, now: float, request: int, number: int) -> None:
        source = self._fleet.all[number]
        source.count -= 1
        self._first[request] = now
        self._to_decode(now, request, source)
        if source.state == DRAINING and not source.count:
            self._fleet.leave(now, source)
        self._dispatch(now)

    def _to_decode(self, now: float, request: int, source: SimulatedInstance | None) -> None:
        """Through prefill, in ``source``, or through with waiting for a decode instance."""
        ready = self._fleet.ready[DECODE]
        if not ready:
            self._parked.append(request)
            return
        _, prompt, _, hashes = self._trace[request]
        best = ready[0]
        for each in ready:
            if each.count < best.count:
                best = each
        lacks = prompt - best.cached_tokens(hashes, prompt)
        best.cache.insert(hashes)
        begins = self._begun[request] if source is not None else now
        at = max(source.carry(lacks, begins) if source is not None else now, best.expect(lacks, begins))
        self._coming[request] = lacks * best.model.kv_bytes
        if at > now:
            self._at(at, _CARRIED, request, best.number)
        else:
            self._carried(now, request, best)

    def _carried(self, now: float, request: int, instance: SimulatedInstance) -> None:
        _, prompt, output, _ = self._trace[request]
        came = self._coming.pop(request)
        self._window.link_bytes += came
        self._received[instance.number] = self._received.get(instance.number, 0.0) + came
        self._note_first(instance.receive(now, request, prompt, output))
        self._plan_end(instance)

    def _note_first(self, entered: Entered) -> None:
        for request, at in entered:
            if self._first[request] >= 0:
                self._window.handover += at - self._first[request]
                self._window.handovers += 1
            self._first[request] = at
            self.run.ttft[request] = ttft = at - self._trace[request].at
            self._window.ttft.append(ttft)

    def _plan_end(self, instance: SimulatedInstance) -> None:
        instance.version += 1
        at = instance.next_end()
        if at < math.inf:
            self._at(at, _END, instance.number, instance.version)

    def _end(self, now: float, instance: SimulatedInstance, version: int) -> None:
        if version != instance.version or instance.role != DECODE:
            return
        over, entered = instance.ends(now)
        self._note_first(entered)
        for request in over:
            _, prompt, output, _ = self._trace[request]
            tpot = (now - self._first[request]) / (output - 1) if output > 1 else 0.0
            self.run.tpot[request] = tpot = max(0.0, tpot)
            self._window.on_request_ended(prompt, output, tpot)
        self._plan_end(instance)
        if instance.state == DRAINING and not instance.count:
            self._fleet.leave(now, instance)
        if self._queue:
            self._dispatch(now)

    # ---- instances

    def _born_at(self, at: float, instance: SimulatedInstance, role: int) -> None:
        self._at(at, _BORN, instance.number, role)

    def _born(self, now: float, instance: SimulatedInstance, role: int) -> None:
        if not self._fleet.on_started(now, instance, role):
            return
        if role == DECODE:
            for _ in range(len(self._parked)):
                self._to_decode(now, self._parked.popleft(), None)
        self._dispatch(now)

    # ---- what is observed

    def _sample(self, now: float) -> None:
        self._dispatch(now)
        window = self._window
        window.samples += 1
        for each in self._fleet.live:
            if each.count:
                window.busy[each.role] += 1
            if each.role == DECODE:
                window.running += len(each.batch)
                window.kv += (each.kv + each.reserved) / each.model.kv_tokens
            else:
                window.prefilling += each.count

    def _ask(self, now: float) -> None:
        fleet = self._fleet
        ready = (len(fleet.ready[PREFILL]), len(fleet.ready[DECODE]))
        in_prefill = len(self._queue) + sum(each.count for each in fleet.live if each.role == PREFILL)
        in_decode = len(self._parked) + sum(each.count for each in fleet.live if each.role == DECODE)
        waits = len(self._queue) + sum(max(0, each.count - 1) for each in fleet.live if each.role == PREFILL)
        parked = len(self._parked) + sum(each.arriving + len(each.waiting) for each in fleet.live if each.role == DECODE)
        figures = self._window.figures(now - self._asked_at, ready, waits, parked)
        self._asked_at = now
        self._window = FiguresWindow()
        wanted = self._controller.want(ControllerLook(now, figures, fleet.wanted, (in_prefill, in_decode)))
        if wanted != fleet.wanted:
            fleet.scale(now, wanted)
        self.run.marks.append(Mark(now, *wanted, *ready, waits))

    def _at(self, at: float, kind: int, what: int = 0, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, what, version))
