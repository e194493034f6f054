"""Prefill's half of the choice of a link, for one session (the exchange is drawn in ``link_choice``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import Kind
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.link import BlockLink, Session
from xpyd_sidecar.transport.nccl.interface import GroupLink
from xpyd_sidecar.transport.nixl.prefill import NixlLink
from xpyd_sidecar.transport.shm.arena import ArenaLink
from xpyd_sidecar.transport.shm.process_vm import ProcessLink
from xpyd_sidecar.transport.tcp.link import TcpLink

ARENAS_MAX: Final = 16
"""Of one rank, 16 MiB each; sessions beyond them use TCP."""


class NoLink(Exception):
    """Transport shm, nccl or rdma is asked for, and does not work with this peer; says why."""


class Arenas:
    """How many are open in this rank. Used on its I/O thread."""

    open = 0


class PrefillLinkChoice:
    """Which link it is. ``link`` is the one to use at any time; ``close`` ends it with the session."""

    def __init__(self, ways: LinkOptions, largest: int, arenas: Arenas, grouped: Callable[[int], GroupLink] | None = None,
                 shown: Callable[[bodies.NixlReader], NixlLink | None] | None = None) -> None:
        """``grouped``: makes the link of an NCCL group with pieces of so many bytes; ``shown``: one over NIXL."""
        self.link: BlockLink = TcpLink()
        self.gpu: bodies.Gpu | None = None
        """What decode is told, where a group is possible."""
        self.memory: bodies.NixlMemory | None = None
        """What decode is told, where it may read over NIXL."""
        self._ways = ways
        self._largest = largest
        self._arenas = arenas
        self._grouped = grouped
        self._shown = shown
        self._choosing = True
        """Decode has still to choose; again where it cannot read after all, and has been shown an arena."""
        self._may: dict[str, BlockLink] = {}
        """What it may choose beside TCP."""
        self._process: ProcessLink | None = None
        self._arena: ArenaLink | None = None
        self._group: GroupLink | None = None

    def welcome(self, host: str, gpu: bodies.Gpu | None = None,
                nixl: bodies.NixlReader | None = None) -> tuple[bodies.Near | None, str]:
        """What a decode on ``host`` with a GPU or NIXL may try, and why nothing better; or why it must use TCP.

        Raises:
            NoLink: transport is shm, nccl or rdma, and there is nothing to try.
        """
        ways, why = self._ways, list[str]()
        if gpu is not None or ways.transport == "nccl":
            ours, no = ways.group, link_choice.ungrouped(ways, gpu)
            if not no and gpu is not None and ours is not None and self._grouped is not None:
                self.gpu = ours
                self._group = self._may["nccl"] = self._grouped(min(gpu.piece, ours.piece))
                return None, ""
            why.append(no)
        if ways.transport != "nccl" and (host or not why):
            no = link_choice.apart(ways, host)
            if not no:
                self._process = self._may["process_vm"] = ProcessLink()
                return self._process.near(), ""
            why.append(no)
        if nixl is not None or ways.reads is not None or ways.no_nixl:
            no = self._show(nixl)
            if not no:
                return None, "; ".join(why) if ways.transport == "auto" and host else ""
            why = [no] if ways.transport == "rdma" else [*why, no]
        reason = "; ".join(dict.fromkeys(why))
        self._refuse_tcp(reason)
        return None, reason

    def _show(self, theirs: bodies.NixlReader | None) -> str:
        """Show decode this side's memory; or why not."""
        reason = link_choice.unread(self._ways, theirs)
        if reason or theirs is None or self._shown is None:
            return reason or "nixl: not ready at prefill"
        link = self._shown(theirs)
        if link is None:
            return "nixl: too many sessions are open at prefill"
        self._may["nixl"], self.memory = link, link.shown()
        return ""

    def decided(self, choice: bodies.LinkChoice) -> bodies.Arena | None:
        """Decode says what it takes; what to answer, if anything.

        Raises:
            NoLink: transport is shm, nccl or rdma, and decode takes TCP.
            ValueError: decode may not say this now.
        """
        if choice.way == "make_arena" and "process_vm" in self._may and self._arena is None:
            return self._make()
        if not self._choosing:
            raise ValueError("chose a link twice")
        link: BlockLink | None = TcpLink()
        if choice.way == "tcp":
            again = self.link is self._process
            self._refuse_tcp(f"{choice.reason}; {link_choice.OTHERWISE}" if again else choice.reason)
        else:
            link = self._may.get(choice.way)
        if link is None:
            raise ValueError(f"chose {choice.way}, which was not offered")
        self._take(link)
        return None

    def _take(self, link: BlockLink) -> None:
        """Use a link. Of those that decode might have chosen, ``_process`` may still owe something."""
        self._choosing = False
        if self._arena is not None and link is self._arena:
            self._arena.unname()
        else:
            self._drop_arena()
        for one in self._may.values():
            if one is not link and one is not self._process:
                one.close()
        self._may = {}
        before, self.link = self.link, link
        if self._process is not None and before is self._process:
            self._process.leave(link)

    def taken(self, session: Session, taken: bodies.Taken) -> bodies.Arena | None:
        """Decode is done with the oldest offer, or cannot read it: then an arena to show, if it would map one.

        Raises:
            NoLink: it cannot, transport is shm, and it would map no arena.
            ProtocolError: nothing is on offer.
        """
        process = self._process
        if process is None or not process.owed:
            self.link.taken(session, read=taken.read)
            return None
        process.taken(session, read=taken.read)
        if taken.read or self._choosing:
            return None
        if self.link is process:
            if taken.arena:
                self._choosing = True
                return self._make()
            why = taken.why or "it does not say why"
            self._refuse_tcp(f"decode cannot read prefill's memory ({why}) and maps no arena; {link_choice.OTHERWISE}")
            self.link = TcpLink()
        process.leave(self.link)
        return None

    def told(self, session: Session, kind: Kind, body: memoryview) -> None:
        """Decode says POSTED or UNGROUP.

        Raises:
            ProtocolError: this session has no groups.
        """
        if self._group is None or self.link is not self._group:
            raise ProtocolError(session.peer, f"sent {kind.name} over a link without groups")
        if kind is Kind.POSTED:
            self._group.received(session)
        else:
            self._group.ungrouped(bodies.read_body(body, bodies.Group))

    def _make(self) -> bodies.Arena:
        if self._ways.folder is None:
            return bodies.Arena("", 0, b"", "no folder to share is set")
        if self._arenas.open >= ARENAS_MAX:
            return bodies.Arena("", 0, b"", f"{ARENAS_MAX} arenas are open")
        try:
            self._arena = self._may["arena"] = ArenaLink(self._ways.folder, self._largest)
        except OSError as error:
            return bodies.Arena("", 0, b"", f"{self._ways.folder}: {error.strerror}")
        self._arenas.open += 1
        return self._arena.shown()

    def _refuse_tcp(self, reason: str) -> None:
        if self._ways.transport in {"shm", "nccl", "rdma"}:
            raise NoLink(f"transport {self._ways.transport}: {reason}")

    def _drop_arena(self) -> None:
        if self._arena is not None:
            self._may.pop("arena", None)
            self._arena.close()
            self._arena = None
            self._arenas.open -= 1

    def close(self) -> None:
        """The session has ended."""
        self._choosing = False
        self._drop_arena()
        for link in (*self._may.values(), self.link):
            link.close()
        if self._process is not None:
            self._process.close()
