"""Blocks through memory that both processes have mapped: two copies, for peers that may not read each other's memory.

    prefill                                             decode
    copy into a free slot (the copy is freed)
    OFFER(offset, size, checksum) ───────────────────▶  copy from the slot to where they belong
    the slot is free              ◀───────────────────  TAKEN

An arena belongs to one session. Its owner writes into a slot only while it is free, and into none after the session has
ended: what a peer still reads then is what was offered.

The file has a name only during the handshake: once the peer has it mapped, the name is removed, and the kernel frees the
memory when both are gone, however they end. An owner killed in between leaves a name without a lock, which whoever makes an
arena in that folder a minute later removes. Not sooner: an owner that lives has not locked its file yet when it has made
it. All memory is reserved at the start, so that a full file system is an error and no SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import Blocks, Session
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.offers import OfferedBlocks, OfferLink
from xpyd_sidecar.transport.shm.mapped import map_file
from xpyd_sidecar.transport.shm.process_vm import TICKET_BYTES

PREFIX: Final = "xpyd-kv-"
HEAD_BYTES: Final = 4096
ARENA_BYTES: Final = 16 << 20
"""Of one session; more where two blocks need more."""
YOUNG_S: Final = 60.0
"""By the clock of files, which may jump: then a name that nobody owns stays for longer."""


class ArenaLink(OfferLink):
    """Prefill's side: owns the file and its slots."""

    name = "arena"

    def __init__(self, session: Session, folder: Path, largest: int) -> None:
        """Make one with slots of ``largest`` bytes.

        Raises:
            OSError: the folder cannot be written, or has no room.
        """
        sweep(folder)
        self._slot = max(largest, frames.FRAME_BYTES)
        slots = max(2, ARENA_BYTES // self._slot)
        super().__init__(session, slots)
        self.size = HEAD_BYTES + slots * self._slot
        self._path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, self.size)
            self._map = mmap.mmap(self._fd, self.size)
        except BaseException:
            self.unname()
            raise
        self._map[:TICKET_BYTES] = self.ticket
        self._base = address_of(memoryview(self._map))
        self._free: deque[int] = deque(HEAD_BYTES + at * self._slot for at in range(slots))

    def shown(self) -> bodies.Arena:
        """What the peer needs to map it."""
        return bodies.Arena(self._path.name, self.size, self.ticket)

    def unname(self) -> None:
        """Remove the name and the lock; again: nothing."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1

    def put(self, key: Key, blocks: Blocks, sent: Callable[[], None], *, most: int = frames.FRAME_BYTES) -> None:
        """Copy blocks into slots as these are free."""
        super().put(key, blocks, sent, most=min(most, self._slot))

    def _offer(self, one: OfferedBlocks) -> OfferedBlocks:
        slot = self._free.popleft()
        ctypes.memmove(self._base + slot, address_of(one.blocks.data), len(one.blocks.data))
        self._tell(one, slot, one.blocks.total())
        one.done()
        return one._replace(where=slot, done=_nothing)

    def _read(self, one: OfferedBlocks) -> None:
        self._free.append(one.where)

    def close(self) -> None:
        """Forget what waits; the memory ends with the peer's mapping."""
        self.unname()
        super().close()
        self._map.close()


class ArenaReader:
    """Decode's side."""

    name: Literal["arena"] = "arena"

    def __init__(self, peer: str, folder: Path, shown: bodies.Arena) -> None:
        """Map what prefill has made.

        Raises:
            OSError: there is no such file in this folder: it is not the same one.
            ValueError: the file is not what prefill says.
        """
        if not shown.name.startswith(PREFIX) or "/" in shown.name or not HEAD_BYTES < shown.size < 1 << 40:
            raise ValueError("not an arena's name and size")
        if len(shown.ticket) != TICKET_BYTES:
            raise ValueError("not an arena's ticket")
        self._map = map_file(folder / shown.name, shown.size, shown.ticket, flags=os.O_NOFOLLOW)
        self._peer = peer
        self._size = shown.size
        self._base = address_of(memoryview(self._map))

    def read(self, offer: bodies.Offer, into: Scatter) -> str:
        """Read what lies at an offset to its places; how that was done.

        Raises:
            ProtocolError: it is not in the arena.
        """
        if not HEAD_BYTES <= offer.address <= self._size - offer.size:
            raise ProtocolError(self._peer, f"offered {offer.size} bytes at {offer.address} of an arena of {self._size}")
        into.copy(self._base + offer.address)
        return self.name

    def close(self) -> None:
        """Let go of the memory."""
        self._map.close()


def sweep(folder: Path) -> None:
    """Remove names whose owners have died in the middle of a handshake.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in folder.iterdir():
        if not path.name.startswith(PREFIX):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone, or another user's: not ours to remove
        try:
            if time.time() - os.fstat(fd).st_mtime < YOUNG_S:
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except (BlockingIOError, FileNotFoundError):
            continue  # its owner lives, or another one has swept
        finally:
            os.close(fd)


def _nothing() -> None:
    """The copy of what is on offer is freed already."""
