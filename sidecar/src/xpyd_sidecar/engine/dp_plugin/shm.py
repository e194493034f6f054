"""Step sync of data-parallel ranks through memory that all ranks of a host share. There is no coordinator: each rank reads
all lines. ``dp.frames`` says what the values mean, ``dp.rank`` and ``dp.coordinator`` have the rules.

One line of 64 bytes per rank, eight words of 8 bytes, stored by that rank alone:

    | step | vote | leaving | local | beat | parked | free | free |
      0      1      2         3       4      5        6      7

``step`` is stored before ``vote`` and ``leaving``; a reader reads votes and leaving of all before any step. Words are
aligned, so none is torn, and x86 makes stores visible in their order and keeps loads in theirs; other processors do not,
and are refused. A rank that sleeps (``parked``) is woken by a datagram. Python has no memory fence between storing
``parked`` and reading the lines once more, so a wake-up may be missed: the listener reads the lines at least every 50 ms.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from xpyd_sidecar.dp.coordinator import join
from xpyd_sidecar.dp.frames import Grant, Want
from xpyd_sidecar.dp.watch import PeerWatch
from xpyd_sidecar.engine.dp_plugin.links import Listener, Rules
from xpyd_sidecar.errors import ConfigError

logger = logging.getLogger(__name__)

LINE: Final = 64
WORDS: Final = LINE // 8
STEP, VOTE, LEAVING, LOCAL, BEAT, PARKED = range(6)
FOLDER: Final = Path("/dev/shm")  # noqa: S108 (mkstemp makes the files)
"""Memory, and emptied by a reboot."""
MACHINES: Final = ("x86_64", "AMD64")


def usable() -> bool:
    """Whether this machine's processor makes stores visible in their order, as the protocol needs: x86-64 alone."""
    return platform.machine() in MACHINES


def make(size: int) -> Path:
    """Make a file of ``size`` zeroed lines in ``FOLDER``; the caller unlinks it when all ranks have opened it.

    Raises:
        OSError: the file cannot be made.
    """
    handle, name = tempfile.mkstemp(prefix="xpyd-dp-", dir=FOLDER)
    try:
        os.ftruncate(handle, LINE * size)
    except OSError:
        Path(name).unlink()
        raise
    finally:
        os.close(handle)
    return Path(name)


class ShmLink(Listener):
    """One data-parallel rank's end of the shared memory. Its listener thread marks this rank as alive, watches the others,
    and passes on what they ask for, which wakes the engine core's thread.
    """

    def __init__(self, rules: Rules, rank: int, size: int, epoch: int, *, path: Path, timeout_s: float) -> None:
        """Map the lines in the file ``path`` and bind the socket for wake-ups. ``size``: number of ranks; ``timeout_s``:
        seconds without a sign of life after which another rank counts as dead.

        Raises:
            ConfigError: the file cannot be opened: the ranks are not on one host.
            OSError: the socket cannot be bound.
        """
        others = [one for one in range(size) if one != rank]
        super().__init__("xpyd-dp-listener", rules, PeerWatch(others, time.monotonic(), timeout_s), "DP rank")
        self._rank, self._size, self._epoch, self._others = rank, size, epoch, others
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), LINE * size)
        except (OSError, ValueError) as error:
            raise ConfigError(f"XPYD_DP_SYNC=shm: DP rank {rank} cannot open {path} of rank 0 ({error}); "
                              "all ranks must be on one host, or write rpc") from None
        self._words = memoryview(self._memory).cast("q")
        self._beats = dict.fromkeys(others, 0)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(self._address(rank))
        self._caller = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def _address(self, rank: int) -> str:
        return f"\0xpyd-dp-{self._epoch:x}.{rank}"

    def _column(self, word: int) -> list[int]:
        words = self._words
        return [words[line * WORDS + word] for line in range(self._size)]

    def _store(self, word: int, value: int) -> None:
        self._words[self._rank * WORDS + word] = value

    def send(self, want: Want) -> None:
        """Store this rank's state in its line, and wake the ranks that sleep. Never blocks."""
        self._write(want)
        parked = self._column(PARKED)
        self._wake(rank for rank in self._others if parked[rank])

    def _write(self, want: Want) -> None:
        self._store(LOCAL, want.local)
        self._store(STEP, want.step)
        self._store(VOTE, want.vote)
        self._store(LEAVING, int(want.leaving))

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            # A full socket wakes its rank anyway, and one that is not there any more is missed by the watch.
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                self._caller.sendto(b"w", self._address(rank))

    def read_grant(self) -> Grant | None:
        """What follows from all ranks' lines as they are now (``dp.coordinator.join``); never None."""
        votes, leaving = self._column(VOTE), self._column(LEAVING)
        return join(self._epoch, votes, self._column(STEP), [bool(one) for one in leaving])

    def park(self, *, parked: bool) -> None:
        """Store in this rank's line whether its engine core sleeps and has to be woken."""
        self._store(PARKED, int(parked))

    def beat(self) -> None:
        """Count this rank's beat up in its line, as a sign of life."""
        self._store(BEAT, self._words[self._rank * WORDS + BEAT] + 1)

    def round(self, seconds: float) -> None:
        """Wait up to ``seconds`` for a wake-up, then read all lines: who is alive, and what the ranks ask for."""
        self._socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            self._socket.recv(16)
        now = time.monotonic()
        beats = self._column(BEAT)
        for rank in self._others:
            if beats[rank] != self._beats[rank]:
                self._beats[rank] = beats[rank]
                self.watch.on_frame(rank, now)
        grant = self.read_grant()
        assert grant is not None
        self.rules.on_grant(grant)

    def close(self) -> None:
        """End the listener thread. The line stays in memory, since other ranks may still read it."""
        self.stop()

    def close_sockets(self) -> None:
        """Close both sockets; called by the listener thread when it ends."""
        self._socket.close()
        self._caller.close()
