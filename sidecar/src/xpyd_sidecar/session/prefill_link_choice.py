"""Prefill's half of the choice of a link, for one session (the exchange is drawn in ``link_choice``)."""

from __future__ import annotations

import logging

from xpyd_sidecar import resources
from xpyd_sidecar.errors import Incompatible, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.transport.link import BlockLink, Session
from xpyd_sidecar.transport.shm.prefill import SharedMemoryLink
from xpyd_sidecar.transport.tcp.link import TcpLink

logger = logging.getLogger(__name__)


class PrefillLinkChoice:
    """Which link it is. ``link`` is the one to use at any time; ``close`` ends it with the session.

    Every method raises Incompatible where transport is shm, nccl or rdma and does not work with this peer, and
    ProtocolError where decode may not say that now.
    """

    def __init__(self, me: LocalRank, session: Session) -> None:
        self.link: BlockLink = TcpLink(session)
        self.gpu: bodies.Gpu | None = None
        """What decode is told, where a group is possible."""
        self.memory: bodies.NixlMemory | None = None
        """What decode is told, where it may read over NIXL."""
        self.shared: bodies.ShmMemory | None = None
        """What decode is told, where it may map memory of this host."""
        self._me = me
        self._session = session
        self._choosing = True
        self._may: dict[str, BlockLink] = {"tcp": self.link}
        """What decode may choose."""

    def welcome(self, hello: bodies.DataHello) -> str:
        """What a decode may try is in ``gpu``, ``shared`` and ``memory`` then. Why there is nothing, or nothing better.

        Raises:
            PeerGone: as ``_unsent``.
        """
        ways = self._me.ways
        if hello.gpu is not None or ways.transport == "nccl":
            no = self._group(hello.gpu)
            if no:
                self._refuse_tcp(no)
            return no
        no = link_choice.apart(ways, hello.host) or self._share(hello.mailbox)
        if not no:
            return ""
        why = [no]
        if hello.nixl is not None or ways.reads is not None or ways.no_nixl:
            no = self._show(hello.nixl)
            if not no:
                return "; ".join(why) if ways.transport == "auto" and hello.host else ""
            why = [no] if ways.transport == "rdma" else [*why, no]
        reason = "; ".join(dict.fromkeys(why))
        self._refuse_tcp(reason)
        return reason

    def _group(self, theirs: bodies.Gpu | None) -> str:
        """Offer decode a group; or why not."""
        ours, grouping = self._me.ways.gpu, self._me.grouping
        no = link_choice.ungrouped(self._me.ways, theirs)
        if not no and theirs is not None and ours is not None and grouping is not None:
            self.gpu = ours
            self._may["nccl"] = grouping.link(self._session, min(theirs.piece, ours.piece))
        return no

    def _share(self, mailbox: str) -> str:
        """Show decode this side's memory; or why not."""
        if self._me.sharing is None:
            return "shm: prefill has no memory to share"
        try:
            link = self._me.sharing.link(self._session, mailbox, self._me.ways.folder)
        except ValueError as error:
            return f"shm: {error}"
        except OSError as error:
            return self._unsent(error)
        self._may["shm"], self.shared = link, link.shown()
        return ""

    def _show(self, theirs: bodies.NixlReader | None) -> str:
        """Show decode this side's memory; or why not."""
        reason = link_choice.unread(self._me.ways, theirs)
        if reason or theirs is None or self._me.reading is None:
            return reason or "nixl: not ready at prefill"
        link = self._me.reading.link(self._session, theirs)
        if link is None:
            return "nixl: too many sessions are open at prefill"
        self._may["nixl"], self.memory = link, link.shown()
        return ""

    def decided(self, choice: bodies.LinkChoice) -> None:
        """Decode says what it takes, or that it would see the memory."""
        if choice.way == "map":
            self._hand_over(choice.secret)
            return
        if not self._choosing:
            raise ProtocolError(self._session.peer, f"chose {choice.way} after {self.link.name}")
        if choice.way == "tcp":
            self._refuse_tcp(choice.reason)
        link = self._may.get(choice.way)
        if link is None:
            raise ProtocolError(self._session.peer, f"chose {choice.way}, which was not offered")
        self._choosing = False
        self.link = link
        for one in self._may.values():
            if one is not link:
                one.close()
        self._may = {}
        logger.info("xpyd: blocks for %s go over %s%s", self._session.peer, link.name,
                    f" ({choice.reason})" if choice.reason else "")

    def _hand_over(self, secret: bytes) -> None:
        """Send decode the descriptor of this side's memory."""
        link = self._may.get("shm")
        if not isinstance(link, SharedMemoryLink):
            raise ProtocolError(self._session.peer, "would map memory that was not shown")
        try:
            link.hand_over(secret)
            reason = ""
        except OSError as error:
            reason = self._unsent(error)
        self._session.say(FrameKind.SHARED, bodies.LinkChoice("shm", reason))

    def _unsent(self, error: OSError) -> str:
        """Why nothing could be sent to decode's mailbox.

        Raises:
            PeerGone: decode has left; or transport is shm, and it cannot be had now.
        """
        if self._session.left:
            raise PeerGone(self._session.peer, "closed the connection, and its mailbox with it") from None
        passing = resources.ours(error) or isinstance(error, BlockingIOError)  # strangers can fill it for a while
        if passing and self._me.ways.transport == "shm":
            raise PeerGone(self._session.peer, f"cannot be sent the memory now: {error}") from None
        return f"shm: decode's mailbox: {error.strerror}"

    def _refuse_tcp(self, reason: str) -> None:
        transport = self._me.ways.transport
        if transport in {"shm", "nccl", "rdma"}:
            raise Incompatible(self._session.peer, link_choice.refusal(transport, reason))

    def close(self) -> None:
        """The session has ended."""
        for link in {*self._may.values(), self.link}:
            link.close()
