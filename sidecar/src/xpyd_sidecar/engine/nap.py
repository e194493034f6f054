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

NAP_S: Final = 0.05
"""Longest nap. A request that comes ends it (``compat.on_new_request``); an abort, or a deadline, may be seen so late."""
LOADING_NAP_S: Final = 0.01
"""How late a request may be seen while blocks come: the worker sleeps, and what the engine has to read does not wake it."""
SENDING_S: Final = 0.05
"""How long copies that wait to leave keep an engine awake. A decode that lives takes them sooner; one that is stopped or
dead holds them until the lease ends.
"""
SENDING_NAP_S: Final = 0.01
"""As ``NAP_S``, where copies wait to leave: how late the blocks of those that have left may be free for others."""
LOOK_S: Final = 0.01
"""How long a process looks for the next message without a pause before it waits for a notice, where it may: longer than the
time between two steps of an engine that has work.
"""


class Nap:
    """Pauses of the thread beside the scheduler. What a peer says, and a request that comes, ends one at once.

    ``stages`` of a pipeline: each idle step takes back one that was begun before. After as many of them nobody waits for an
    answer that a nap would delay.
    """

    def __init__(self, stages: int = 1) -> None:
        self._stages = stages
        self._idle = 0
        """Steps without anything to do since the latest one that had something."""
        self._since = 0.0
        """When the first of them was planned."""
        self._woken = threading.Event()
        self._looks = False
        """A nap was ended: vLLM's thread has one step to read what came."""

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
            self._idle = 0
            return False
        now = time.monotonic()
        self._idle += 1
        if self._idle == 1:
            self._since = now
        if self._idle <= self._stages:
            # No more than these: what is waited for ends a nap at once, and awake, at the beginning of a wait and of a
            # load, an engine takes a processor of a small host from prefill.
            return False
        if sending and now - self._since < SENDING_S:
            return False
        if loading or self._looks:
            self._looks = False
            return True
        self._looks = self._woken.wait(SENDING_NAP_S if sending else NAP_S)
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
