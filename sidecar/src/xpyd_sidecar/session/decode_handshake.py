"""Decode's half of the handshake of one data link: who both are, then how blocks travel (``link_choice`` draws it)."""

from __future__ import annotations

import logging
import secrets
from typing import Literal

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.errors import AuthError, Incompatible, ProtocolError
from xpyd_sidecar.kv import bodies, proofs
from xpyd_sidecar.kv.frames import Kind
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.link_choice import OfferReader
from xpyd_sidecar.session.receiver_events import ReceiverContext
from xpyd_sidecar.transport.moves import COMPILED

logger = logging.getLogger(__name__)


class DecodeHandshake:
    """Of one connection. ``settled``: how blocks travel is agreed; ``reader``: beside TCP, if they do; ``grouped``: so do
    they, in NCCL groups; ``memory``: prefill's, which is to be reached over NIXL before anything is settled (``reached``).

    ``refused``: why this side wants no link like that; the peer has still to be told how blocks would have travelled.
    """

    def __init__(self, shared: ReceiverContext, peer: str, incarnation: Incarnation) -> None:
        """``incarnation``: of the prefill engine that is meant."""
        self.settled = False
        self.reader: OfferReader | None = None
        self.grouped = False
        self.memory: bodies.NixlMemory | None = None
        self.refused = ""
        self.unread = ""
        """Why prefill's memory cannot be read after all; an arena is awaited."""
        self._shared = shared
        self._peer = peer
        self._incarnation = incarnation
        self._nonce = secrets.token_bytes(proofs.NONCE_BYTES)
        self._terms: proofs.Terms | None = None
        self._welcome: bodies.DataWelcome | None = None
        self._why = ""

    @property
    def beside(self) -> bool:
        """Whether prefill has said that it runs on this host."""
        return self._welcome is not None and self._welcome.near is not None

    def said(self, kind: Kind, payload: memoryview) -> tuple[Kind, bodies.Body] | None:
        """Prefill's next word; what to answer. None: that is known when ``memory`` was reached.

        Raises:
            ProtocolError, MessageError: it may not say that now, or not like that.
            AuthError: it does not hold the service key.
        """
        if kind is Kind.CHALLENGE and self._terms is None:
            return Kind.HELLO, self._hello(bodies.read_body(payload, bodies.Challenge))
        if kind is Kind.WELCOME and self._terms is not None and self._welcome is None:
            choice = self._welcomed(self._terms, bodies.read_body(payload, bodies.DataWelcome))
            return None if choice is None else (Kind.LINK, choice)
        if kind is Kind.ARENA and self._welcome is not None and (self.unread or not self.settled):
            self._why, self.unread = self.unread or self._why, ""
            self.reader, reason = link_choice.try_arena(self._peer, self._shared.ways.folder,
                                                 bodies.read_body(payload, bodies.Arena))
            return Kind.LINK, self._settle("; ".join(one for one in (self._why, reason) if one))
        raise ProtocolError(self._peer, f"sent {kind.name} out of turn")

    def _hello(self, challenge: bodies.Challenge) -> bodies.DataHello:
        me = self._shared.me
        self._terms = proofs.Terms(challenge.nonce, self._nonce, challenge.incarnation, me.incarnation)
        return bodies.DataHello(self._nonce, me.instance, me.incarnation, self._incarnation, me.rank,
                                  proofs.prove(me.key, "decode", self._terms), self._shared.ways.host,
                                  self._shared.ways.group, self._shared.ways.reads)

    def reached(self, reason: str) -> tuple[Kind, bodies.Body]:
        """Prefill's memory can be read over NIXL, or why not; what to answer."""
        assert self._welcome is not None
        if reason:
            self.memory = None
            return Kind.LINK, self._settle("; ".join(one for one in (self._welcome.reason, reason) if one))
        return Kind.LINK, self._settle(self._welcome.reason)

    def _welcomed(self, terms: proofs.Terms, welcome: bodies.DataWelcome) -> bodies.LinkChoice | None:
        if not proofs.holds(self._shared.me.key, "prefill", terms, welcome.proof):
            raise AuthError(self._peer, "does not hold the service key")
        self._welcome = welcome
        if welcome.gpu is not None and self._shared.ways.group is not None:
            self.grouped = True
            return self._settle("")
        if welcome.nixl is not None and self._shared.ways.reads is not None:
            self.memory = welcome.nixl
            return None
        self.reader, self._why = link_choice.try_process(self._peer, welcome)
        if self.reader is None and welcome.near is not None and self._shared.ways.folder is not None:
            return bodies.LinkChoice("make_arena", self._why)
        return self._settle(self._why)

    def cannot_read(self, why: str) -> bodies.Taken:
        """Prefill's memory cannot be read, although its ticket could; what to answer.

        Raises:
            Incompatible: transport is shm, and there is no arena to try.
        """
        ways = self._shared.ways
        if ways.folder is None and ways.transport == "shm":
            reason = f"transport shm: prefill's memory cannot be read ({why}), and there is no folder to share"
            raise Incompatible(self._peer, f"{reason}; {link_choice.OTHERWISE}")
        if ways.folder is not None:
            self.unread = why
        return bodies.Taken(read=False, why=why, arena=ways.folder is not None)

    def _settle(self, reason: str) -> bodies.LinkChoice:
        way: Literal["tcp", "process_vm", "arena", "nccl", "nixl"] = self.reader.name if self.reader is not None else "tcp"
        transport = self._shared.ways.transport
        if self.grouped:
            way = "nccl"
        elif self.memory is not None:
            way = "nixl"
        if way == "tcp" and transport in {"shm", "nccl", "rdma"}:
            self.refused = f"transport {transport}: {reason}"
            if self.settled:
                self.refused += f"; {link_choice.OTHERWISE}"
        else:
            logger.info("xpyd: blocks of %s come over %s%s%s", self._peer, way, f" ({reason})" if reason else "",
                        "" if COMPILED else ", without compiled loops")
            self.settled = True
        return bodies.LinkChoice(way, reason)
