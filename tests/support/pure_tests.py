"""Tests that open sockets or start processes depend on the machine; those in tests/unit may not, and fail where they try.

The interpreter tells a hook what is done in this process (PEP 578). What compiled code does is not seen: ZMQ's sockets, and
those that uvloop opens by itself. Sockets that are connected to each other when they are made, as those of an event loop
that wakes itself, are not opened by ``bind``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

WORDS = {"socket.bind": "binds a socket", "subprocess.Popen": "starts a process", "os.fork": "forks",
         "os.forkpty": "forks", "os.posix_spawn": "starts a process"}
_pure: list[str] = []
"""The test that runs now, where it may do none of this."""
_hooked: list[bool] = []
"""A hook stays as long as the process."""


def _hook(event: str, _arguments: tuple[Any, ...]) -> None:
    if _pure and event in WORDS:
        pytest.fail(f"{_pure[-1]} {WORDS[event]}, so its file belongs to tests/sockets")


@contextmanager
def pure(name: str) -> Iterator[None]:
    """Meanwhile sockets and processes fail the test of this name."""
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    _pure.append(name)
    try:
        yield
    finally:
        _pure.pop()
