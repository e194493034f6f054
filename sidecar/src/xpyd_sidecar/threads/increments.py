"""What one thread counts and another one takes; as large as there are names, however long nobody takes it."""

from __future__ import annotations

import threading


class Increments:
    """Increments by name, since they were taken last. Safe across threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Increase one counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def __getitem__(self, name: str) -> float:
        """As it is now."""
        with self._lock:
            return self._counts.get(name, 0)

    def take(self) -> dict[str, float]:
        """All of them, which begin at 0 again."""
        with self._lock:
            out, self._counts = self._counts, {}
            return out
