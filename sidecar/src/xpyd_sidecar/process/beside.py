"""What agent and router of one process tell each other."""

from __future__ import annotations

from collections.abc import Callable


class Draining:
    """Whether the agent drains its engine; the router beside it sends its clients elsewhere in the meantime."""

    def __init__(self) -> None:
        self.asked = False
        self._listeners: list[Callable[[bool], None]] = []

    def announce(self, asked: bool) -> None:
        """Called by the agent: tell the router beside it that a drain has begun, or (``asked`` False) was taken back."""
        self.asked = asked
        for listener in self._listeners:
            listener(asked)

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Called by the router: ``listener`` gets ``asked`` now and whenever it changes."""
        self._listeners.append(listener)
        listener(self.asked)
