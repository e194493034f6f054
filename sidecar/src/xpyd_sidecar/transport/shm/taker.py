"""Decode's side of both links within a host: reads what is offered as soon as there is room for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from xpyd_sidecar.kv import bodies
from xpyd_sidecar.transport.link import READ, OfferedPiece, PieceOwner, PieceTaker, Session, Unreadable
from xpyd_sidecar.transport.shm.arena import ArenaReader
from xpyd_sidecar.transport.shm.process_vm import ProcessReader

OFFERS_MOST: Final = 64
"""That wait for room. Prefill has far fewer on offer: 8, or one for each slot of an arena."""


class ReadingTaker(PieceTaker):
    """Of one session. Once something could not be read, nothing more is tried."""

    def __init__(self, session: Session, wanted: PieceOwner, reader: ProcessReader | ArenaReader,
                 unread: Callable[[str], bodies.Taken]) -> None:
        """``unread``: what to answer where prefill's memory cannot be read, which is told why."""
        super().__init__(session, wanted, 0, OFFERS_MOST)
        self.name = reader.name
        self._reader = reader
        self._answer_unread = unread
        self._unread = ""

    def _pump(self) -> None:
        while self._offers:
            answer = self._take(self._offers[0])
            if answer is None:
                return  # ``resume`` goes on
            self._taken(answer)

    def _take(self, one: OfferedPiece) -> bodies.Taken | None:
        """Read it, if it is wanted. What to answer; None: nothing yet, since no memory is free for it."""
        if not self._wanted.wants(one.header, one.offer, self.piece):
            return READ
        try:
            if not self._unread and not self._wanted.place(one.header, one.offer, partial(self._reader.read, one.offer)):
                return None
        except Unreadable as error:
            self._unread = str(error)
        if self._unread:
            return self._answer_unread(self._unread)
        self.session.spend(one.offer.size)
        return READ

    def close(self) -> None:
        """The session has ended, or another link is used."""
        self._offers.clear()
        self._reader.close()
