"""Moments in the order of copies: an event of a device, or what is complete at once. Free of torch."""

from __future__ import annotations

from typing import Final, Protocol


class CopyMark(Protocol):
    """A moment in the order of copies."""

    def done(self) -> bool:
        """Whether every copy before it is complete; never waits."""

    def wait(self, seconds: float) -> bool:
        """Wait until they are, about that long at most (a device's own may take longer). Whether they are."""


class PassedMark:
    """A mark that has passed."""

    def done(self) -> bool:
        """Whether it has passed: always."""
        return True

    def wait(self, seconds: float) -> bool:
        """Returns at once."""
        return True


NOW: Final = PassedMark()
