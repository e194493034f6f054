"""Host memory as who copies by torch and who copies by address see it. Free of torch, like the threads that use it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Chunk(NamedTuple):
    """A stretch of one allocation, as a tensor of bytes and as bytes; the allocation lives as long as any part of it."""

    tensor: Any
    """None where nobody copies by torch."""
    view: memoryview

    def part(self, start: int, size: int) -> Chunk:
        """``size`` bytes of it from ``start`` on."""
        tensor = self.tensor[start:start + size] if self.tensor is not None else None
        return Chunk(tensor, self.view[start:start + size])
