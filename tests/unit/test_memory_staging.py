"""Staging keeps to its bound."""

from __future__ import annotations

import pytest

from xpyd_sidecar.memory.marks import NOW
from xpyd_sidecar.memory.staging import Chunk, Staging


def test_staging_makes_chunks_when_first_needed_and_uses_them_again() -> None:
    made: list[Chunk] = []
    freed: list[int] = []

    def make(_: int) -> Chunk:
        made.append(Chunk(None, memoryview(bytearray(8))))
        return made[-1]

    staging = Staging(make, 2)
    assert made == []
    first, second = staging.take(), staging.take()
    assert staging.take() is None
    staging.on_free(lambda: freed.append(1))
    assert first is not None
    staging.give(first)
    assert freed == [1]
    assert staging.take() is first
    assert len(made) == 2
    assert second is made[1]


def test_a_chunk_with_a_home_goes_there() -> None:
    home: list[str] = []
    staging = Staging(lambda _: Chunk(None, memoryview(bytearray(4))), 1)
    staging.give(Chunk(None, memoryview(b""), lambda: home.append("back")))
    assert home == ["back"]
    assert staging.take() is not None
    assert staging.take() is None


def test_now_is_done() -> None:
    assert NOW.done()


def test_a_chunk_that_could_not_be_made_is_made_when_it_is_asked_for_again() -> None:
    chunk, tries = Chunk(None, memoryview(bytearray(8))), [MemoryError("pinning failed"), None]

    def make(_: int) -> Chunk:
        if (fault := tries.pop(0)) is not None:
            raise fault
        return chunk

    staging = Staging(make, 1)
    with pytest.raises(MemoryError):
        staging.take()
    assert staging.take() is chunk
    assert staging.take() is None
