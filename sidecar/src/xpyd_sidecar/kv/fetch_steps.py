"""What one rank of decode takes of a try, and the instructions of the machine that fetches it (``kv.fetching``).

A try is one attempt to transfer the KV of a prompt (``kv.keys.Key``); a source is one rank of prefill that has part of it.
"""

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
    """What prefill has sent about a try cannot be right: it names what does not exist, or repeats a manifest."""


class FetchPlan(NamedTuple):
    """What one rank of decode takes of a try from one source: which heads of which arrays, and when."""

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
        """SHA-256 of prompt, weights and what is taken: tries for which it is equal fetch the same bytes."""
        taken = repr((self.arrays, sorted(self.parts.items()))).encode()
        return hashlib.sha256(self.identity + taken).digest()


class SayFrame(NamedTuple):
    """Instruction: send ``body`` (ASK, TAKEN or BUSY) about the try ``key`` over the session numbered ``link``."""

    link: int
    key: Key
    body: Ask | ManifestTaken | Busy


class Fetch(NamedTuple):
    """Instruction: fetch pieces of a manifest over the session numbered ``link``.

    ``source``: index among the sources of the load. Answered once with ``number``, by ``Fetching.on_fetched`` or
    ``Fetching.on_fetch_failed``.
    """

    number: int
    link: int
    key: Key
    source: int
    manifest: int
    batch: tuple[Piece, ...]
    at: int | BufferPlace | None
    """Where they go in the ring, or in the buffer; None: into their blocks."""


class Place(NamedTuple):
    """Instruction: copy fetched pieces from ``at`` in the ring or the buffer into their blocks of the KV cache.

    Answered once with ``number``, by ``Fetching.on_placed`` or ``Fetching.on_not_placed``.
    """

    number: int
    key: Key
    source: int
    batch: tuple[Piece, ...]
    at: int | BufferPlace


class BlocksArrived(NamedTuple):
    """Report: blocks of a try are in their places in the KV cache, with right checksums where these are wanted.

    ``blocks``: (array of the source, first block of the prompt, number of blocks) of each piece. ``size``: bytes of all.
    """

    key: Key
    source: int
    blocks: tuple[tuple[int, int, int], ...]
    size: int


class WrongSum(NamedTuple):
    """Instruction: end the session numbered ``link``, over which bytes of the try ``key`` came with a wrong checksum.

    The loads that use the session fail with it.
    """

    link: int
    key: Key


class LeftBuffer(NamedTuple):
    """Report: a try can never be complete on this rank, since it was given up before or KV of it has left the buffer.

    That KV does not come again: prefill was told TAKEN, and has freed it.
    """

    key: Key
    source: int


Step = SayFrame | Fetch | Place | BlocksArrived | WrongSum | LeftBuffer
