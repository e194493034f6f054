"""One engine that works as the simulation's instance does, by a clock that runs: what ``World`` does with events is done
here with timers.

    prefill    one prompt after the other: ``Core.prefill`` says when each begins and is over
    decode     ``admit`` (its KV is here) or ``compute`` (it has none) ──▶ told(tokens) … told(tokens, last)

A timer that is late changes nothing: what ended in the meantime is taken at the times at which it ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.instance import READY, Entered, SimulatedInstance

TICK_S = 0.1
"""Between two looks at how far streams have got: so many tokens as came meanwhile go out as one event."""
Told = Callable[[int, bool], None]
"""Hears how many more tokens of an answer there are, and whether these are the last."""


@dataclass
class _Stream:
    output: int
    told: Told
    given: int = 0


class WatchedInstance(SimulatedInstance):
    """One that says how far each request of its batch is."""

    __slots__ = ()

    def left(self, now: float) -> list[tuple[int, float]]:
        """Requests, and the steps that each has before it."""
        self._advance(now)
        return [(request, ends - self.steps) for ends, request, _ in self.batch]


class Core:
    """See the module. Its loop is the running one."""

    def __init__(self, model: EngineModel, role: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.instance = WatchedInstance(model, role, self._loop.time(), 0)
        self.instance.begin(role, READY, self._loop.time())
        self._streams: dict[int, _Stream] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._prompts: list[tuple[float, int]] = []
        """Prefill: when each prompt is over, and its tokens."""
        self.computed = 0
        """Tokens of prompts, since its start."""

    def now(self) -> float:
        """Seconds."""
        return self._loop.time()

    def prefill(self, tokens: int) -> tuple[float, float]:
        """Queue a prompt; when it is begun, and when it is over."""
        begins, through = self.instance.prefill(self.now(), tokens)
        over = through - self.instance.model.handover_s(tokens)
        self._prompts.append((over, tokens))
        self._loop.call_at(over, self._prefilled, tokens)
        return begins, over

    def _prefilled(self, tokens: int) -> None:
        self.instance.count -= 1
        self.computed += tokens
        self._prompts.pop(0)

    @property
    def queued(self) -> int:
        """Tokens of prompts that are not computed."""
        return sum(tokens for _, tokens in self._prompts) + sum(
            each.tokens - each.done for each in self.instance.prompts)

    def admit(self, tokens: int, output: int, told: Told) -> int:
        """A request whose KV is here; its number."""
        number = self._begin(output, told)
        self._note(self.instance.admit(self.now(), number, tokens, output))
        self._plan()
        return number

    def compute(self, tokens: int, output: int, told: Told) -> int:
        """A request whose prompt is computed here; its number."""
        number = self._begin(output, told)
        self.computed += tokens
        self.instance.compute(self.now(), number, tokens, output)
        self._plan()
        return number

    def forget(self, number: int) -> None:
        """Nobody listens to it any more. It goes on in the batch to its end."""
        self._streams.pop(number, None)

    def stop(self) -> None:
        """It dies: nobody hears of it again."""
        self._streams.clear()
        for timer in (self._timer, self._tick):
            if timer is not None:
                timer.cancel()

    def _begin(self, output: int, told: Told) -> int:
        self._settle()
        self._number += 1
        self._streams[self._number] = _Stream(output, told)
        if self._tick is None:
            self._tick = self._loop.call_later(TICK_S, self._look)
        return self._number

    def _note(self, entered: Entered) -> None:
        for number, at in entered:
            self._loop.call_at(at, self._give, number, 1)

    def _settle(self) -> None:
        """All that has ended by now."""
        now = self.now()
        while (at := self.instance.next_end()) <= now:
            over, entered = self.instance.ends(at)
            self._note(entered)
            for number in over:
                self._give(number, math.inf)

    def _plan(self) -> None:
        self._settle()
        if self._timer is not None:
            self._timer.cancel()
        at = self.instance.next_end()
        self._timer = self._loop.call_at(at, self._plan) if at < math.inf else None

    def _give(self, number: int, upto: float) -> None:
        """Tell of its tokens up to so many; infinite: it is through."""
        stream = self._streams.get(number)
        if stream is None:
            return
        last = upto >= stream.output
        if last:
            del self._streams[number]
        more = (stream.output if last else int(upto)) - stream.given
        if more > 0:
            stream.given += more
            stream.told(more, last)

    def _look(self) -> None:
        self._settle()
        for number, left in self.instance.left(self.now()):
            stream = self._streams.get(number)
            if stream is not None and stream.given:
                self._give(number, min(stream.output - 1, stream.output - math.ceil(left)))
        self._tick = self._loop.call_later(TICK_S, self._look) if self._streams else None
