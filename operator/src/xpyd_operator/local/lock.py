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
"""Whoever only looks for the holder has the lock for an instant; that must not turn a supervisor away."""


class LockHeld(LocalError):
    """Another process holds the lock."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock.

    Raises:
        Busy: another process does.
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
    for patience in range(TRIES, -1, -1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not patience:
                raise LockHeld(f"a supervisor runs already (pid {_written(path)})") from None
            time.sleep(PAUSE_S)
        else:
            return


def holder(path: Path) -> int:
    """Process id of the holder; 0 where nobody holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pid = _written(path)
        return pid if pid and procs.identify(pid) is not None else -1
    finally:
        os.close(descriptor)
    return 0


def _written(path: Path) -> int:
    try:
        return int(path.read_text("ascii").strip() or "0")
    except (OSError, ValueError):
        return 0
