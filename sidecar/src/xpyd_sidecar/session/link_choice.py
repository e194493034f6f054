"""Which link a session gets: what both sides want, where they run, and what was tried.

    decode                                                     prefill
    HELLO (its host, empty where transport is tcp)  ────────▶
                          ◀──────── WELCOME (near: a ticket in its memory; none on another host or where transport is tcp)
    reads the ticket
    LINK process_vm                                 ────────▶  done
    or LINK make_arena                              ────────▶  makes a file in the folder that both share
                          ◀──────── ARENA
    maps it; LINK arena or LINK tcp                 ────────▶  removes the file's name

Decode asks for nothing before its last LINK, so prefill always knows the way before it puts anything.

Where the ticket could be read and the copies cannot, the arena is tried then:

    TAKEN (not read, and why)                       ────────▶  offers nothing more; makes a file
                          ◀──────── ARENA
    maps it; LINK arena or LINK tcp                 ────────▶  what was not read, and all that follows, goes that way

Where both have a GPU that can form an NCCL group with the other's, HELLO and WELCOME say so, and decode answers LINK nccl.
Where both have NIXL and are on different hosts (or one of them insists on it), WELCOME shows prefill's memory, and decode
answers LINK nixl when it has reached it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from xpyd_sidecar.kv import bodies
from xpyd_sidecar.transport.shm.arena import ArenaReader
from xpyd_sidecar.transport.shm.process_vm import ProcessReader

OTHERWISE: Final = "set kv.sharedMemory, so that both have a folder to share, or kv.transport: auto"
"""What to do where transport is shm and copies cannot be read."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class LinkOptions(NamedTuple):
    """What this side is set to. ``folder``: where arenas are made, the same one on both sides; None: none are.

    ``gpu``: of this rank, if NCCL can be used here, else ``no_gpu`` says why not. ``one_gpu``: peers may be on it, too.
    ``nixl``: if NIXL can be used here, else ``no_nixl`` says why not; both empty: nobody has looked.
    """

    transport: str = "auto"
    folder: Path | None = None
    gpu: bodies.Gpu | None = None
    no_gpu: str = "no GPU"
    one_gpu: bool = False
    nixl: bodies.NixlReader | None = None
    no_nixl: str = ""

    @property
    def host(self) -> str:
        """What this host is called by a peer that may run on it; empty where no way within it is wanted."""
        return "" if self.transport in {"tcp", "nccl", "rdma"} else host()

    @property
    def reads(self) -> bodies.NixlReader | None:
        """What this side says of itself where memory is to be read over NIXL."""
        return self.nixl if self.transport in {"auto", "rdma"} else None

    @property
    def group(self) -> bodies.Gpu | None:
        """The GPU, where a group is wanted."""
        return self.gpu if self.transport in {"auto", "nccl"} else None


OfferReader = ProcessReader | ArenaReader
"""Decode's side of a link beside TCP within a host."""


def host() -> str:
    """What tells two kernels apart; containers of one host have the same."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def apart(ours: LinkOptions, theirs: str) -> str:
    """Why prefill sees no way but TCP to a decode that names its host as ``theirs``; empty: there may be one."""
    if ours.transport in {"tcp", "nccl", "rdma"}:
        return f"prefill's transport is {ours.transport}"
    if not theirs:
        return "decode's transport is tcp"
    return "" if theirs == ours.host else "not on one host"


def ungrouped(ours: LinkOptions, theirs: bodies.Gpu | None) -> str:
    """Why prefill sees no NCCL group with a decode whose GPU is ``theirs``; empty: there may be one."""
    if ours.group is None:
        return f"prefill's transport is {ours.transport}" if ours.gpu is not None else f"nccl: {ours.no_gpu} at prefill"
    if theirs is None:
        return "nccl: decode has or wants none"
    if theirs.nccl != ours.group.nccl:
        return f"nccl: version {ours.group.nccl} at prefill, {theirs.nccl} at decode"
    if theirs.name == ours.group.name and not ours.one_gpu:
        return "nccl: both on one GPU"
    return ""


def unread(ours: LinkOptions, theirs: bodies.NixlReader | None) -> str:
    """Why prefill's memory is not shown to a decode that says ``theirs`` of itself; empty: it is."""
    if ours.reads is None:
        wanted = ours.transport in {"auto", "rdma"}
        return f"nixl: {ours.no_nixl or 'none'} at prefill" if wanted else f"prefill's transport is {ours.transport}"
    if theirs is None:
        return "nixl: decode has or wants none"
    return "" if min(theirs.piece, theirs.pieces) > 0 else "nixl: decode takes no pieces"


def try_process(peer: str, welcome: bodies.DataWelcome) -> tuple[OfferReader | None, str]:
    """Read prefill's ticket: a reader, or why there is none."""
    if welcome.near is None:
        return None, welcome.reason or "prefill offers no other way"
    reader = ProcessReader(peer, welcome.near)
    reason = reader.probe()
    return (None, reason) if reason else (reader, "")


def try_arena(peer: str, folder: Path | None, shown: bodies.Arena) -> tuple[OfferReader | None, str]:
    """Map prefill's arena: a reader, or why there is none."""
    if not shown.name or folder is None:
        return None, f"arena: {shown.reason or 'no folder to share'}"
    try:
        return ArenaReader(peer, folder, shown), ""
    except (OSError, ValueError) as error:
        return None, f"arena: {error}"
