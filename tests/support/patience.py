"""How long an engine may take on a machine that is full.

Beside 70 busy processes everything takes thirty times as long, and nothing is wrong. So what counts is the time in which
the engine was not kept waiting for a processor: one that waits for a peer, or for itself, is not.

    patience = Patience(engine, 90.0)
    while not done():
        if patience.over(): raise …(patience.told())
"""

from __future__ import annotations

import time
from typing import Final

from engines import Engine
from processes import kept_waiting_s, processor_s

MOST_S: Final = 900.0
"""However full the machine is."""


class Patience:
    """With an engine, from now on."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._engine = engine
        self._seconds = seconds
        self._began = self._now()

    def _now(self) -> tuple[float, float, float]:
        pids = self._engine.group.pids()
        return time.monotonic(), kept_waiting_s(pids), processor_s(pids)

    def _since(self) -> tuple[float, float, float]:
        took, kept, computed = (max(0.0, now - then) for now, then in zip(self._now(), self._began, strict=True))
        return took, kept, computed

    def over(self) -> bool:
        """Whether it has had its seconds."""
        took, kept, _ = self._since()
        return took - kept > self._seconds or took > MOST_S

    def told(self) -> str:
        """In words."""
        took, kept, computed = self._since()
        return f"{took:.0f} s, of which it computed for {computed:.0f} s and was kept waiting for {kept:.0f} s"
