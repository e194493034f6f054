"""Decode's end of a session with one rank of prefill: who that is, over which link it fetches, and that it is there.

    CHALLENGE ─▶  ◀─ HELLO  ◀─ ABLE  WELCOME ─▶  [◀─ LINK map  SHARED ─▶]  ◀─ LINK  ◀─ ASK …

What is to be said of tries before the link is chosen waits until it is.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from xpyd_sidecar.contract.ids import HostPort, Incarnation, split_host_port
from xpyd_sidecar.errors import AuthError, ChecksumError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import ListeningClock
from xpyd_sidecar.kv.session_keys import SessionKeys
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind
from xpyd_sidecar.session.control_connection import ControlConnection
from xpyd_sidecar.session.greeting import DecodeGreeting, OwnRank, RankRejected, rejection_of
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.links import FetchLink, LinkFetcher, LinkTrial

logger = logging.getLogger(__name__)

IDLE_S: Final = 120.0
"""After which a session that nobody needs is closed; the next transfer begins a new one."""
OUTCOMES: Final[Mapping[type[PeerError], Outcome]] = {
    ChecksumError: Outcome.CHECKSUM, AuthError: Outcome.AUTH, ProtocolError: Outcome.PROTOCOL,
    Incompatible: Outcome.INCOMPATIBLE}
"""What the end of a session means for what was asked of it; the first that fits."""


class DecodeSession:
    """One session. ``place``: the address and the life of prefill's rank that is meant."""

    def __init__(self, me: OwnRank, loop: Loop, place: tuple[HostPort, Incarnation], fetcher: LinkFetcher, *,
                 told: Callable[[DecodeSession, Frame], None], ended: Callable[[DecodeSession, PeerError], None],
                 chose: Callable[[DecodeSession], None]) -> None:
        """Begin to connect.

        Args:
            me: this rank.
            loop: that watches the socket.
            place: of prefill's rank.
            fetcher: what this rank can fetch over.
            told: takes frames once a link is chosen; what it raises ends the session.
            ended: it has ended; called once.
            chose: a link is chosen.

        Raises:
            OSError, ValueError: the address cannot be used.
        """
        self.place = place
        self.fetches: FetchLink | None = None
        """The link, once it is chosen."""
        self.idle = False
        """It was ended since nobody needed it."""
        self.refused: tuple[str, ...] = ()
        """Better links that it could not have, and why."""
        self._fetcher = fetcher
        self._told = told
        self._ended = ended
        self._chose = chose
        self._later: list[tuple[FrameKind, msgspec.Struct | None, Key]] = []
        self._trial: LinkTrial | None = None
        self._strange: ListeningClock | None = None
        self.link = ControlConnection(loop, connecting(place[0]), place[0], self, connecting=True)
        self._greeting = DecodeGreeting(me, self.link, place[1])

    @property
    def number(self) -> int:
        """The session's number, which no other session of this process has."""
        return self.link.number

    @property
    def keys(self) -> SessionKeys | None:
        """The keys of the session; None until prefill has challenged."""
        return self._greeting.keys

    def send(self, kind: FrameKind, body: msgspec.Struct | None = None, key: Key = NO_TRY) -> None:
        """Say something of a try, once the link is chosen."""
        if self.fetches is not None:
            self.link.send(kind, body, key)
        else:
            self._later.append((kind, body, key))

    def frame(self, frame: Frame) -> None:
        """Take the next frame of prefill's."""
        if frame.kind is FrameKind.REJECT and self._greeting.keys is not None:
            raise rejection_of(self.link.peer, frame.body)
        if self._greeting.keys is None:
            self._greeting.on_frame(frame)
            self._trial = self._fetcher.begin(self.link, self._chosen)
            self.link.send(FrameKind.ABLE, self._trial.able)
        elif self.fetches is not None:
            if frame.kind is not FrameKind.PING and not self.fetches.on_frame(frame):
                self._told(self, frame)
        elif self._trial is not None and frame.kind in {FrameKind.WELCOME, FrameKind.SHARED}:
            self._trial.on_frame(frame)
        else:
            raise ProtocolError(self.link.peer, f"sent {frame.kind.name} out of turn")

    def _chosen(self, link: FetchLink, reason: str) -> None:
        """The link is chosen. ``reason``: why it is not a better one."""
        self.fetches = link
        self.link.send(FrameKind.LINK, bodies.LinkChoice(link.name, reason))
        logger.info("xpyd: blocks of %s come over %s%s", self.link.peer, link.name, f" ({reason})" if reason else "")
        self.refused = bodies.refused_links(reason)
        self._chose(self)
        later, self._later = self._later, []
        for one in later:
            self.link.send(*one)

    def on_closed(self, error: PeerError) -> None:
        """The connection has ended."""
        if isinstance(error, PeerGone) and self.fetches is not None:
            error = self.fetches.fault() or error
        try:
            if self._trial is not None:
                self._trial.close()
            if self.fetches is not None:
                self.fetches.close()
        finally:
            self._ended(self, error)

    def tick(self, now: float, *, busy: bool, timeout: float) -> None:
        """Time passes: a source that does not accept, or is silent although it owes something, is given up."""
        link = self.link
        if self.fetches is not None:
            self.fetches.tick(now, timeout)
        if self.fetches is None and not (self._trial is not None and self._trial.waits_for_us):
            self._strange = self._strange or ListeningClock(timeout)
            if self._strange.advance(now) > timeout:
                link.close(PeerGone(link.peer, f"no connection within {timeout} s"))
        elif busy:
            if link.silent(now, timeout):
                link.close(PeerGone(link.peer, f"silent for {timeout} s"))
            elif not link.writing and now - link.last_out > timeout / 4:
                link.send(FrameKind.PING)
        elif now - max(link.last_in, link.last_out) > IDLE_S:
            self.idle = True
            link.close(PeerGone(link.peer, "idle"))


def outcome_of(error: PeerError) -> Outcome:
    """What the end of a session means for what was asked of it."""
    if isinstance(error, RankRejected):
        return error.outcome
    return next((outcome for kind, outcome in OUTCOMES.items() if isinstance(error, kind)), Outcome.PEER_LOST)


def connecting(address: HostPort) -> socket.socket:
    """A socket that has begun to connect.

    Raises:
        OSError, ValueError: the address cannot be used.
    """
    host, port = split_host_port(address)
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    code = sock.connect_ex((host, port))
    if code not in {0, errno.EINPROGRESS}:
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock
