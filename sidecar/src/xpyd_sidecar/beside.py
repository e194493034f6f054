"""What agent and router of one process tell each other."""

from __future__ import annotations

from collections.abc import Callable


class Draining:
    """Whether the agent drains its engine; the router beside it sends its clients elsewhere in the meantime."""

    def __init__(self) -> None:
        self.asked = False
        self._listeners: list[Callable[[bool], None]] = []

    def say(self, asked: bool) -> None:
        """The agent's side: a drain has begun, or was taken back."""
        self.asked = asked
        for listener in self._listeners:
            listener(asked)

    def listen(self, listener: Callable[[bool], None]) -> None:
        """The router's side: be told now and from now on."""
        self._listeners.append(listener)
        listener(self.asked)
