"""Decode's half of the handshake of one data link: who both are, then how blocks travel (``link_choice`` draws it)."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

from xpyd_sidecar import resources
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.errors import AuthError, Incompatible, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, proofs
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.reads import unusable
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.block_receiver import BlockReceiver
from xpyd_sidecar.session.endpoint import Endpoint, LocalRank
from xpyd_sidecar.transport.moves import COMPILED
from xpyd_sidecar.transport.shm.decode import Mapping, ShmTaker
from xpyd_sidecar.transport.shm.mailbox import Mailbox, mark

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
        self._mailbox: Mailbox | None = None
        """Until the link is agreed."""
        self._shown: bodies.ShmMemory | None = None
        """What prefill has been asked to let this side map."""

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
        elif kind is FrameKind.SHARED and self._shown is not None and self._mailbox is not None:
            self._settle(self._map(self._shown, self._mailbox, bodies.read_body(payload, bodies.LinkChoice).reason))
        else:
            raise ProtocolError(self._peer, f"sent {kind.name} out of turn")

    def close(self) -> None:
        """Nothing more comes beside the connection; again: nothing."""
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    @property
    def _peer(self) -> str:
        return self._end.link.peer

    def _greet(self, challenge: bodies.Challenge) -> None:
        me = self._me
        if me.ways.host:
            try:
                self._mailbox = Mailbox(me.ways.folder)
            except OSError as error:
                self._refuse_lack(error)
                logger.warning("xpyd: no mailbox for %s in %s: %s", self._peer, me.ways.folder or "this network namespace",
                               error.strerror)
        self._terms = proofs.Terms(challenge.nonce, self._nonce, challenge.incarnation, me.incarnation)
        self._end.link.say(FrameKind.HELLO, bodies.DataHello(
            self._nonce, me.instance, me.incarnation, self._incarnation, me.rank,
            proofs.prove(me.key, "decode", self._terms), me.ways.host,
            self._mailbox.name if self._mailbox is not None else "", me.ways.gpu, me.ways.reads))

    def _refuse_lack(self, error: Exception) -> None:
        if resources.ours(error) and self._me.ways.transport == "shm":
            raise PeerGone(self._peer, f"cannot be asked now: {resources.words(error)}") from None

    def _welcomed(self, terms: proofs.Terms, welcome: bodies.DataWelcome) -> None:
        me, session = self._me, self._end.link
        if not proofs.holds(me.key, "prefill", terms, welcome.proof):
            raise AuthError(self._peer, "does not hold the service key")
        self._welcome = welcome
        self._end.link.beside |= welcome.shared is not None
        if welcome.gpu is not None and me.grouping is not None:
            self._intake.taker = me.grouping.taker(session, self._intake)
            self._settle()
        elif welcome.nixl is not None and me.ways.reads is not None and me.reading is not None:
            if reason := unusable(welcome.nixl):
                self._reached(f"nixl: {reason}", late=False)
            else:
                self.reaching = True
                self._intake.taker = me.reading.taker(session, self._intake, welcome.nixl, self._reached)
        else:
            self._see(welcome)

    def _see(self, welcome: bodies.DataWelcome) -> None:
        """Ask for the memory that prefill shows, with the secret that it has sent to this side's mailbox."""
        shown, mailbox = welcome.shared, self._mailbox
        if shown is None or mailbox is None:
            self._settle(welcome.reason or "prefill offers no other way")
        elif (letter := mailbox.take(lambda letter: mark(letter) == shown.mark)) is None:
            self._settle("shm: nothing of prefill's has come into the mailbox")
        else:
            secret, fd = letter
            if fd is not None:
                os.close(fd)
            self._shown = shown
            self._end.link.say(FrameKind.LINK, bodies.LinkChoice("map", "", secret))

    def _map(self, shown: bodies.ShmMemory, mailbox: Mailbox, reason: str) -> str:
        """Map the memory whose descriptor was sent; or why not.

        Raises:
            PeerGone: transport is shm, and this process lacks what it takes now.
        """
        if reason:
            return reason
        _, fd = mailbox.take(lambda letter: letter == shown.name) or (b"", None)
        try:
            mapping = Mapping(fd, shown)
        except (OSError, ValueError) as error:
            self._refuse_lack(error)
            return f"shm: {error}"
        self._intake.taker = ShmTaker(self._end.link, self._intake, mapping, shown)
        return ""

    def _reached(self, reason: str, late: bool) -> None:
        """How the attempt to reach prefill's memory over NIXL has ended."""
        self.reaching = False
        if late and self._me.ways.transport == "rdma":
            raise PeerGone(self._peer, reason)
        if reason and self._intake.taker is not None:
            self._intake.taker.close()
            self._intake.taker = None
        assert self._welcome is not None
        self._settle(self._welcome.reason, reason)

    def _settle(self, *reasons: str) -> None:
        """Say what blocks travel over; ``reasons``: why not over something better."""
        self.close()
        taker, transport = self._intake.taker, self._me.ways.transport
        reason = "; ".join(one for one in reasons if one)
        way: bodies.LinkName = "tcp" if taker is None else taker.name
        self._end.link.say(FrameKind.LINK, bodies.LinkChoice(way, reason))
        if taker is None and transport in {"shm", "nccl", "rdma"}:
            self._end.link.flush()
            raise Incompatible(self._peer, link_choice.refusal(transport, reason))
        logger.info("xpyd: blocks of %s come over %s%s%s", self._peer, way, f" ({reason})" if reason else "",
                    "" if COMPILED else ", without compiled loops")
        self.settled = True
        self._agreed()
