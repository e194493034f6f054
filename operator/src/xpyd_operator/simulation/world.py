"""A fleet under a trace, event by event.

    arrival ─▶ router's queue ─▶ prefill instance ─▶ hand-over ─▶ links ─▶ decode instance ─▶ end
                    (FIFO, first free)                  │          │        (fewest requests, then its own queue)
                                                        │          └ into the decode instance, FIFO
                                                        └ out of the prefill instance, FIFO

KV is sent while the prompt is computed, so the links take a prompt from the beginning of its prefill on: where they are not
used up they add nothing.

A controller is asked every interval what counts it wants. Instances cost from their creation to their end, cold start
and drain included. Nothing is random: the same trace gives the same outcome.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.instance import AHEAD_S, DECODE, DRAINING, GONE, PREFILL, READY, STARTING, SimulatedInstance
from xpyd_operator.simulation.outcome import Controller, ControllerLook, Mark, Pair, Run
from xpyd_operator.simulation.trace import Trace
from xpyd_operator.simulation.window import FiguresWindow

SAMPLE_S = 5.0
"""Between two looks at what instances do, as the operator asks routers: on average, since agents beat whenever they like
and traces have their arrivals at full seconds."""
LATE_S = 3.0
"""A controller is asked at the end of its interval, up to so much later."""
TAIL_S = 900.0
"""After the last arrival the fleet runs on so long at most; what is not answered then counts as missed."""
_HANDED, _END, _BORN, _SAMPLE, _ASK, _CARRIED = 0, 1, 2, 3, 4, 5


class World:
    """One replay."""

    def __init__(self, trace: Trace, model: EngineModel, start: Pair, controller: Controller) -> None:
        self.run = Run(trace)
        self._trace, self._model, self._controller = trace, model, controller
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = self._samples = 0
        self._asks, self._asked_at = 1, 0.0
        self._fleet: list[SimulatedInstance] = []
        self._live: list[SimulatedInstance] = []
        self._ready: tuple[list[SimulatedInstance], list[SimulatedInstance]] = ([], [])
        self._queue: deque[int] = deque()
        self._parked: deque[tuple[int, int]] = deque()
        """Requests and their tokens whose KV is there while no decode instance serves."""
        self._first = [0.0] * len(trace)
        self.wanted = start
        self._window = FiguresWindow()
        for role in (PREFILL, DECODE):
            for _ in range(start[role]):
                made = self._make(role, 0.0)
                made.state = READY
                self._ready[role].append(made)

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
                now = trace[index].at
                self._window.arrivals += 1
                self._window.arrived += trace[index].prompt
                self._queue.append(index)
                index += 1
                self._dispatch(now)
                continue
            now, _, kind, what, version = heapq.heappop(events)
            if now > end:
                break
            if now > last and kind in (_SAMPLE, _ASK):
                continue
            if kind == _HANDED:
                self._handed(now, what, version)
            elif kind == _END:
                self._end(now, self._fleet[what], version)
            elif kind == _CARRIED:
                self._carried(now, what, self._fleet[version])
            elif kind == _BORN:
                self._born(now, self._fleet[what], version)
            elif kind == _SAMPLE:
                self._sample()
                self._samples += 1
                self._at(self._samples * SAMPLE_S + SAMPLE_S * (0.5 + _golden(self._samples)), _SAMPLE)
            else:
                self._ask(now)
                self._asks += 1
                self._at(self._asks * self._controller.interval_s + LATE_S * _golden(self._asks), _ASK)
        run.instance_s = sum(max(0.0, min(each.gone, last) - each.born) for each in self._fleet)
        run.ends_at = last
        return run

    # ---- requests

    def _dispatch(self, now: float) -> None:
        queue, ready = self._queue, self._ready[PREFILL]
        if not ready:
            if self.wanted[0] == 0 and not any(PREFILL in (each.role, each.to) for each in self._live):
                while queue:  # decode alone: no KV comes from anywhere
                    self._first[queue[0]] = now
                    self._to_decode(now, queue.popleft(), 0, (now, now))
            return
        while queue:
            best = ready[0]
            for each in ready:
                if each.free_at < best.free_at:
                    best = each
            if best.free_at - now > AHEAD_S:
                return
            request = queue.popleft()
            done = best.prefill(now, self._trace[request].prompt)
            self._at(done, _HANDED, request, best.number)

    def _handed(self, now: float, request: int, index: int) -> None:
        instance = self._fleet[index]
        instance.count -= 1
        self._first[request] = now
        prompt = self._trace[request].prompt
        begins = now - self._model.handover_s(prompt) - self._model.prefill_s(prompt)
        sent = instance.carry(prompt, begins)
        if instance.state == DRAINING and not instance.count:
            self._leave(now, instance)
        self._to_decode(now, request, prompt, (begins, sent))
        self._dispatch(now)

    def _to_decode(self, now: float, request: int, tokens: int, sent: tuple[float, float]) -> None:
        """With so many tokens of KV; ``sent``: when these began to come, and when they are out of the prefill instance."""
        ready = self._ready[DECODE]
        if not ready:
            self._parked.append((request, tokens))
            return
        best = ready[0]
        for each in ready:
            if each.count < best.count:
                best = each
        at = max(sent[1], best.expect(tokens, sent[0]))
        if at > now:
            self._at(at, _CARRIED, request, best.number)
        else:
            self._carried(now, request, best)

    def _carried(self, now: float, request: int, instance: SimulatedInstance) -> None:
        _, prompt, output = self._trace[request]
        self._note_first(instance.receive(now, request, prompt, output))
        self._plan_end(instance)

    def _note_first(self, entered: list[tuple[int, float]]) -> None:
        for request, at in entered:
            self._window.handover += at - self._first[request]
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
        for request in over:
            _, prompt, output = self._trace[request]
            tpot = (now - self._first[request]) / (output - 1) if output > 1 else 0.0
            self.run.tpot[request] = tpot = max(0.0, tpot)
            self._window.over(prompt, output, tpot)
        self._note_first(entered)
        self._plan_end(instance)
        if instance.state == DRAINING and not instance.count:
            self._leave(now, instance)

    # ---- instances

    def _make(self, role: int, now: float) -> SimulatedInstance:
        made = SimulatedInstance(self._model, role, now, len(self._fleet))
        self._fleet.append(made)
        self._live.append(made)
        return made

    def _born(self, now: float, instance: SimulatedInstance, role: int) -> None:
        if instance.state != STARTING:
            return
        instance.begin(role, READY, now)
        self._ready[role].append(instance)
        if role == DECODE:
            while self._parked:
                self._to_decode(now, *self._parked.popleft(), (now, now))
        else:
            self._dispatch(now)

    def _leave(self, now: float, instance: SimulatedInstance) -> None:
        if instance.to >= 0:
            instance.state, instance.role = STARTING, instance.to
            instance.version += 1
            self._at(now + self._model.switch, _BORN, instance.number, instance.to)
        else:
            instance.state, instance.gone = GONE, now
            self._live.remove(instance)

    def scale(self, now: float, wanted: Pair) -> None:
        """Make what is there what is wanted: switch, then add and remove."""
        have = [0, 0]
        for each in self._live:
            if each.state != DRAINING:
                have[each.role] += 1
            elif each.to >= 0:
                have[each.to] += 1
        more = [wanted[role] - have[role] for role in (0, 1)]
        if self._controller.switching:
            for to in (0, 1):
                while more[to] > 0 and more[1 - to] < 0 and self._switch(now, 1 - to, to):
                    more[to] -= 1
                    more[1 - to] += 1
        for role in (0, 1):
            for _ in range(more[role]):
                made = self._make(role, now)
                self._at(now + self._model.cold_start, _BORN, made.number, role)
                self.run.added += 1
            for _ in range(-more[role]):
                self._remove(now, role)
        if wanted != self.wanted:
            self.run.changes.append((now, self.wanted, wanted))
        self.wanted = wanted

    def _switch(self, now: float, role: int, to: int) -> bool:
        ready = self._ready[role]
        if not ready:
            return False
        one = min(ready, key=lambda each: each.count)
        self.run.switches += 1
        self._drain(now, one, to)
        return True

    def _remove(self, now: float, role: int) -> None:
        starting = [each for each in self._live if each.state == STARTING and each.role == role]
        ready = self._ready[role]
        if not starting and not ready:
            return
        self.run.removed += 1
        if starting:
            starting[-1].state, starting[-1].gone = GONE, now
            self._live.remove(starting[-1])
            return
        self._drain(now, min(ready, key=lambda each: each.count), -1)

    def _drain(self, now: float, instance: SimulatedInstance, to: int) -> None:
        self._ready[instance.role].remove(instance)
        instance.state, instance.to = DRAINING, to
        if not instance.count:
            self._leave(now, instance)

    # ---- what is observed

    def _sample(self) -> None:
        window = self._window
        window.samples += 1
        for each in self._live:
            if each.count:
                window.busy[each.role] += 1
            if each.role == DECODE:
                window.running += len(each.batch)
                window.kv += each.kv / self._model.kv_tokens
            else:
                window.prefilling += each.count

    def _ask(self, now: float) -> None:
        ready = (len(self._ready[PREFILL]), len(self._ready[DECODE]))
        in_prefill = len(self._queue) + sum(each.count for each in self._live if each.role == PREFILL)
        in_decode = len(self._parked) + sum(each.count for each in self._live if each.role == DECODE)
        waits = len(self._queue) + sum(max(0, each.count - 1) for each in self._live if each.role == PREFILL)
        parked = len(self._parked) + sum(each.arriving + len(each.waiting) for each in self._live if each.role == DECODE)
        figures = self._window.figures(now - self._asked_at, ready, waits, parked)
        self._asked_at = now
        self._window = FiguresWindow()
        wanted = self._controller.want(ControllerLook(now, figures, self.wanted, (in_prefill, in_decode)))
        if wanted != self.wanted:
            self.scale(now, wanted)
        self.run.marks.append(Mark(now, *wanted, *ready, waits))

    def _at(self, at: float, kind: int, what: int = 0, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, what, version))


def _golden(number: int) -> float:
    """Evenly spread from 0 to 1, the same each time."""
    return number * 0.6180339887498949 % 1.0
