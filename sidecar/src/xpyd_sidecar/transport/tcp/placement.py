"""Where the payload of a frame goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.frames import Header
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.moves import Scatter


class PayloadPlace(NamedTuple):
    """Where the payload of a frame goes. ``gate``: each write happens inside of it; ``body``: the bytes, of small ones.

    ``after``: the frames that are expected next, so many at most; their places are inside the same gate.
    """

    scatter: Scatter | None
    gate: Gate | None = None
    body: memoryview = memoryview(b"")
    after: Callable[[int], list[Expected]] | None = None

    @classmethod
    def of(cls, length: int) -> PayloadPlace:
        """Memory of its own."""
        body = memoryview(bytearray(length))
        return cls(packed(body, 1, cover=False), None, body) if length else NOWHERE

    def total(self) -> int:
        """The payload sum of what has come, if it was summed up."""
        return frames.total(self.scatter.sums()) if self.scatter is not None else 0


class Expected(NamedTuple):
    """A frame that may come: what its header begins with (``frames.known``); that header, without the sum; its place."""

    head: bytes
    header: Header
    place: PayloadPlace


NOWHERE: Final = PayloadPlace(None)


def packed(memory: memoryview, blocks: int, *, cover: bool, size: int = 0) -> Scatter:
    """Blocks one after the other, of ``size`` bytes together, or as many as the memory has.

    Raises:
        ValueError: no blocks, or more than the memory holds.
    """
    return Scatter(memory, (size or len(memory)) // max(1, blocks), blocks, None, 0, 0, cover)
