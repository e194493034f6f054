"""Mode put: a prefill step ends when its KV has left this process, or when it has waited long enough.

A transfer that was late goes on as put_async, and so do, for a while, those for the same decode instance: what is dead or
stuck costs one wait per ``again_s``, whatever the number of its transfers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.kv.keys import Key, Recent
from xpyd_sidecar.kv.offers import Push
from xpyd_sidecar.memory.marks import NOW, CopyMark

FORWARD_S: Final = 300.0
"""The longest that a device may take for a step: vLLM's own limit for one."""


class Tally:
    """Copies that have not been freed yet; safe across threads."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def increment(self) -> None:
        """Count one more copy."""
        with self._changed:
            self._count += 1

    def decrement(self) -> None:
        """Count one copy less: it was freed."""
        with self._changed:
            self._count -= 1
            if not self._count:
                self._changed.notify_all()

    def wait_none(self, seconds: float) -> bool:
        """Wait until none is left, that long at most. Whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, seconds)


class PutMode:
    """What the engine's thread waits for at the end of a step."""

    def __init__(self, wait_s: float, again_s: float) -> None:
        self._wait_s = wait_s
        self._again_s = again_s
        self._tallies: dict[Key, Tally] = {}
        self._late: Recent[Key, None] = Recent()
        self._slow: Recent[str, float] = Recent()
        self._mark: CopyMark = NOW

    def tally(self, key: Key) -> Callable[[], None]:
        """One copy of a transfer more, in this step. What to call when it is freed."""
        tally = self._tallies.setdefault(key, Tally())
        tally.increment()
        return tally.decrement

    def on_copies_enqueued(self, mark: CopyMark) -> None:
        """The copies of this step are complete when it passes: a device may not have begun the step yet."""
        self._mark = mark

    def wait_left(self, pushes: Sequence[Push]) -> dict[str, float]:
        """Wait for the copies of this step. Returns by metric name what to add to its counter."""
        tallies, self._tallies = self._tallies, {}
        mark, self._mark = self._mark, NOW
        began = time.monotonic()
        while tallies and not mark.wait(1.0):
            if time.monotonic() - began > FORWARD_S:
                raise TimeoutError(f"the copies of a step are not complete {FORWARD_S:.0f} s after it was enqueued")
        began = time.monotonic()
        end = began + self._wait_s
        counts: dict[str, float] = {}
        for push in pushes:
            tally = tallies.get(push.key)
            if tally is None or push.key in self._late or (self._slow.get(push.holder) or 0.0) > began:
                continue
            if not tally.wait_none(max(0.0, end - time.monotonic())):
                self._late.put(push.key, None)
                self._slow.put(push.holder, time.monotonic() + self._again_s)
                counts[metrics.PUT_LATE] = counts.get(metrics.PUT_LATE, 0) + 1
        if tallies:
            counts[metrics.PUT_WAIT_SECONDS] = time.monotonic() - began
        return counts
