"""Budget and staging keep to their bounds."""

from __future__ import annotations

from xpyd_sidecar.engine.bounds import NOW, Budget, Chunk, Staging


def test_a_budget_takes_no_more_than_its_bound() -> None:
    budget = Budget(100)
    assert budget.reserve(60)
    assert not budget.reserve(41)
    assert budget.reserve(40)
    budget.free(60)
    assert budget.used == 40
    assert budget.reserve(60)


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


def test_now_is_done() -> None:
    assert NOW.done()
