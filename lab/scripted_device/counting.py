"""What happens in one engine process, counted: bytes, frames, wake-ups, naps, launches; and processor time by thread.

``Counters`` is a dictionary of numbers; hooks add to it. ``watch`` puts the hooks under the connector's loops, connections
and naps. A prompt's share is the difference of two ``taken``.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import zmq

from xpyd_sidecar.kv import messages
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.session.control_connection import ControlConnection
from xpyd_sidecar.threads import idle_polling
from xpyd_sidecar.threads.commands import CommandThread

TASKS = Path("/proc/self/task")
ENGINE = "engine"
"""The name of the thread that runs the core's busy loop."""
MOMENTS = ("began", "ended")
BY_TIME = ("frames PING", "frames GOES_ON", "control Ping", "control Pong")
"""Messages that come by the clock, whatever is handed over."""


class Counters:
    """Of one process. Each name is added to by one thread, or rarely."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._spans: dict[str, tuple[float, float]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """So much more."""
        self._counts[name] += amount  # type: ignore[assignment]  # seconds, too

    def add_here(self, what: str, amount: float = 1) -> None:
        """So much more of something of the calling thread."""
        self.add(f"{what} {threading.current_thread().name}", amount)

    def span(self, name: str, began: float, ended: float) -> None:
        """Something was under way; with what was before it since the last ``anew`` it is one span."""
        first, last = self._spans.get(name, (began, ended))
        self._spans[name] = min(first, began), max(last, ended)

    def anew(self) -> None:
        """Spans begin anew."""
        self._spans = {}

    def taken(self) -> dict[str, float]:
        """All counts now, the processor time of each thread (``cpu NAME``, seconds), and of each span when it began and
        ended (``began NAME``, ``ended NAME``, by the monotonic clock).
        """
        spans = self._spans.copy()
        moments = {f"{what} {name}": at for name, span in spans.items() for what, at in zip(MOMENTS, span, strict=True)}
        return {**self._counts.copy(), **processor_s(), **moments}


def processor_s() -> dict[str, float]:
    """Seconds of processor time by thread of Python's that lives, from the scheduler's own account."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        try:
            ran = (TASKS / str(thread.native_id) / "schedstat").read_text().split()[0]
        except OSError:  # it has just ended
            continue
        found[f"cpu {thread.name}"] = int(ran) / 1e9
    return found


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What has come between two ``taken``; what has not changed is left out, and moments are those of the second."""
    return {name: value if name.startswith(MOMENTS) else value - before.get(name, 0) for name, value in after.items()
            if value != before.get(name, 0)}


def handed_over(counts: Mapping[str, float]) -> dict[str, float]:
    """Of a ``taken``, what moves while KV is handed over, and rests when that has ended."""
    return {name: value for name, value in counts.items() if name.startswith(("frames ", "control ", "calls "))
            and name not in BY_TIME}


def watch(counters: Counters) -> None:
    """Count messages that leave, wake-ups of threads that serve sockets or wait for copies, and naps of the engine's."""
    selectors.EpollSelector = _counted_selector(counters)  # type: ignore[misc]
    _before(ControlConnection, "send", lambda _, kind, *__: counters.add(f"frames {kind.name}"))
    pack = messages.pack

    def packed(message: Any) -> tuple[bytes, bytes]:
        counters.add(f"control {type(message).__name__}")
        return pack(message)

    messages.pack = packed
    poll = zmq.Poller.poll

    def polled(self: Any, timeout: Any = None) -> Any:
        found = poll(self, timeout)
        if found:
            counters.add_here("wakes")
        return found

    zmq.Poller.poll = polled  # type: ignore[method-assign]
    _before(CommandThread, "make_calls", lambda *_: counters.add_here("wakes"))
    _after(idle_polling.Inbox, "nap", lambda _: counters.add_here("naps"))
    polling = idle_polling.IdlePolling.step

    @wraps(polling)
    def step(self: Any, **how: bool) -> bool:
        calm = polling(self, **how)
        if calm and not how["loading"]:
            counters.add_here("naps")
        return calm

    idle_polling.IdlePolling.step = step  # type: ignore[method-assign]
    run = Completions.add

    @wraps(run)
    def add(self: Completions, mark: Any, call: Callable[[], None]) -> None:
        def counted() -> None:
            if threading.current_thread() is self.thread:  # a mark that has passed wakes nobody
                counters.add_here("wakes")
            call()
        run(self, mark, counted)

    Completions.add = add  # type: ignore[method-assign]


def _counted_selector(counters: Counters) -> type[selectors.EpollSelector]:
    class CountedSelector(selectors.EpollSelector):
        """Each return is a wake-up of its thread, unless it looks at the time alone."""

        def select(self, timeout: float | None = None) -> Any:
            found = super().select(timeout)
            if found:
                counters.add_here("wakes")
            return found

    return CountedSelector


def _before(kind: type, name: str, note: Callable[..., None]) -> None:
    plain = getattr(kind, name)

    @wraps(plain)
    def noted(*args: Any, **more: Any) -> Any:
        note(*args)
        return plain(*args, **more)

    setattr(kind, name, noted)


def _after(kind: type, name: str, note: Callable[[float], None]) -> None:
    plain = getattr(kind, name)

    @wraps(plain)
    def noted(*args: Any, **more: Any) -> Any:
        began = time.monotonic()
        found = plain(*args, **more)
        note(time.monotonic() - began)
        return found

    setattr(kind, name, noted)
