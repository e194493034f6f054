"""Where a piece lies in prefill's store, as a request says it: a begin, and stretches of one length, equally far apart."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

_PLACE: Final = struct.Struct("<QQQII")


def place_of(stretches: Sequence[tuple[int, int]]) -> bytes:
    """A piece (``kv.selection.Piece``) as bytes: offset, size, step u64, count, 0 u32, little endian.

    Raises:
        ValueError: they are of different lengths, or not equally far apart.
    """
    (begin, size), count = stretches[0], len(stretches)
    step = stretches[1][0] - begin if count > 1 else 0
    if any(one != (begin + nth * step, size) for nth, one in enumerate(stretches)):
        raise ValueError(f"stretches that are no comb: {stretches[:3]}")
    return _PLACE.pack(begin, size, step, count, 0)
