"""Decode's half of the handshake of one data link: who both are, then how blocks travel (``link_choice`` draws it)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.errors import AuthError, Incompatible, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, proofs
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.reads import unusable
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.block_receiver import BlockReceiver
from xpyd_sidecar.session.endpoint import Endpoint, LocalRank
from xpyd_sidecar.session.link_choice import OfferReader
from xpyd_sidecar.transport.moves import COMPILED
from xpyd_sidecar.transport.shm.taker import ReadingTaker

logger = logging.getLogger(__name__)


class DecodeHandshake:
    """Of one connection. ``settled``: how blocks travel is agreed; beside TCP, ``BlockReceiver.taker`` takes them."""

    def __init__(self, me: LocalRank, end: Endpoint, intake: BlockReceiver, incarnation: Incarnation,
                 agreed: Callable[[], None]) -> None:
        """``incarnation``: of the prefill engine that is meant; ``agreed``: called each time that a link is."""
        self.settled = False
        self.reaching = False
        """Whether prefill's memory is being reached over NIXL: this side's work, which has a bound of its own."""
        self._me = me
        self._end = end
        self._intake = intake
        self._incarnation = incarnation
        self._agreed = agreed
        self._nonce = secrets.token_bytes(proofs.NONCE_BYTES)
        self._terms: proofs.Terms | None = None
        self._welcome: bodies.DataWelcome | None = None
        self._why = ""
        """Why prefill's memory is not read."""

    def said(self, kind: FrameKind, payload: memoryview) -> None:
        """Prefill's next word: answer it.

        Raises:
            ProtocolError, MessageError: it may not say that now, or not like that.
            AuthError: it does not hold the service key.
            Incompatible: this side wants no such link; prefill has been told how blocks would have travelled.
        """
        if kind is FrameKind.CHALLENGE and self._terms is None:
            self._greet(bodies.read_body(payload, bodies.Challenge))
        elif kind is FrameKind.WELCOME and self._terms is not None and self._welcome is None:
            self._welcomed(self._terms, bodies.read_body(payload, bodies.DataWelcome))
        elif kind is FrameKind.ARENA and self._welcome is not None and (self._intake.unread or not self.settled):
            shown = bodies.read_body(payload, bodies.Arena)
            reader, reason = link_choice.try_arena(self._peer, self._me.ways.folder, shown)
            if reader is None and self._end.link.left:
                raise PeerGone(self._peer, "closed the connection, and its arena with it")
            self._use(reader)
            self._settle(self._why, reason)
        else:
            raise ProtocolError(self._peer, f"sent {kind.name} out of turn")

    @property
    def _peer(self) -> str:
        return self._end.link.peer

    def _greet(self, challenge: bodies.Challenge) -> None:
        me = self._me
        self._terms = proofs.Terms(challenge.nonce, self._nonce, challenge.incarnation, me.incarnation)
        self._end.link.say(FrameKind.HELLO, bodies.DataHello(
            self._nonce, me.instance, me.incarnation, self._incarnation, me.rank,
            proofs.prove(me.key, "decode", self._terms), me.ways.host, me.ways.group, me.ways.reads))

    def _welcomed(self, terms: proofs.Terms, welcome: bodies.DataWelcome) -> None:
        me, session = self._me, self._end.link
        if not proofs.holds(me.key, "prefill", terms, welcome.proof):
            raise AuthError(self._peer, "does not hold the service key")
        self._welcome = welcome
        self._end.link.beside |= welcome.near is not None
        if welcome.gpu is not None and me.ways.group is not None and me.grouping is not None:
            self._intake.taker = me.grouping.taker(session, self._intake)
            self._settle()
        elif welcome.nixl is not None and me.ways.reads is not None and me.reading is not None:
            if reason := unusable(welcome.nixl):
                self._reached(f"nixl: {reason}", late=False)
            else:
                self.reaching = True
                self._intake.taker = me.reading.taker(session, self._intake, welcome.nixl, self._reached)
        else:
            reader, self._why = link_choice.try_process(self._peer, welcome)
            self._use(reader)
            if reader is None and welcome.near is not None and me.ways.folder is not None:
                self._end.link.say(FrameKind.LINK, bodies.LinkChoice("make_arena", self._why))
            else:
                self._settle(self._why)

    def _reached(self, reason: str, late: bool) -> None:
        """How the attempt to reach prefill's memory over NIXL has ended."""
        self.reaching = False
        if late and self._me.ways.transport == "rdma":
            raise PeerGone(self._peer, reason)
        if reason:
            self._use(None)
        assert self._welcome is not None
        self._settle(self._welcome.reason, reason)

    def _use(self, reader: OfferReader | None) -> None:
        """Take blocks through a reader from now on, or in frames alone."""
        if self._intake.taker is not None:
            self._intake.taker.close()
        self._intake.unread = ""
        self._intake.taker = None
        if reader is not None:
            self._intake.taker = ReadingTaker(self._end.link, self._intake, reader, self._cannot_read)

    def _cannot_read(self, why: str) -> bodies.Taken:
        """Prefill's memory cannot be read, although its ticket could; what to answer.

        Raises:
            Incompatible: transport is shm, and there is no arena to try.
        """
        ways = self._me.ways
        if ways.folder is None and ways.transport == "shm":
            reason = f"transport shm: prefill's memory cannot be read ({why}), and there is no folder to share"
            raise Incompatible(self._peer, f"{reason}; {link_choice.OTHERWISE}")
        self._intake.unread = self._why = why
        return bodies.Taken(read=False, why=why, arena=ways.folder is not None)

    def _settle(self, *reasons: str) -> None:
        """Say what blocks travel over; ``reasons``: why not over something better."""
        taker, transport = self._intake.taker, self._me.ways.transport
        reason = "; ".join(one for one in reasons if one)
        way: bodies.LinkName = "tcp" if taker is None else taker.name
        self._end.link.say(FrameKind.LINK, bodies.LinkChoice(way, reason))
        if taker is None and transport in {"shm", "nccl", "rdma"}:
            self._end.link.flush()
            raise Incompatible(self._peer, f"transport {transport}: {reason}"
                                           + (f"; {link_choice.OTHERWISE}" if self.settled else ""))
        logger.info("xpyd: blocks of %s come over %s%s%s", self._peer, way, f" ({reason})" if reason else "",
                    "" if COMPILED else ", without compiled loops")
        self.settled = True
        self._agreed()
