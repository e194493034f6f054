"""Whole answers and first events (``_answer.c``) against the same stream read event by event in Python."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from unittest.mock import patch

from fuzz import reads
from fuzz.reads import IDS, UNFRAMED, Given
from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.relay import fast, plain
from xpyd_sidecar.router.stream import token_recorder
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of

MODULES = ("xpyd_sidecar.router.relay._answer",)
TOKENS = reads.TOKENS
seeds = reads.seeds
TAKE = fast.take


def check(data: bytes) -> Hashable:
    """The client gets the same, and the same is known of the stream, with and without ``take``."""
    given = reads.given(data)
    taken = 0

    def counted(*args: Any) -> Any:
        nonlocal taken
        found = TAKE(*args)
        taken += found is not None
        return found

    with patch.object(token_recorder, "take", plain.take):
        expected = read(given)
    if isinstance(expected[-1][-1], str):
        TAKE(b"".join(given.reads), given.api == "chat", "", 0, bytearray())
        return None  # what was noted cannot be read either way
    with patch.object(token_recorder, "take", counted):
        found = read(given)
    assert found == expected, f"with the call {found}, without {expected}"
    return taken, expected[1][:2], bool(expected[1][2])


def read(given: Given) -> tuple[Any, ...]:
    """What the client gets, how the stream ends, and what is known of it then."""
    reads.forget()
    position = Position(given.api, FailoverMode.CONTINUE, asked_ids=bool(given.flags & IDS), wants_usage=True)
    stream = stream_of(position, framed=not given.flags & UNFRAMED)
    out = []
    for data in given.reads:
        if stream.failure or stream.done:
            break
        out.append(stream.feed(data))
    return (b"".join(out), (stream.ended, stream.done, stream.failure, stream.kind, stream._clean), reads.known(position))
