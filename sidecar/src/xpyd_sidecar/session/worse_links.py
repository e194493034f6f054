"""What decode says of links that are worse than they could be, of the sessions that there are."""

from __future__ import annotations

from collections import Counter

from xpyd_sidecar.contract.pair_notes import MOST_LINKS
from xpyd_sidecar.session.decode_session import DecodeSession


class WorseLinks:
    """Counts the sessions of one rank whose link is worse than it could be.

    Used on the receiver's I/O thread, but for ``words``.
    """

    def __init__(self) -> None:
        self.words: tuple[str, ...] = ()
        """For people; replaced whole, so any thread may read it."""
        self._sessions = Counter[str]()
        """By words: how many sessions they are said of."""

    def on_session_open(self, session: DecodeSession) -> None:
        """Count a session whose link is chosen."""
        self._count(session, 1)

    def on_session_ended(self, session: DecodeSession) -> None:
        """Take a session that has ended out of the count; it may never have had a link."""
        self._count(session, -1)

    def _count(self, session: DecodeSession, change: int) -> None:
        if session.fetches is None or not session.refused:
            return
        words = f"blocks come over {session.fetches.name}: {'; '.join(session.refused)}"
        self._sessions[words] += change
        if not self._sessions[words]:
            del self._sessions[words]
        self.words = tuple(sorted(self._sessions)[:MOST_LINKS])
