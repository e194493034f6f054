"""Shared memory as x86 shows it, for processes that are threads here and run one access at a time.

Each process has a store buffer: its stores become visible to others later, in order; it sees its own at once. Before every
access the process stops, and the test decides who goes on, whose oldest store becomes visible, and who dies. A dead
process does nothing more; what its buffer holds still becomes visible (the processor does not die). So the code under test
runs as it is, through every interleaving that the test draws.

    memory = Memory(64);  process = memory.process("writer", body);  …  memory.run(choose)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

_JOIN_S: Final = 10.0


class Died(BaseException):
    """Ends a process's thread where it was."""


class Stalled(AssertionError):
    """Every process sleeps: a wake-up was lost."""


class Process:
    """One process; the view of memory that is handed to the code under test: items are words."""

    def __init__(self, memory: Memory, name: str, body: Callable[[Process], None]) -> None:
        self.name = name
        self.alive = True
        self.asleep: int | None = None
        """The word it sleeps on."""
        self.error: BaseException | None = None
        self.stores: deque[tuple[int, int]] = deque()
        self._memory = memory
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._dying = False
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()
        self._stopped.acquire(timeout=_JOIN_S)

    def __getitem__(self, at: int) -> int:
        self._stop()
        for where, value in reversed(self.stores):
            if where == at:
                return value
        return self._memory.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._stop()
        self.stores.append((at, value))

    def fence(self) -> None:
        """Everything stored becomes visible."""
        self._stop()
        self.drain()

    def wait(self, word: int, value: int) -> None:
        """As the futex does: sleeps if the word has this value. A system call is a fence."""
        self._stop()
        self.drain()
        if self._memory.words[word] == value:
            self.asleep = word
            self._stop()

    def wake(self, word: int) -> None:
        """Wake whoever sleeps on the word."""
        self._stop()
        self.drain()
        for other in self._memory.processes:
            if other.asleep == word:
                other.asleep = None

    def drain(self) -> None:
        """The whole buffer becomes visible."""
        while self.stores:
            self.flush()

    def flush(self) -> None:
        """The oldest store becomes visible."""
        at, value = self.stores.popleft()
        self._memory.words[at] = value

    def step(self) -> None:
        """One access more."""
        self._go.release()
        assert self._stopped.acquire(timeout=_JOIN_S), f"{self.name} does not come back"

    def kill(self) -> None:
        """It does nothing more."""
        self._dying = True
        self.asleep = None
        self.step()

    def _stop(self) -> None:
        self._stopped.release()
        self._go.acquire()
        if self._dying:
            raise Died

    def _run(self, body: Callable[[Process], None]) -> None:
        try:
            self._stop()
            body(self)
        except Died:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again by the test's own thread)
            self.error = error
        self.alive = False
        self._stopped.release()


class Memory:
    """The words that all processes share."""

    def __init__(self, words: int) -> None:
        self.words = [0] * words
        self.processes: list[Process] = []

    def process(self, name: str, body: Callable[[Process], None]) -> Process:
        """Add one; it stops before its first access."""
        made = Process(self, name, body)
        self.processes.append(made)
        return made

    def run(self, choose: Callable[[int], int], mortal: Sequence[Process] = (), deaths: int = 0,
            on_death: Callable[[Process], None] = lambda _: None, steps: int = 200_000) -> None:
        """Let ``choose(n)`` (a number below n) pick every next step until all have ended.

        Raises:
            Stalled: those that live sleep, and no store is left that could become visible.
        """
        for _ in range(steps):
            for process in self.processes:
                if process.error is not None:
                    raise process.error
            awake = [process for process in self.processes if process.alive and process.asleep is None]
            buffered = [process for process in self.processes if process.stores]
            if not awake and not buffered:
                if any(process.alive for process in self.processes):
                    raise Stalled([process.name for process in self.processes if process.alive])
                return
            victims = [process for process in mortal if process.alive] if deaths else []
            pick = choose(4 * len(awake) + 2 * len(buffered) + len(victims))
            if pick < 4 * len(awake):
                awake[pick // 4].step()
            elif pick < 4 * len(awake) + 2 * len(buffered):
                buffered[(pick - 4 * len(awake)) // 2].flush()
            else:
                deaths -= 1
                victim = victims[pick - 4 * len(awake) - 2 * len(buffered)]
                victim.kill()
                on_death(victim)
        raise AssertionError(f"no end after {steps} steps")

    def end(self) -> None:
        """Kill what is left, so that no thread stays."""
        for process in self.processes:
            if process.alive:
                process.kill()
