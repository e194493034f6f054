"""What one rank takes of a try, and the instructions of the machine that fetches it (``kv.fetching``)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buffer import BufferPlace
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Ask, Busy, ManifestTaken
from xpyd_sidecar.kv.selection import Piece


class TryError(ValueError):
    """Prefill has told what there cannot be, or twice."""


class FetchPlan(NamedTuple):
    """What a rank takes of a try from one source."""

    arrays: tuple[ArrayLayout, ...]
    """Of the source."""
    parts: Mapping[int, ArrayPart]
    """By array of the source; empty: nothing."""
    takers: int
    """How many ranks take from this source."""
    identity: bytes = b""
    """Of the prompt, and of the weights by which it is computed."""
    slots: int = 0
    """(Array, block) pairs that the source has for all of the prompt, as far as they are taken."""
    ahead: bool = False
    """Fetch also before there are blocks, whether prefill is short of room or not."""

    @property
    def content(self) -> bytes:
        """What is fetched of another try is the same where this is."""
        taken = repr((self.arrays, sorted(self.parts.items()))).encode()
        return hashlib.sha256(self.identity + taken).digest()


class SayFrame(NamedTuple):
    """Send ASK, TAKEN or BUSY over a session."""

    link: int
    key: Key
    body: Ask | ManifestTaken | Busy


class Fetch(NamedTuple):
    """Bring these bytes here; answered by ``on_fetched`` or ``on_fetch_failed``."""

    number: int
    link: int
    key: Key
    source: int
    manifest: int
    batch: tuple[Piece, ...]
    at: int | BufferPlace | None
    """Where they go in the ring, or in the buffer; None: into their blocks."""


class Place(NamedTuple):
    """Write what was fetched into its blocks; answered by ``on_placed``."""

    number: int
    key: Key
    source: int
    batch: tuple[Piece, ...]
    at: int | BufferPlace


class BlocksArrived(NamedTuple):
    """Blocks are in their places, and right: (array of the source, first, count) of each piece."""

    key: Key
    source: int
    blocks: tuple[tuple[int, int, int], ...]
    size: int


class WrongSum(NamedTuple):
    """What has come over a session is not what was told: it ends, with the loads that use it."""

    link: int
    key: Key


class LeftBuffer(NamedTuple):
    """A try can never be whole: something that was taken of it has left the buffer, or it was given up before."""

    key: Key
    source: int


Step = SayFrame | Fetch | Place | BlocksArrived | WrongSum | LeftBuffer
