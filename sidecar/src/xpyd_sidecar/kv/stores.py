"""Bodies of the frames by which prefill puts KV into decode's lookup buffer, and by which decode pulls."""

from __future__ import annotations

import msgspec


class Expect(msgspec.Struct, frozen=True):
    """Body of EXPECT: decode waits for a transfer and has no blocks for it yet; prefill may ask for room (STORE)."""

    regions: int
    """Arrays of blocks on this rank; prefill asks for nothing unless it has as many."""
    block_bytes: int
    """Bytes of one block of all arrays together; the same."""
    checksum: bool
    """Decode wants payloads covered."""


class Busy(msgspec.Struct, frozen=True):
    """Body of BUSY: buffer and host pool are full."""

    retry_s: float
    """Prefill asks again for this transfer no sooner."""


class Fetch(msgspec.Struct, frozen=True):
    """Body of FETCH: decode, which pulls, asks for the blocks of its READY up to ``until``."""

    until: int
