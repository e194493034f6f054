"""How an attempt failed, and why, in the two forms that are made where it is known.

    FailureReason("it closed the connection", "[Errno 104] Connection reset by peer")
                   └ said: clients, too        └ more: the log, and who has the admin token

What is ``said`` names instances at most: no addresses, and no words of the system or of an engine, which may hold some.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class FailureReason(msgspec.Struct, frozen=True):
    """One reason."""

    said: str
    more: str = ""

    @property
    def full(self) -> str:
        """Both."""
        return f"{self.said}: {self.more}" if self.more else self.said

    def of(self, who: str) -> FailureReason:
        """The same, behind the name of what failed."""
        return FailureReason(f"{who} failed: {self.said}", self.more)


class FailureKind(Enum):
    """How a leg failed."""

    REFUSED = "refused"
    """No connection; the engine never saw the leg."""
    LOST = "lost"
    """The connection broke, or ended before the answer was whole."""
    ABORTED = "aborted"
    """The engine said that it gave up: an error event, or finish reason ``abort``."""
    BROKEN = "broken"
    """The answer is not what HTTP or server-sent events allow."""
    LACKING = "lacking"
    """It was not tried: this process has no file, port or memory for a connection. Says nothing of the instance."""
    DIFFERS = "differs"
    """A stream that was to go on did not say again what the client has: it is another answer."""


GONE = frozenset({FailureKind.REFUSED, FailureKind.LOST})
"""The instance is not there any more, as far as a leg can tell."""
