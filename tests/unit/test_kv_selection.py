"""``kv.selection``: pieces are what was wanted, and no more than whole runs of it, with the sums that are theirs."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifest_sizes import size_of

from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.manifests import Manifest, layout
from xpyd_sidecar.kv.packing import PackedArray, sums_of
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.selection import PackedSpan, Piece, batches, packed_spans, pieces, places, sums_in


class Case(NamedTuple):
    """A manifest of a source with so many arrays, and what is wanted of it."""

    arrays: list[ArrayLayout]
    manifest: Manifest
    parts: dict[int, ArrayPart]
    tables: list[TableSpan] | None
    most: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    arrays = [ArrayLayout(draw(st.integers(1, 4)), 8 * draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4])))
              for _ in range(draw(st.integers(1, 4)))]
    region = draw(st.integers(0, len(arrays) - 1))
    manifest = Manifest(3, region, draw(st.integers(1, len(arrays) - region)), draw(st.integers(0, 9)),
                        draw(st.integers(1, 12)), 256 * draw(st.integers(0, 3)))
    parts = {}
    for at, one in enumerate(arrays):
        if draw(st.booleans()):
            head = draw(st.integers(0, one.heads - 1))
            parts[at] = ArrayPart(at + 1, head, draw(st.integers(1, one.heads - head)), 0, draw(st.integers(0, 1)))
    tables = [TableSpan(draw(st.integers(0, 12)), tuple(range(draw(st.integers(0, 12))))) for _ in range(2)]
    return Case(arrays, manifest, parts, draw(st.sampled_from([None, tables])), draw(st.integers(1, 400)))


def store(case: Case) -> np.ndarray:
    """Prefill's, in which each head of each block of each array has bytes of its own."""
    memory = np.zeros(case.manifest.offset + size_of(case.manifest, case.arrays), np.uint8)
    for region, packed, offset in layout(case.manifest, case.arrays):
        for block in range(packed.first, packed.first + packed.blocks):
            for head in range(packed.heads):
                at = offset + packed.place(block, head)
                memory[at:at + packed.head_bytes] = content(region, block, head, packed.head_bytes)
    return memory


def content(region: int, block: int, head: int, size: int) -> np.ndarray:
    return np.random.default_rng([region, block, head]).integers(0, 256, size, np.uint8)


def fetched(memory: np.ndarray, piece: Piece) -> np.ndarray:
    return np.concatenate([memory[at:at + size] for at, size in piece.stretches])


def sums(case: Case, memory: np.ndarray) -> np.ndarray:
    """Of the whole manifest."""
    return np.concatenate([sums_of(memory[offset:offset + packed.size], packed)
                           for _, packed, offset in layout(case.manifest, case.arrays)])


@given(cases())
def test_pieces_hold_what_is_wanted_in_whole_runs_with_the_sums_of_them(case: Case) -> None:
    memory = store(case)
    every = sums(case, memory)
    assert len(every) == sums_in(case.manifest, case.arrays)
    got: set[tuple[int, int]] = set()
    for piece in pieces(case.manifest, case.arrays, case.parts, case.tables, case.most):
        part, data, packed = case.parts[piece.region], fetched(memory, piece), piece.packed
        assert len(data) == piece.size
        assert len({size for _, size in piece.stretches}) == 1
        assert len({after.offset - at.offset for at, after in pairwise(piece.stretches)}) <= 1
        for block in range(packed.first, packed.first + packed.blocks):
            assert (piece.region, block) not in got, "fetched twice"
            got.add((piece.region, block))
            for head in range(part.heads):
                at = packed.place(block, head)
                assert (data[at:at + packed.head_bytes] == content(piece.region, block, part.head + head,
                                                                   packed.head_bytes)).all()
        assert (piece.sums_in(every) == sums_of(data, packed)).all()
    told = range(case.manifest.first, case.manifest.first + case.manifest.count)
    for region in range(case.manifest.region, case.manifest.region + case.manifest.arrays):
        wanted: set[int] = set()
        if region in case.parts:
            table = case.tables[case.parts[region].table] if case.tables is not None else None
            wanted = set(told) if table is None else {*told} & {*range(table.first, table.first + len(table.ids))}
        run = case.arrays[region].run
        assert {block for at, block in got if at == region} == {
            block for block in told if block // run in {one // run for one in wanted}}


@given(cases())
def test_pieces_have_no_more_bytes_than_they_may_unless_a_run_has(case: Case) -> None:
    for piece in pieces(case.manifest, case.arrays, case.parts, case.tables, case.most):
        assert piece.size <= case.most or piece.packed.sums == piece.packed.heads


@given(cases(), st.integers(1, 2000))
def test_batches_have_all_pieces_in_order_and_no_more_than_they_may(case: Case, most: int) -> None:
    found = pieces(case.manifest, case.arrays, case.parts, case.tables, case.most)
    made = [*batches(found, most)]
    assert [piece for batch in made for piece in batch] == found
    assert all(len(batch) == 1 or places(batch)[-1] <= most for batch in made)
    assert all(places(batch) == sorted(places(batch)) for batch in made)


def test_a_whole_manifest_of_one_size_is_one_stretch_for_each_array() -> None:
    arrays = [ArrayLayout(8, 4096, 16)] * 4
    found = pieces(Manifest(0, 0, 4, 0, 512, 0), arrays, {at: ArrayPart(at, 0, 8, 0) for at in range(4)}, None, 1 << 30)
    assert [len(piece.stretches) for piece in found] == [1] * 4


@pytest.mark.parametrize("wrong", [Manifest(0, 0, 3, 0, 1, 0), Manifest(0, -1, 1, 0, 1, 0), Manifest(0, 0, 0, 0, 1, 0),
                                   Manifest(0, 0, 1, 0, 0, 0), Manifest(0, 0, 1, -1, 1, 0),
                                   Manifest(0, 0, 1, 0, 1 << 25, 0),
                                   Manifest(0, 0, 1, 0, 1, -1)])
def test_a_manifest_of_what_there_cannot_be_is_refused(wrong: Manifest) -> None:
    with pytest.raises(ValueError, match=r"arrays|blocks"):
        pieces(wrong, [ArrayLayout(1, 8, 1)] * 2, {}, None, 1)


def test_a_piece_knows_how_its_bytes_lie() -> None:
    arrays = [ArrayLayout(4, 8, 4)]
    table = TableSpan(5, (0,) * 4)
    whole, rest = pieces(Manifest(0, 0, 1, 2, 8, 512), arrays, {0: ArrayPart(0, 1, 2, 0)}, [table], 1 << 20)
    assert (whole.packed, whole.stretches) == (PackedArray(4, 4, 2, 8, 4), ((512 + 64 + 32, 64),))
    assert (rest.packed, rest.stretches) == (PackedArray(8, 2, 2, 8, 4), ((512 + 64 + 128 + 16, 32),))


@given(cases())
def test_what_is_copied_for_a_fetch_is_each_piece_where_it_lies_and_nothing_twice(case: Case) -> None:
    memory = store(case)
    for batch in batches(pieces(case.manifest, case.arrays, case.parts, case.tables, case.most), 1000):
        starts = places(batch)
        into = np.zeros(starts[-1], np.uint8)
        end = 0
        for offset, size, at in packed_spans(batch):
            assert at >= end
            into[at:at + size] = memory[offset:offset + size]
            end = at + size
        assert end <= starts[-1]
        for piece, start in zip(batch, starts, strict=False):
            assert (into[start:start + piece.size] == fetched(memory, piece)).all()


def test_whole_arrays_side_by_side_are_copied_as_one() -> None:
    arrays = [ArrayLayout(2, 24, 1)] * 3
    found = tuple(pieces(Manifest(0, 0, 3, 0, 5, 512), arrays, {at: ArrayPart(at, 0, 2, 0) for at in range(3)}, None, 4096))
    assert packed_spans(found) == [PackedSpan(512, 2 * 256 + 240, 0)]
