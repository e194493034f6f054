"""When an engine that only waits looks less often.

vLLM steps a thousand times a second while a request waits for KV or a copy waits to leave, and its workers look for the
next step without a pause meanwhile. On a host that engines share, that is time another's prefill computes in.
"""

from __future__ import annotations

import threading
from typing import Final

NAP_S: Final = 0.005
"""How late a request that comes meanwhile may be seen: the engine's thread reads no requests in a nap."""
STEPS: Final = 20
"""Steps without anything to do before the first nap: transfers of milliseconds are waited for as vLLM does."""


class Nap:
    """Pauses of the engine's thread. What a peer says ends one at once."""

    def __init__(self) -> None:
        self._steps = 0
        self._woken = threading.Event()

    def wake(self) -> None:
        """There may be something to do; called on any thread.

        It also ends the next nap, if none is taken now: what has come since the step began has not been looked at.
        """
        self._woken.set()

    def step(self, *, idle: bool) -> bool:
        """A step was planned. Sleeps if it is ``idle`` and many before it were; whether it is one of those."""
        self._steps = self._steps + 1 if idle else 0
        if self._steps <= STEPS:
            return False
        self._woken.wait(NAP_S)
        self._woken.clear()
        return True
