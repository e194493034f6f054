"""What decode's I/O thread hands to the engine's thread, and what all of its connections share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.frames import Header
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.receiving import Ask
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.lookup_buffer import LookupBuffer
from xpyd_sidecar.threads.idle_polling import Inbox
from xpyd_sidecar.transport.gates import LoadTarget


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


class AskedBlocks(NamedTuple):
    """A try that a source owes. ``have``: by (region, block), what has come: nothing comes twice."""

    step: Ask
    target: LoadTarget | None
    have: bytearray
    granted: bool = False
    """Blocks of it could be pushed ahead: frames with others beside those asked for may still be on their way."""

    def wanted(self, header: Header) -> Header | None:
        """Of a frame that was pushed ahead, the blocks that are asked for; None: none of them."""
        first, count = overlap(header.first, header.blocks, *self.step.span(header.region))
        if not count or not self.step.plain:
            return None
        beside = (header.blocks - count) * self.step.units[header.region].size
        return header._replace(first=first, blocks=count, length=header.length - beside)

    def part(self, header: Header, wanted: Header, chunk: Chunk) -> Chunk:
        """The ``wanted`` blocks of a frame that lies in a chunk."""
        return chunk.part((wanted.first - header.first) * self.step.units[header.region].size, wanted.length)


@dataclass(frozen=True)
class ReceiverContext:
    """Of one decode rank. ``broken``: a try will not come."""

    me: LocalRank
    staging: Staging
    inbox: Inbox[Arrived | Broken]
    cover: bool
    ahead: LookupBuffer
    broken: Callable[[Ask, Outcome, str, bool], None]

    def arrived(self, step: Ask, region: int, first: int, blocks: int, chunk: Chunk | None,  # noqa: PLR0917  # as ``Arrived``
                size: int, way: str) -> None:
        """Blocks that were asked for are here."""
        self.inbox.append(Arrived(step.key, region, first, blocks, chunk, size, way, step.source, time.monotonic()))
