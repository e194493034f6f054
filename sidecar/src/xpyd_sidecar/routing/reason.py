"""Why an engine failed, in the two forms that are made where it is known.

    Reason("it closed the connection", "[Errno 104] Connection reset by peer")
            └ said: clients, too        └ more: the log, and who has the admin token

Belongs here: the value. What is ``said`` names instances at most: no addresses, and no words of the system or of an engine,
which may hold some.
"""

from __future__ import annotations

import msgspec


class Reason(msgspec.Struct, frozen=True):
    """One reason."""

    said: str
    more: str = ""

    @property
    def full(self) -> str:
        """Both."""
        return f"{self.said}: {self.more}" if self.more else self.said

    def of(self, who: str) -> Reason:
        """The same, behind the name of what failed."""
        return Reason(f"{who} failed: {self.said}", self.more)
