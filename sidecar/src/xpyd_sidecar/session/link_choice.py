"""Which link a session gets: what both sides want, and where they run.

    decode                                                     prefill
    HELLO (its host, a mailbox; empty where transport is tcp) ──▶
                          ◀──────── WELCOME (shared: its memory; none on another host or where transport is tcp)
    LINK map (a secret out of the mailbox)          ────────▶  sends the memory's descriptor into it
                          ◀──────── SHARED
    maps it; LINK shm, or LINK tcp                  ────────▶

Decode asks for nothing before its last LINK, so prefill always knows the way before it puts anything.

Where both are set to nccl, HELLO and WELCOME name GPUs that can form a group, and decode answers LINK nccl.
Where both have NIXL and are on different hosts (or one of them insists on it), WELCOME shows prefill's memory, and decode
answers LINK nixl when it has reached it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from xpyd_sidecar.kv import bodies

OTHERWISE: Final = "set kv.sharedMemory, so that both have a folder to share, or kv.transport: auto"
"""What to do where transport is shm and there is no way to share memory."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class LinkOptions(NamedTuple):
    """What this side is set to. ``folder``: where mailboxes are, the same one on both sides; None: in no folder.

    ``gpu``: of this rank, where transport is nccl. ``one_gpu``: peers may be on it, too.
    ``nixl``: if NIXL can be used here, else ``no_nixl`` says why not; both empty: nobody has looked.
    """

    transport: str = "auto"
    folder: Path | None = None
    gpu: bodies.Gpu | None = None
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


def refusal(transport: str, reason: str) -> str:
    """Why a session that would have to take TCP is none, where ``transport`` is something else."""
    return f"transport {transport}: {reason}" + (f"; {OTHERWISE}" if transport == "shm" else "")


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
    if ours.gpu is None:
        return f"decode's transport is nccl, prefill's is {ours.transport}"
    if theirs is None:
        return "decode's transport is not nccl"
    if theirs.nccl != ours.gpu.nccl:
        return f"nccl: version {ours.gpu.nccl} at prefill, {theirs.nccl} at decode"
    if theirs.name == ours.gpu.name and not ours.one_gpu:
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
