"""When an engine that only waits for KV looks less often.

vLLM steps a thousand times a second while a request waits for KV, and its workers look for the next step without a pause
meanwhile. On a host that engines share, that is time another's prefill computes in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final, TypeVar

_T = TypeVar("_T")

NAP_S: Final = 0.01
"""Half of how late a request that comes meanwhile may be seen: the engine's thread reads none while it naps, nor while it
waits for a worker that naps after it.
"""
SENDING_S: Final = 0.05
"""How long copies that wait to leave keep an engine awake. A decode that lives takes them sooner; one that is stopped or
dead holds them until the lease ends.
"""
SENDING_NAP_S: Final = 0.005
"""As ``NAP_S``, where copies wait to leave: a prompt that comes meanwhile is what such an engine is for."""
LOOK_S: Final = 0.01
"""How long a process looks for the next message without a pause before it waits for a notice, where it may: longer than the
time between two steps of an engine that has work.
"""


class IdlePolling:
    """Pauses of the thread beside the scheduler. What a peer says ends one at once."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When the first step without anything to do was planned; None: the latest one had something."""
        self._woken = threading.Event()

    def wake(self) -> None:
        """There may be something to do; called on any thread.

        It also ends the next nap, if none is taken now: what has come since the step began has not been looked at.
        """
        self._woken.set()

    def step(self, *, idle: bool, loading: bool, sending: bool) -> bool:
        """A step was planned. Whether this and those before it were ``idle``; then it may last, and its worker be calm.

        Sleeps, unless blocks are ``loading``: what ends that wait comes to the worker, which waits for it (``Inbox``).
        ``sending``: copies wait to leave.
        """
        if not idle:
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            # No more than this one: what is waited for ends a nap at once, and awake, at the beginning of a wait and of a
            # load, an engine takes a processor of a small host from prefill.
            self._since = now
            return False
        if sending and now - self._since < SENDING_S:
            return False
        if not loading:
            self._woken.wait(SENDING_NAP_S if sending else NAP_S)
            self._woken.clear()
        return True


class Inbox(deque[_T]):
    """What other threads have for a worker; it can wait for the first of it."""

    def __init__(self) -> None:
        super().__init__()
        self._filled = threading.Event()

    def append(self, item: _T) -> None:
        """Put something in; called on any thread."""
        super().append(item)
        self._filled.set()

    def nap(self, seconds: float) -> None:
        """Sleep until there is something, or for so long."""
        if not self:
            self._filled.wait(seconds)
        self._filled.clear()  # what came before is in, and is looked at next
