"""Log files of units: kept small, read from the end, followed."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

LIMIT = 16 << 20
"""Bytes at which a log is cut."""
KEEP = 4 << 20
"""Bytes of its end that are kept then, in ``<log>.1``."""
TAIL_BLOCK = 64 << 10
TAIL_MAX = 8 << 20
"""Bytes that are read at most to find the last lines."""


def bound(path: Path, limit: int = LIMIT, keep: int = KEEP) -> bool:
    """Cut a log that has grown beyond ``limit``; whether it was cut.

    Its writers have it open for appending, so they go on at the new end. A line written between copy and cut is lost, which
    is the price of not standing between a process and its log: it goes on when nobody watches it.
    """
    try:
        if path.stat().st_size <= limit:
            return False
        with open(path, "r+b") as file:
            file.seek(-keep, os.SEEK_END)
            old = path.with_name(f"{path.name}.1")
            old.write_bytes(file.read())
            file.truncate(0)
    except OSError:
        return False
    return True


def tail(path: Path, lines: int) -> list[str]:
    """The last lines; none where there is no such file."""
    if lines <= 0:
        return []
    try:
        with open(path, "rb") as file:
            position = file.seek(0, os.SEEK_END)
            raw = b""
            while position > 0 and raw.count(b"\n") <= lines and len(raw) < TAIL_MAX:
                step = min(TAIL_BLOCK, position)
                position -= step
                file.seek(position)
                raw = file.read(step) + raw
    except OSError:
        return []
    return list(deque(raw.decode("utf-8", "replace").splitlines(), maxlen=lines))


class Follower:
    """New whole lines of a growing log, also after it was cut or made anew."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self.path = path
        self._rest = b""
        self._inode = 0
        self._position = 0
        if from_end:
            try:
                stat = path.stat()
                self._inode, self._position = stat.st_ino, stat.st_size
            except OSError:
                self._position = 0

    def read(self) -> list[str]:
        """Lines that were finished since the last call, at most 1 MiB of them."""
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._position:
                    self._inode, self._position, self._rest = stat.st_ino, 0, b""
                file.seek(self._position)
                raw = file.read(1 << 20)
        except OSError:
            self._inode = 0  # the next file of this name is another one, even if it gets the same number
            return []
        self._position += len(raw)
        *whole, self._rest = (self._rest + raw).split(b"\n")
        if len(self._rest) > 1 << 20:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode("utf-8", "replace") for line in whole]
