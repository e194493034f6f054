"""Ranks that speak over the real links, without engines: the loop of an engine core in small."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from xpyd_sidecar.dp.rank import Rank
from xpyd_sidecar.engine.dp_plugin import meeting
from xpyd_sidecar.engine.dp_plugin.counters import Counters
from xpyd_sidecar.engine.dp_plugin.settings import StepSyncSettings
from xpyd_sidecar.engine.dp_plugin.steps import Steps


class Store:
    """torch's store, for threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                raise RuntimeError(f"timeout waiting for {keys}")


class Lockstep:
    """The collective of all ranks: forward n ends when every rank is in its own n-th."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)

    def forward(self) -> None:
        """Raises BrokenBarrierError after 20 s alone."""
        self._barrier.wait(20.0)

    @property
    def waiting(self) -> int:
        """Ranks that wait in a forward for others."""
        return self._barrier.n_waiting


class Core(threading.Thread):
    """A rank. ``work`` gets budgets of requests; ``None`` ends it."""

    def __init__(self, rank: int, size: int, store: Any, settings: StepSyncSettings, lockstep: Lockstep, *,
                 one_host: bool = True, here: str = "", versions: tuple[str, ...] = ("v",)) -> None:
        super().__init__(name=f"core-{rank}", daemon=True)
        self._site = meeting.Site(store, rank, size, "127.0.0.1", one_host, versions, here)
        self._settings = settings
        self.lockstep = lockstep
        self._wake: queue.Queue[int] = queue.Queue()
        self.steps: Steps | None = None
        self.error: Exception | None = None
        self.abandoned: Exception | None = None
        self.real = self.dummies = 0
        self.left = 0
        self.pauses = 0
        self.paused = False
        self.held = 0
        self.stopping = threading.Event()
        self._silent = False

    def ask(self, tokens: int) -> None:
        """A request for so many tokens; from any thread."""
        self._wake.put(tokens)

    def pause(self) -> None:
        """Ask for a pause; ``held`` counts those that hold."""
        self._wake.put(-1)

    def resume(self) -> None:
        """Go on."""
        self._wake.put(-2)

    def cut(self) -> None:
        """Fall silent for ever, and return when it has. Its sockets are closed by the thread that uses them."""
        self._wake.put(-3)
        self.join(20.0)
        if self.is_alive():
            raise TimeoutError

    def stop(self) -> None:
        """Leave when the others do."""
        self.stopping.set()
        self._wake.put(0)

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 (a test looks at it)
            self.error = error

    def _run(self) -> None:
        def abandon(error: Exception) -> None:
            self.abandoned = error

        def make(rank: Rank) -> Steps:
            return Steps(rank, lambda: self._wake.put(0), abandon, self._settings.timeout_s, Counters())

        steps = self.steps = meeting.meet(self._site, self._settings, make)
        try:
            while True:
                self._take(steps)
                if self._silent:
                    return
                steps.check()
                if self.left and not self.paused:
                    steps.begin(self.left)
                    self.lockstep.forward()
                    self.left -= 1
                    self.real += 1
                elif steps.state.is_behind:
                    steps.dummy()
                    self.lockstep.forward()
                    self.dummies += 1
                elif self.stopping.is_set() and not self.left and steps.may_leave():
                    return
        finally:
            if not self._silent:
                steps.close()

    def _take(self, steps: Steps) -> None:
        busy = bool(self.left and not self.paused) or steps.busy() or self.stopping.is_set()
        if not busy:
            steps.link.park(parked=True)
            if steps.idle() and self.pauses > self.held:
                self.held = self.pauses
            if not (self.left and not self.paused):
                self._handle(steps, self._wake.get())  # as vLLM's core does: it does not look again in between
            if self._silent:
                return
            steps.link.park(parked=False)
        while not self._wake.empty():
            self._handle(steps, self._wake.get())

    def _handle(self, steps: Steps, word: int) -> None:
        if word == -1:
            self.pauses += 1
            self.paused = True
            steps.pause()
        elif word == -2:
            self.paused = False
        elif word == -3:
            self._silent = True
            steps.link.close()
        else:
            self.left += word


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Raises TimeoutError."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.005)
