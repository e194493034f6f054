"""Decode's choice of a link: what prefill has welcomed it with is tried, the best first; else blocks come over TCP.

    ABLE (a host, a mailbox) ─▶  ◀─ WELCOME (shared memory)  LINK map (the secret in the mailbox) ─▶  ◀─ SHARED  maps it
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from xpyd_sidecar.errors import Incompatible, PeerGone, ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.wire import Frame, FrameKind
from xpyd_sidecar.process import resources
from xpyd_sidecar.transport.links import FetchLink, FetchOwner, Session, StoreReader
from xpyd_sidecar.transport.shm.fetch import Mapping as SharedMapping
from xpyd_sidecar.transport.shm.fetch import ShmFetchLink
from xpyd_sidecar.transport.shm.mailbox import OTHERWISE, Mailbox, mark

logger = logging.getLogger(__name__)

class FetchSettings(NamedTuple):
    """What this rank is set to."""

    transport: str = "auto"
    """``kv.transport``."""
    host: str = ""
    """What this host is called; empty where no link within it is wanted."""
    folder: Path | None = None
    """Where mailboxes are, the same one at prefill; None: in no folder."""
    nixl: str = ""
    """Version of NIXL here; empty: none."""
    gpu: bodies.Gpu | None = None
    sums: bool = True
    """What comes is checked."""
    encrypts: bool = False
    """``kv.encryption``: prefill must want the same."""


class OtherLink(Protocol):
    """What makes decode's side of a link that is no memory of this host; ``reason``: why it cannot be had, said once."""

    def __call__(self, session: Session, owner: FetchOwner, welcome: bodies.LinkWelcome,
                 settled: Callable[[FetchLink | None, str], None]) -> bool:
        """Begin to make it. Whether prefill waits for this side meanwhile."""


class Fetcher:
    """What one rank can fetch over (``LinkFetcher``)."""

    def __init__(self, settings: FetchSettings, owner: FetchOwner, others: Mapping[bodies.LinkName, OtherLink],
                 reader: Callable[[memoryview], StoreReader] | None = None) -> None:
        """Take it.

        Args:
            settings: of this rank.
            owner: of the fetches.
            others: by name, what makes links beside shared memory.
            reader: what copies a mapping into device memory; None: the cache is in host memory.
        """
        self.reader = reader
        self.settings = settings
        self.owner = owner
        self.others = others

    def begin(self, session: Session, chosen: Callable[[FetchLink, str], None]) -> Trial:
        """Begin to fetch over the link, as ``LinkFetcher`` has it."""
        return Trial(self, session, chosen)


class Trial:
    """The choice of one session."""

    def __init__(self, fetcher: Fetcher, session: Session, chosen: Callable[[FetchLink, str], None]) -> None:
        self.waits_for_us = False
        self._fetcher = fetcher
        self._session = session
        self._chosen = chosen
        self._mailbox: Mailbox | None = None
        self._welcome: bodies.LinkWelcome | None = None
        self._shown: bodies.SharedStore | None = None
        """What prefill has been asked to let this side map."""
        self._reasons: list[str] = []
        self._over = False
        """The session has ended, or the link is chosen."""
        settings = fetcher.settings
        if settings.host:
            try:
                self._mailbox = Mailbox(settings.folder)
            except OSError as error:
                self._lacks(error)
                logger.warning("xpyd: no mailbox for %s in %s: %s", session.peer,
                               settings.folder or "this network namespace", error.strerror)
        self.able = bodies.Able(settings.host, self._mailbox.name if self._mailbox is not None else "", settings.gpu,
                                settings.nixl, settings.sums, settings.encrypts)

    def on_frame(self, frame: Frame) -> None:
        """Take WELCOME or SHARED, as ``LinkTrial`` has it."""
        if frame.kind is FrameKind.WELCOME and self._welcome is None:
            self._welcome = bodies.read_body(frame.body, bodies.LinkWelcome)
            self._begin(self._welcome)
        elif frame.kind is FrameKind.SHARED and self._shown is not None:
            shown, self._shown = self._shown, None
            self._map(shown, bodies.read_body(frame.body, bodies.LinkChoice).reason)
        else:
            raise ProtocolError(self._session.peer, f"sent {frame.kind.name} out of turn")

    def close(self) -> None:
        """End the trial, as ``LinkTrial`` has it."""
        self._over = True
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def _begin(self, welcome: bodies.LinkWelcome) -> None:
        if differs := bodies.encryption_differs(welcome.encrypts, self._fetcher.settings.encrypts):
            raise Incompatible(self._session.peer, differs)
        if welcome.reason:
            self._reasons.append(welcome.reason)
        if welcome.shared is not None:
            self._see(welcome.shared)
        elif welcome.gpu is not None:
            self._other("nccl")
        elif welcome.nixl is not None:
            self._other("nixl")
        else:
            self._other("tcp")

    def _see(self, shown: bodies.SharedStore) -> None:
        """Ask for the memory that prefill shows, with the secret that it has sent to this side's mailbox."""
        letter = self._mailbox.take(lambda letter: mark(letter) == shown.mark) if self._mailbox is not None else None
        if letter is None:
            self._without("shm: nothing of prefill's has come into the mailbox")
            return
        secret, fd = letter
        if fd is not None:
            os.close(fd)
        self._shown = shown
        self._session.send(FrameKind.LINK, bodies.LinkChoice("map", "", secret))

    def _map(self, shown: bodies.SharedStore, reason: str) -> None:
        """Map the memory whose descriptor was sent.

        Raises:
            PeerGone: transport is shm, and this process lacks what it takes now.
        """
        if reason:
            self._without(reason)
            return
        assert self._mailbox is not None
        _, fd = self._mailbox.take(lambda letter: letter == shown.name) or (b"", None)
        try:
            mapping = SharedMapping(fd, shown)
        except (OSError, ValueError) as error:
            self._lacks(error)
            self._without(f"shm: {error}")
            return
        reader = self._fetcher.reader(mapping.view) if self._fetcher.reader is not None else None
        self._settle(ShmFetchLink(self._session, self._fetcher.owner, mapping, shown, reader))

    def _other(self, name: bodies.LinkName) -> None:
        assert self._welcome is not None
        make = self._fetcher.others.get(name)
        if make is None:
            self._refuse("; ".join([*self._reasons, f"prefill has welcomed over {name}, which is not at decode"]))
        self.waits_for_us = make(self._session, self._fetcher.owner, self._welcome, self._made)

    def _made(self, link: FetchLink | None, reason: str) -> None:
        """A link was made, or cannot be."""
        self.waits_for_us = False
        if self._over:
            if link is not None:
                link.close()
        elif link is not None:
            self._settle(link)
        else:
            self._without(reason)

    def _without(self, reason: str) -> None:
        """The link that was best cannot be had."""
        self._reasons.append(reason)
        if self._fetcher.settings.transport not in {"auto", "tcp"}:
            self._refuse("; ".join(self._reasons))
        self._other("tcp")

    def _settle(self, link: FetchLink) -> None:
        self.close()
        self._chosen(link, "; ".join(self._reasons))

    def _refuse(self, reason: str) -> NoReturn:
        """There is no link for this peer. Prefill is told what it would have been.

        Raises:
            Incompatible: always.
        """
        transport = self._fetcher.settings.transport
        self._session.send(FrameKind.LINK, bodies.LinkChoice("tcp", reason))
        raise Incompatible(self._session.peer, f"transport {transport}: {reason}" +
                           (f"; {OTHERWISE}" if transport == "shm" else ""))

    def _lacks(self, error: Exception) -> None:
        """A lack of this process's own is no reason to do without shared memory for good, where there is no other link."""
        if resources.is_own_lack(error) and self._fetcher.settings.transport == "shm":
            raise PeerGone(self._session.peer, f"cannot be asked now: {resources.words(error)}") from None
