"""Prefill's half of the choice of a link, for one session (the exchange is drawn in ``link_choice``)."""

from __future__ import annotations

import logging
from typing import Final

from xpyd_sidecar.errors import Incompatible, ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.transport.link import BlockLink, Session
from xpyd_sidecar.transport.shm.arena import ArenaLink
from xpyd_sidecar.transport.shm.process_vm import ProcessLink
from xpyd_sidecar.transport.tcp.link import TcpLink

logger = logging.getLogger(__name__)

ARENAS_MAX: Final = 16
"""Of one rank, 16 MiB each; sessions beyond them use TCP."""


class Arenas:
    """How many are open in this rank. Used on its I/O thread."""

    open = 0


class PrefillLinkChoice:
    """Which link it is. ``link`` is the one to use at any time; ``close`` ends it with the session.

    Every method raises Incompatible where transport is shm, nccl or rdma and does not work with this peer, and
    ProtocolError where decode may not say that now.
    """

    def __init__(self, me: LocalRank, arenas: Arenas, session: Session) -> None:
        self._tcp = TcpLink(session)
        self.link: BlockLink = self._tcp
        self.gpu: bodies.Gpu | None = None
        """What decode is told, where a group is possible."""
        self.memory: bodies.NixlMemory | None = None
        """What decode is told, where it may read over NIXL."""
        self._me = me
        self._arenas = arenas
        self._session = session
        self._choosing = True
        """Decode has still to choose; again where it cannot read after all, and has been shown an arena."""
        self._may: dict[str, BlockLink] = {}
        """What it may choose beside TCP."""
        self._process: ProcessLink | None = None
        self._arena: ArenaLink | None = None

    def welcome(self, host: str, gpu: bodies.Gpu | None = None,
                nixl: bodies.NixlReader | None = None) -> tuple[bodies.Near | None, str]:
        """What a decode on ``host`` with a GPU or NIXL may try, and why nothing better; or why it must use TCP."""
        ways, why = self._me.ways, list[str]()
        if gpu is not None or ways.transport == "nccl":
            ours, no = ways.group, link_choice.ungrouped(ways, gpu)
            if not no and gpu is not None and ours is not None and self._me.grouping is not None:
                self.gpu = ours
                self._may["nccl"] = self._me.grouping.link(self._session, min(gpu.piece, ours.piece))
                return None, ""
            why.append(no)
        if ways.transport != "nccl" and (host or not why):
            no = link_choice.apart(ways, host)
            if not no:
                self._process = self._may["process_vm"] = ProcessLink(self._session)
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
        reason = link_choice.unread(self._me.ways, theirs)
        if reason or theirs is None or self._me.reading is None:
            return reason or "nixl: not ready at prefill"
        link = self._me.reading.link(self._session, theirs)
        if link is None:
            return "nixl: too many sessions are open at prefill"
        self._may["nixl"], self.memory = link, link.shown()
        return ""

    def decided(self, choice: bodies.LinkChoice) -> None:
        """Decode says what it takes, or that it would see an arena."""
        if choice.way == "make_arena" and "process_vm" in self._may and self._arena is None:
            self._show_arena()
            return
        if not self._choosing:
            raise self._out_of_turn("a link twice")
        link: BlockLink | None = self._tcp
        if choice.way == "tcp":
            again = self.link is self._process
            self._refuse_tcp(f"{choice.reason}; {link_choice.OTHERWISE}" if again else choice.reason)
        else:
            link = self._may.get(choice.way)
        if link is None:
            raise self._out_of_turn(f"{choice.way}, which was not offered")
        self._take(link)
        logger.info("xpyd: blocks for %s go over %s%s", self._session.peer, link.name,
                    f" ({choice.reason})" if choice.reason else "")

    def _out_of_turn(self, chosen: str) -> ProtocolError:
        return ProtocolError(self._session.peer, f"chose {chosen}")

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

    def taken(self, taken: bodies.Taken) -> None:
        """Decode is done with the oldest offer, or cannot read it: then it is shown an arena, if it would map one."""
        process = self._process
        if process is None or not process.owed:
            self.link.taken(read=taken.read)
            return
        process.taken(read=taken.read)
        if taken.read or self._choosing:
            return
        if self.link is process:
            if taken.arena:
                self._choosing = True
                self._show_arena()
                return
            why = taken.why or "it does not say why"
            self._refuse_tcp(f"decode cannot read prefill's memory ({why}) and maps no arena; {link_choice.OTHERWISE}")
            self.link = self._tcp
            logger.warning("xpyd: blocks for %s go over tcp from now on (%s)", self._session.peer, taken.why)
        process.leave(self.link)

    def _show_arena(self) -> None:
        """Show decode an arena, or say why there is none."""
        folder = self._me.ways.folder
        if folder is None:
            why = "no folder to share is set"
        elif self._arenas.open >= ARENAS_MAX:
            why = f"{ARENAS_MAX} arenas are open"
        else:
            try:
                self._arena = self._may["arena"] = ArenaLink(self._session, folder, self._me.largest_frame)
            except OSError as error:
                why = f"{folder}: {error.strerror}"
            else:
                self._arenas.open += 1
                self._session.say(FrameKind.ARENA, self._arena.shown())
                return
        self._session.say(FrameKind.ARENA, bodies.Arena("", 0, b"", why))

    def _refuse_tcp(self, reason: str) -> None:
        transport = self._me.ways.transport
        if transport in {"shm", "nccl", "rdma"}:
            raise Incompatible(self._session.peer, f"transport {transport}: {reason}")

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
