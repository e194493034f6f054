"""Prefill's end of a session with one rank of decode: who that is, over which link it fetches, and that it is there.

    CHALLENGE ─▶  ◀─ HELLO  ◀─ ABLE  WELCOME ─▶  [◀─ LINK map  SHARED ─▶]  ◀─ LINK  ◀─ ASK …

What decode may choose is what its ABLE and this rank's setting allow: the first of ``LINKS`` that both have, or TCP. A rank
that is set to one link refuses a peer that would come to another, and one that encrypts KV a peer that does not.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.errors import AuthError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.leases import ListeningClock
from xpyd_sidecar.kv.session_keys import SessionKeys, stripe_answer, stripe_keys, stripe_name
from xpyd_sidecar.kv.wire import Frame, FrameKind
from xpyd_sidecar.session.control_connection import ControlConnection
from xpyd_sidecar.session.greeting import OwnRank, PrefillGreeting, Rejection
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.links import LinkServer, ServeLink
from xpyd_sidecar.transport.shm.mailbox import OTHERWISE

logger = logging.getLogger(__name__)

IDLE_S: Final = 240.0
"""After which a session that nobody needs is closed: twice decode's, which would else ask over one that just ends."""
LINKS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": ("shm", "nixl", "tcp"), "shm": ("shm",), "rdma": ("nixl",), "nccl": ("nccl",), "tcp": ("tcp",)}
"""By the setting ``kv.transport``: which links there may be, the best first."""
UNREAD: Final = frozenset({"shm", "tcp"})
"""Links over which no byte is in clear between two hosts, where ``kv.encryption`` is enabled."""


class PrefillSession:
    """One session. ``life``: of decode's rank, once it has shown that it holds the key."""

    def __init__(self, me: OwnRank, loop: Loop, sock: socket.socket, address: str, *, servers: Mapping[str, LinkServer],
                 transport: str, encrypts: bool, asked: Callable[[PrefillSession, Frame], None],
                 named: Callable[[PrefillSession, bytes], None],
                 lost: Callable[[PrefillSession, PeerError], None]) -> None:
        """Greet it.

        Args:
            me: this rank.
            loop: that watches the socket.
            sock: an accepted connection.
            address: of decode, for messages.
            servers: by name of a link: what this rank has for it.
            transport: the setting ``kv.transport``.
            encrypts: the setting ``kv.encryption``.
            asked: takes frames of a peer that has chosen a link; what it raises ends the session.
            named: it is no session but a stripe of this name; takes the socket over (``link.detach``).
            lost: it has ended.
        """
        self.life = Incarnation("")
        self.serves: ServeLink | None = None
        """The link that decode has chosen."""
        self.sums = False
        """Decode wants sums."""
        self.names: tuple[bytes, ...] = ()
        """Of its stripes, once decode has been told of a link that has some."""
        self._servers = servers
        self._transport = transport
        self._encrypts = encrypts
        self._links = tuple(one for one in LINKS[transport] if not encrypts or one in UNREAD)
        self._asked = asked
        self._named = named
        self._lost = lost
        self._may: dict[str, ServeLink] = {}
        """What decode may choose."""
        self._welcomed = False
        self._strange: ListeningClock | None = None
        self.link = ControlConnection(loop, sock, address, self)
        self._greeting = PrefillGreeting(me, self.link)

    @property
    def number(self) -> int:
        """The session's number, which no other session of this process has."""
        return self.link.number

    @property
    def keys(self) -> SessionKeys | None:
        """The keys of the session; None until decode has shown that it holds the service key."""
        return self._greeting.keys

    def may_use(self, link: str) -> bool:
        """Whether decode fetches over a link, or has been told that it may."""
        return link in self._may or (self.serves is not None and self.serves.name == link)

    def frame(self, frame: Frame) -> None:
        """Take the next frame of decode's."""
        if self._greeting.terms is None and frame.kind is FrameKind.NAME:
            self._named(self, frame.body)
        elif self._greeting.terms is None:
            self.life = self._greeting.on_frame(frame).incarnation
        elif not self._welcomed:
            self._expect(frame, FrameKind.ABLE)
            self._welcome(bodies.read_body(frame.body, bodies.Able))
        elif self.serves is None:
            self._expect(frame, FrameKind.LINK)
            self._choose(bodies.read_body(frame.body, bodies.LinkChoice))
        elif frame.kind is not FrameKind.PING and not self.serves.on_frame(frame):
            self._asked(self, frame)

    def attach(self, name: bytes, sock: socket.socket) -> None:
        """A stripe has come, perhaps before decode's word that it fetches over them.

        Args:
            name: which, one of ``names``.
            sock: of the stripe.

        Raises:
            PeerError, OSError: as of ``ServeLink.attach``.
        """
        assert self.keys is not None
        number = self.names.index(name)
        link = self.serves or self._may.get("tcp") or next(iter(self._may.values()))
        keys = stripe_keys(self.keys, number) if self._encrypts else b""
        link.attach(sock, number, stripe_answer(self.keys, number), keys)

    def on_closed(self, error: PeerError) -> None:
        """The connection has ended."""
        try:
            for link in {*self._may.values(), *([self.serves] if self.serves is not None else [])}:
                link.close()
        finally:
            self._lost(self, error)

    def tick(self, now: float, *, busy: bool, timeout: float) -> None:
        """Time passes: a peer that does not greet, or is silent although it has work here, is given up."""
        link = self.link
        if self.serves is None:
            self._strange = self._strange or ListeningClock(timeout)
            if self._strange.advance(now) > timeout:
                link.close(AuthError(link.peer, f"did not greet within {timeout} s"))
        elif busy or self.serves.busy:
            if link.silent(now, timeout):
                link.close(PeerGone(link.peer, f"silent for {timeout} s"))
            elif not link.writing and now - link.last_out > timeout / 4:
                link.send(FrameKind.PING)
        elif now - max(link.last_in, link.last_out) > IDLE_S:
            link.close(PeerGone(link.peer, "idle"))

    def _expect(self, frame: Frame, kind: FrameKind) -> None:
        if frame.kind is not kind:
            raise ProtocolError(self.link.peer, f"sent {frame.kind.name} before {kind.name}")

    def _welcome(self, able: bodies.Able) -> None:
        """Tell decode of the best link that there may be."""
        self.sums = able.sums
        if differs := bodies.encryption_differs(self._encrypts, able.encrypts):
            self._reject(differs)
        reasons: list[str] = [] if self._links else ["nothing of it is encrypted, and kv.encryption is enabled"]
        for name in self._links:
            try:
                served = self._servers[name].serve(self.link, able) if name in self._servers else f"{name}: not at prefill"
            except PeerGone as error:  # what is lacking for now is said, and is no reason to keep the two apart
                self.link.send(FrameKind.REJECT, Rejection(Outcome.PEER_LOST, error.reason))
                raise
            if isinstance(served, str):
                reasons.append(served)
                continue
            link, welcome = served
            self._may[name] = link
            if name == self._links[-1] or "tcp" not in self._servers:
                break
            with contextlib.suppress(PeerGone):  # no room for it now: there is the other one
                fallback = self._servers["tcp"].serve(self.link, able)
                if self._transport == "auto" and not isinstance(fallback, str):
                    self._may["tcp"] = fallback[0]
            break
        else:
            self._refuse("; ".join(reasons))
        self._welcomed = True
        stripes = max(one.stripes for one in self._may.values())
        assert self.keys is not None
        self.names = tuple(stripe_name(self.keys, number) for number in range(stripes))
        self.link.send(FrameKind.WELCOME, bodies.LinkWelcome(welcome.shared, welcome.nixl, welcome.gpu, "; ".join(reasons),
                                                            stripes, self._encrypts))

    def _choose(self, choice: bodies.LinkChoice) -> None:
        """Decode says what it fetches over, or that it would see the memory."""
        if choice.link == "map":
            link = self._may.get("shm")
            if link is None:
                raise ProtocolError(self.link.peer, "would map memory that was not shown")
            link.hand_over(choice.secret)
            return
        link = self._may.pop(choice.link, None)
        if link is None and choice.link == "tcp":
            self._refuse(choice.reason)
        if link is None:
            raise ProtocolError(self.link.peer, f"chose {choice.link}, which was not offered")
        self.serves = link
        for other in self._may.values():
            other.close()
        self._may.clear()
        logger.info("xpyd: %s fetches over %s%s", self.link.peer, link.name, f" ({choice.reason})" if choice.reason else "")

    def _refuse(self, reason: str) -> NoReturn:
        """There is no link for this peer: tell it why, as last words."""
        self._reject(f"transport {self._transport}: {reason}" + (f"; {OTHERWISE}" if self._transport == "shm" else ""))

    def _reject(self, why: str) -> NoReturn:
        self.link.send(FrameKind.REJECT, Rejection(Outcome.INCOMPATIBLE, why))
        raise Incompatible(self.link.peer, why)
