"""Threads of this process, by the beginnings of their names."""

from __future__ import annotations

import threading
import time

ENDS_S = 60.0


def running(*names: str) -> list[str]:
    """Names of the threads that run and are called so, or begin so."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def until_none_runs(*names: str) -> None:
    """Wait for all of these to end: who stops one waits for it for some seconds only."""
    end = time.monotonic() + ENDS_S
    while left := running(*names):
        assert time.monotonic() < end, left
        time.sleep(0.002)
