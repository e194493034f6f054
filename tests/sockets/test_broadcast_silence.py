"""Readers whose processes are stopped or killed: seen by the writer within 5 s, and dropped only where they are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from queue_peers import JOIN_S, KEY, end_all, hold, start

from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.remote import ASK_S, SEEN_MS, SILENCE_MS

SEEN_S = SILENCE_MS / 1000 - 1.0
"""Before a silent one counts as gone; a machine that is full is late."""


def test_a_reader_is_seen_within_five_seconds() -> None:
    assert SEEN_MS / 1000 + 2 * ASK_S < 5.0


def until(writer: Writer, holds: Callable[[], bool], seconds: float = SEEN_S) -> bool:
    """Look after the readers for at most so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writer.check()
        if holds():
            return True
        time.sleep(0.05)
    return False


def test_readers_that_are_stopped_are_seen_and_heard_again_and_those_that_are_killed_are_dropped() -> None:
    names = {"near", "far"}
    writer = Writer("q", local=("near",), remote=("far",), key=KEY)
    peers = {name: start(hold, writer.handle, name) for name in names}
    try:
        writer.wait_ready(JOIN_S)
        assert all(told.recv() == "joined" for _, told in peers.values())
        assert until(writer, lambda: not writer.silent() and "far" in writer._remotes._seen, JOIN_S)  # type: ignore[union-attr]
        for process, _ in peers.values():
            os.kill(process.pid or 0, signal.SIGSTOP)
        assert until(writer, lambda: set(writer.silent()) == names)
        for process, _ in peers.values():
            os.kill(process.pid or 0, signal.SIGCONT)
        assert until(writer, lambda: not writer.silent(), JOIN_S)
        assert writer.lost == {}
        writer.send(b"on", timeout_s=JOIN_S)
        assert all(told.recv() == "read" for _, told in peers.values())
        for process, _ in peers.values():
            os.kill(process.pid or 0, signal.SIGKILL)
        assert until(writer, lambda: writer.lost.keys() == names)
        assert writer.silent() == ()
    finally:
        writer.close()
        end_all(peers)
