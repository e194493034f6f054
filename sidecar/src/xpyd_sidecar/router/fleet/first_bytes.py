"""How long engines take until they give the first byte, and from when on one is silent for too long. Pure.

    bound = max(FLOOR_S, FACTOR · q · (work + BASE))        work: tokens of its prompt, and of those that wait before it
                                                            q: SHARE-quantile of seconds / (work + BASE)

over the last ``KEPT`` first bytes of all instances, streams and prefill legs alone: a whole answer has no first byte that
could be told from its end. ``BASE`` tokens stand for what does not grow with a prompt. While fewer than ``LEAST`` are
known an engine may still compile, and q is ``UNKNOWN``.
"""

from __future__ import annotations

from collections import deque
from typing import Final

FLOOR_S: Final = 4.0
FACTOR: Final = 4.0
BASE: Final = 1024
KEPT: Final = 128
LEAST: Final = 3
SHARE: Final = 0.95
UNKNOWN: Final = 0.01
"""Seconds for a token: a CPU, while nothing is known."""
PAUSE_S: Final = 10.0
"""A stream that has begun may pause for so much longer: a step with another one's prompt in it takes its time."""


class FirstBytes:
    """Of one router."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=KEPT)
        """Seconds for a token, and tokens of the prompt."""
        self._slow = UNKNOWN
        self._stale = False

    def add(self, seconds: float, tokens: int) -> None:
        """A leg had its first byte after so long. ``tokens``: about as many as its prompt has."""
        self._samples.append((seconds / (tokens + BASE), tokens))
        self._stale = True

    def bound_s(self, tokens: int) -> float:
        """After how long without a byte a leg is silent. ``tokens``: of its prompt, and of what waits before it."""
        if self._stale and len(self._samples) >= LEAST:
            found = sorted(each for each, _ in self._samples)
            self._slow = found[int(SHARE * (len(found) - 1))]
            self._stale = False
        return max(FLOOR_S, FACTOR * self._slow * (tokens + BASE))

    @property
    def usual_tokens(self) -> int:
        """Tokens of a prompt, on average."""
        return sum(tokens for _, tokens in self._samples) // len(self._samples) if self._samples else 0
