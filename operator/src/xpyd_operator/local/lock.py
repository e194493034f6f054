"""One supervisor per service: an advisory lock that the kernel releases when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xpyd_operator.errors import LocalError
from xpyd_operator.local import procs

TRIES = 10
PAUSE_S = 0.02
LOOKERS_S = 60.0
"""Whoever only looks for the holder shares the lock for an instant, which is long where it has no processor meanwhile; that
must not turn a supervisor away.
"""


class LockHeld(LocalError):
    """Another process holds the lock."""


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock.

    Raises:
        LockHeld: another process does.
        LocalError: the file cannot be used.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from None
    try:
        _take(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    patience, end = TRIES, time.monotonic() + LOOKERS_S
    while not _locked(descriptor, fcntl.LOCK_EX):
        if not _locked(descriptor, fcntl.LOCK_SH):
            patience -= 1
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        if patience < 0 or time.monotonic() > end:
            raise LockHeld(f"a supervisor runs already (pid {_written(path)})")
        time.sleep(PAUSE_S)


def _locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def holder(path: Path) -> int:
    """Process id of the holder; 0 where nobody holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        if _locked(descriptor, fcntl.LOCK_SH):
            return 0
        pid = _written(path)
        return pid if pid and procs.identify(pid) is not None else -1
    finally:
        os.close(descriptor)


def _written(path: Path) -> int:
    try:
        return int(path.read_text("ascii").strip() or "0")
    except (OSError, ValueError):
        return 0
