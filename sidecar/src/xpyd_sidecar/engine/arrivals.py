"""What decode's I/O thread hands to the engine's thread, and what all of its connections share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from xpyd_sidecar.engine.ahead import Ahead
from xpyd_sidecar.engine.bounds import Chunk, Staging
from xpyd_sidecar.engine.gates import Target
from xpyd_sidecar.engine.links.grouping import Grouping
from xpyd_sidecar.engine.links.near import Ways
from xpyd_sidecar.engine.links.reading import Reading
from xpyd_sidecar.engine.nap import Inbox
from xpyd_sidecar.engine.session import Me
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.receiving import Ask


class Arrived(NamedTuple):
    """Intact blocks: in a chunk, which the reader gives back, or in their places (None). ``way``: name of the link."""

    key: Key
    region: int
    first: int
    blocks: int
    chunk: Chunk | None
    size: int
    way: str
    source: int
    at: float
    """When, by the monotonic clock."""


class Broken(NamedTuple):
    """A source will not send a try."""

    key: Key
    outcome: Outcome
    reason: str
    final: bool
    source: int


class Asked(NamedTuple):
    """A try that a source owes. ``have``: by (region, block), what has come: nothing comes twice."""

    step: Ask
    target: Target | None
    have: bytearray


@dataclass(frozen=True)
class Shared:
    """Of one decode rank. ``largest_frame``: bytes of DATA that are taken at once; ``broken``: a try will not come."""

    me: Me
    ways: Ways
    staging: Staging
    inbox: Inbox[Arrived | Broken]
    cover: bool
    largest_frame: int
    ahead: Ahead | None
    broken: Callable[[Ask, Outcome, str, bool], None]
    grouping: Grouping | None = None
    """Makes links over NCCL, where there is a GPU for it."""
    reading: Reading | None = None
    """Makes links over NIXL, where it is there."""
