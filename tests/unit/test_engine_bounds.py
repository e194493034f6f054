"""Budget and staging keep to their bounds."""

from __future__ import annotations

import pytest
from rows import fails

from xpyd_sidecar.engine.bounds import NOW, Budget, Chunk, Staging


def test_a_budget_takes_no_more_than_its_bound() -> None:
    budget = Budget(100)
    assert budget.reserve(60)
    assert not budget.reserve(41)
    assert budget.reserve(40)
    budget.free(60)
    assert budget.used == 40
    assert budget.reserve(60)


def test_no_holder_takes_all_so_that_a_stopped_peer_leaves_room_for_others() -> None:
    budget = Budget(1000)
    taken = 0
    while budget.reserve(10, "stopped"):
        taken += 10
    assert taken == 800
    assert not budget.reserve(10, "stopped")
    other = 0
    while budget.reserve(10, "other"):
        other += 10
    assert other == 160
    assert budget.reserve(10, "third")
    budget.free(other, "other")
    assert budget.reserve(150, "other")
    budget.free(800, "stopped")
    assert budget.used == 10 + 150


def test_staging_makes_chunks_when_first_needed_and_uses_them_again() -> None:
    made: list[Chunk] = []
    freed: list[int] = []

    def make() -> Chunk:
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
    staging = Staging(lambda: Chunk(None, memoryview(bytearray(4))), 1)
    staging.give(Chunk(None, memoryview(b""), lambda: home.append("back")))
    assert home == ["back"]
    assert staging.take() is not None
    assert staging.take() is None


def test_now_is_done() -> None:
    assert NOW.done()


@fails("B9", "a chunk counts as made before it is, so one that cannot be made is lost for ever")
def test_a_chunk_that_could_not_be_made_is_made_when_it_is_asked_for_again() -> None:
    chunk, tries = Chunk(None, memoryview(bytearray(8))), [MemoryError("pinning failed"), None]

    def make() -> Chunk:
        if (fault := tries.pop(0)) is not None:
            raise fault
        return chunk

    staging = Staging(make, 1)
    with pytest.raises(MemoryError):
        staging.take()
    assert staging.take() is chunk
    assert staging.take() is None
