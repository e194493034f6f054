"""How long steps of a core take, and from when on the one that it does now hangs. No clock: time is given.

    patience = max(FLOOR_S, FACTOR · w · (tokens + BASE))      w: most seconds for each token (and ``BASE``) of a step, of
                                                               the last ``WINDOW`` to 2 · ``WINDOW`` steps

The first steps of a core compile, each for another shape: as long as fewer than ``KNOWN`` have ended, the patience is
``FIRST_S``. Steps may overlap: one that began while another was under way takes from the end of that one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

FLOOR_S: Final = 20.0
"""A core may do other things than steps for so long: load an adapter, reset its cache."""
FIRST_S: Final = 300.0
FACTOR: Final = 4.0
BASE: Final = 256
KNOWN: Final = 16
WINDOW: Final = 1024
MOST_OPEN: Final = 8
"""Steps under way; vLLM has two."""


class StepTimes:
    """Times of one core's steps. ``begins`` and ``ends`` are called by its thread; what others read are plain values."""

    def __init__(self) -> None:
        self.turns = 0
        """Steps that have begun, and those that have ended."""
        self.patience_s = FIRST_S
        self._ended = 0
        self._ended_at = 0.0
        self._open: deque[tuple[float, int]] = deque(maxlen=MOST_OPEN)
        self._worst = 0.0
        """Seconds for a token, of this window,"""
        self._worst_before = 0.0
        """and of the one before."""

    def begins(self, now: float, tokens: int) -> None:
        """A step of so many tokens begins."""
        self._open.append((now, tokens))
        self.turns += 1
        self._patience()

    def ends(self, now: float) -> None:
        """The oldest one that is under way has ended."""
        if not self._open:
            return  # it says what was counted, and no more
        began, tokens = self._open.popleft()
        took = now - max(began, self._ended_at)
        self._ended += 1
        self._ended_at = now
        if self._ended > KNOWN // 2:  # what compiled is no measure
            self._worst = max(self._worst, took / (tokens + BASE))
        if self._ended % WINDOW == 0:
            self._worst_before, self._worst = self._worst, 0.0
        self.turns += 1
        self._patience()

    def _patience(self) -> None:
        if self._ended < KNOWN:
            self.patience_s = FIRST_S
            return
        tokens = max((tokens for _, tokens in self._open), default=0)
        self.patience_s = max(FLOOR_S, FACTOR * max(self._worst, self._worst_before) * (tokens + BASE))
