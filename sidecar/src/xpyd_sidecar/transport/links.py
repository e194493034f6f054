"""What the two sides of a session ask of a link, whatever moves the bytes.

A session has a control connection (``session.control_connection``) for who the peer is and what is told of each try, and
one link, which is chosen when it begins. A link moves bytes of prefill's store to where decode wants them, and nothing
else: what is fetched when, and into what, is decided for all links alike (``kv.fetching``).

    decode                                     prefill
    FetchLink.fetch(…)   ── the link's own way ──   ServeLink (nothing to do where decode reads memory by itself)
    owner.fetched | failed, once for each
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.errors import PeerError, ProtocolError
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.selection import PackedSpan, Piece
from xpyd_sidecar.kv.session_bodies import Able, LinkName, LinkWelcome
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.moves import Scatter


class Session(Protocol):
    """A session, as its link knows it. Used on its I/O thread, but for ``post``."""

    peer: str
    """Name and address, for messages."""

    def send(self, kind: FrameKind, body: msgspec.Struct | None = None, key: Key = NO_TRY) -> bytes:
        """Send a frame."""

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on its I/O thread; what it raises ends the session."""

    def close(self, error: PeerError) -> None:
        """End the session, once."""


class StoreReader(Protocol):
    """Copies out of one mapping of prefill's memory into device memory; used on the session's I/O thread."""

    def read(self, at: int, spans: Sequence[PackedSpan], done: Callable[[], None]) -> None:
        """Fill the range of the ring that begins at ``at``; ``done`` is called then, on any thread."""

    def close(self, closed: Callable[[], None]) -> None:
        """Let go of the mapping, which nothing reads any more; ``closed`` is called then, on any thread."""


class RingMemory(Protocol):
    """Both memories of ranges of decode's ring, for links that read into the device; used on the I/O thread."""

    def device(self, at: int, size: int) -> Any:
        """A range of the ring on the device, as a tensor of bytes; pieces lie in it as ``kv.selection.places`` says."""

    def host_places(self, batch: Sequence[Piece], at: int) -> Sequence[Scatter]:
        """Places of pieces in host memory, where bytes of that range are looked for once this was asked for; a row is
        what lies together in prefill's store.
        """


class FetchOrder(NamedTuple):
    """Bring the bytes of these pieces, each to its rows, or all of them to a range of the ring."""

    number: int
    key: Key
    manifest: int
    batch: tuple[Piece, ...]
    rows: Sequence[Scatter]
    gate: Gate | None
    """Of the blocks that the rows are; None: they are no blocks of the cache."""
    at: int | None = None
    """Where the range of the ring begins, if it is one. The rows are that range in host memory; for a link that
    ``reads_into_device`` there are none."""


class FetchOwner(Protocol):
    """Whose fetches they are. Each is answered once, also when its session has ended; called on the I/O thread."""

    def on_fetched(self, number: int, sums: NDArray[np.uint64]) -> None:
        """All bytes are here, and prefill vouched for them afterwards; ``sums``: of what has come into blocks."""

    def on_fetch_failed(self, number: int) -> None:
        """Nothing will come any more, and nothing writes into those rows."""


class FetchLink:
    """Decode's side of one session's link."""

    name: LinkName
    """Of what moves its bytes now, for metrics."""
    at_hand = False
    """What is fetched later costs no more than what is fetched now: nothing is fetched ahead unless prefill is short of
    memory.
    """
    reads_into_device = False
    """It takes orders with a range of the device's ring."""

    def fetch(self, order: FetchOrder) -> None:
        """Begin to bring bytes. Never waits, and answers nothing before it returns."""
        raise NotImplementedError

    def on_frame(self, frame: Frame) -> bool:
        """A frame of prefill's that may be for the link; whether it is.

        Raises:
            PeerError: it may not be said now, or not like that.
        """
        del frame
        return False

    def tick(self, now: float, timeout: float) -> None:
        """Time passes. ``timeout``: seconds of silence that are too long."""

    def fault(self) -> PeerError | None:
        """What the link has found wrong with the peer, if it has: it counts where the session ends for a lesser reason."""
        return None

    def close(self) -> None:
        """The session has ended: every fetch is answered, now or as soon as nothing writes any more."""
        raise NotImplementedError


class LinkTrial(Protocol):
    """Decode's choice of one session's link, while it is made."""

    able: Able
    """What prefill is told."""
    waits_for_us: bool
    """Whether it is this side that prefill waits for: then its silence says nothing."""

    def on_frame(self, frame: Frame) -> None:
        """WELCOME or SHARED.

        Raises:
            PeerError: it may not be said now, or there is no link for this peer.
        """

    def close(self) -> None:
        """The session has ended, or the link is chosen; again: nothing."""


class LinkFetcher(Protocol):
    """What a rank of decode can fetch over."""

    def begin(self, session: Session, chosen: Callable[[FetchLink, str], None]) -> LinkTrial:
        """Choose a session's link. ``chosen``: called once with it and with why it is not a better one.

        Raises:
            PeerError: there can be no session now.
        """


class LinkServer(Protocol):
    """What a rank of prefill has for one kind of link."""

    def serve(self, session: Session, able: Able) -> tuple[ServeLink, LinkWelcome] | str:
        """A session's link on this side, and what decode is told of it; or why there is none, in words.

        Raises:
            PeerError: there can be no session now.
        """


class NoLink:
    """What a rank of prefill has for a kind of link that it cannot have."""

    def __init__(self, reason: str) -> None:
        """``reason``: why, in words."""
        self._reason = reason

    def serve(self, session: Session, able: Able) -> tuple[ServeLink, LinkWelcome] | str:
        """Why there is none."""
        return self._reason


class ServeLink:
    """Prefill's side of one session's link."""

    name: str
    stripes = 0
    """Connections of its own that decode may open."""

    def hand_over(self, secret: bytes) -> None:
        """Decode would map memory, and has told the secret that was sent to its mailbox.

        Raises:
            PeerError: there is no such memory, or it has told another one.
        """
        del secret
        raise ProtocolError(self.name, "would map memory that was not shown")

    def on_told(self) -> None:
        """Decode has been told of bytes, and may fetch them from now on."""

    def on_frame(self, frame: Frame) -> bool:
        """A frame of decode's that may be for the link; whether it is.

        Raises:
            PeerError: it may not be said now, or not like that.
        """
        del frame
        return False

    def attach(self, sock: socket.socket, number: int, answer: bytes, keys: bytes) -> None:
        """A stripe of the session has come.

        Args:
            sock: of the stripe.
            number: of it, in its session.
            answer: what tells decode that it has come to the right one.
            keys: what follows is sealed under; empty: nothing is.

        Raises:
            PeerError: it may not have it.
            OSError: it has gone again.
        """
        del number, answer, keys
        sock.close()
        raise ProtocolError(self.name, "needs no stripes")

    @property
    def busy(self) -> bool:
        """Whether bytes are on their way that the peer has still to take."""
        return False

    def close(self) -> None:
        """The session has ended: of the store nothing is read for it any more but copies that it holds."""
        raise NotImplementedError
