"""How an array of blocks is packed, and which of its heads a rank takes. Free of numpy: routers know messages, too."""

from __future__ import annotations

from typing import NamedTuple


class ArrayLayout(NamedTuple):
    """What one array of a rank of prefill's is like."""

    heads: int
    head_bytes: int
    """Of one block."""
    run: int
    """Blocks of a run (``packing.run_blocks``)."""


class ArrayPart(NamedTuple):
    """Heads of one array of a source, and where they go."""

    into: int
    """The taker's array."""
    head: int
    """The first, of those of the source."""
    heads: int
    at: int
    """The taker's head that the first one becomes."""
    table: int = 0
    """Which of a request's tables the taker's array belongs to."""
