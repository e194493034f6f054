"""Loops over bytes, compiled and in Python: they come to their places, sums are right, bad uses are errors."""

from __future__ import annotations

import ctypes
import random
import resource
import sys
from array import array
from types import ModuleType
from typing import Any

import pytest

from xpyd_sidecar.kv.packing import sum_of
from xpyd_sidecar.transport import moves, moves_plain

SIZES = [1, 7, 8, 63, 64, 65, 255, 1024, 1025, 4096, 65_536, 200_000]


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "plain":
        return moves_plain
    if not moves.COMPILED:
        pytest.skip("not compiled here")
    from xpyd_sidecar.transport import _moves

    return _moves


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def sums(data: bytes | bytearray, row: int, part: int = 0) -> bytes:
    """Of packed rows; ``part``: bytes that have a sum, 0: a row."""
    part = part or row
    return b"".join(sum_of(data[at + start:at + min(start + part, row)]).to_bytes(8, "little")
                    for at in range(0, len(data), row) for start in range(0, row, part))


def numbers(*found: int) -> array[int]:
    return array("q", found)


@pytest.mark.parametrize("size", SIZES)
def test_each_part_has_the_sum_that_is_defined(way: ModuleType, size: int) -> None:
    data = content(3 * size)
    assert way.sums(data, size) == sums(data, size)
    for bad in (0, size * 2):
        with pytest.raises(ValueError, match="whole parts"):
            way.sums(data, bad)


@pytest.mark.parametrize("beside", [0, 48])
@pytest.mark.parametrize(("size", "count"), [(16, 3000), (100_000, 20), (3 << 20, 1)])
def test_shared_memory_is_read_while_its_ticket_holds(way: ModuleType, size: int, count: int, beside: int) -> None:
    """``beside``: bytes between two rows there, which are not wanted."""
    step = size + beside
    data = ctypes.create_string_buffer(content(step * count), step * count)
    rows = b"".join(data.raw[n * step:n * step + size] for n in range(count))
    ticket = ctypes.create_string_buffer(b"t" * 32, 32)
    ids = numbers(*random.Random(3).sample(range(count), count))
    memory = bytearray(size * count)

    def read(expected: bytes) -> tuple[bool, bytes]:
        scatter = way.Scatter(memory, size, count, ids, size, 0, size // 2)
        held = scatter.read(ctypes.addressof(data), step, ctypes.addressof(ticket), expected)
        return held, scatter.sums()

    assert read(b"t" * 32) == (True, sums(rows, size, size // 2))
    for n, block in enumerate(ids):
        assert memory[block * size:(block + 1) * size] == rows[n * size:(n + 1) * size]
    assert not read(b"u" * 32)[0]
    for step, ticketed in ((size - 1, b"t" * 32), (-1, b"t" * 32), (size, b"t" * 31)):
        with pytest.raises(ValueError, match="rows do not overlap"):
            way.Scatter(memory, size, count, None, 0, 0, 0).read(
                ctypes.addressof(data), step, ctypes.addressof(ticket), ticketed)


def test_copies_of_any_length_and_alignment_are_whole_and_summed_up_as_they_are(way: ModuleType) -> None:
    """Past the caches where the place allows it, through them elsewhere; not a byte beside the blocks is touched."""
    draw = random.Random(5)
    for turn in range(120):
        size = draw.choice([draw.randrange(1, 300), draw.randrange(3900, 4400), draw.randrange(1, 200_000),
                            64 * draw.randrange(60, 3000), 1024 * draw.randrange(4, 200) + draw.randrange(3)])
        count, skip, shift = draw.randrange(1, 4), draw.randrange(128), draw.choice([0, 0, 1, 64, 77])
        part = draw.choice([size, size, -(-size // 3)]) if turn % 3 else 0
        stride = -(-(size + skip) // 64) * 64 + 64 * (turn % 2)
        data = content(size * count + shift, turn)
        source = ctypes.create_string_buffer(data, len(data))
        ids = numbers(*draw.sample(range(count + 2), count))
        memory = bytearray(b"\xee") * (stride * (count + 2) + skip + 64)
        base = -moves_plain.address_of(memoryview(memory)) % 64
        view = memoryview(memory)[base:base + stride * (count + 2) + skip]
        scatter = way.Scatter(view, size, count, ids, stride, skip // 64 * 64 if turn % 4 else skip, part)
        scatter.copy(ctypes.addressof(source) + shift)
        expected = bytearray(b"\xee") * len(view)
        for n, block in enumerate(ids):
            at = block * stride + (skip // 64 * 64 if turn % 4 else skip)
            expected[at:at + size] = data[shift + n * size:shift + (n + 1) * size]
        assert view == expected, (turn, size, count, skip)
        assert scatter.sums() == (sums(data[shift:], size, part) if part else b"")


def test_memory_of_this_process_is_copied(way: ModuleType) -> None:
    data = ctypes.create_string_buffer(content(70_000 * 4), 70_000 * 4)
    memory = bytearray(70_000 * 4)
    scatter = way.Scatter(memory, 70_000, 4, numbers(3, 2, 1, 0), 70_000, 0, 70_000)
    scatter.copy(ctypes.addressof(data))
    assert scatter.sums() == sums(data.raw, 70_000)
    assert memory == b"".join(data.raw[n * 70_000:(n + 1) * 70_000] for n in (3, 2, 1, 0))


@pytest.mark.parametrize("bad", [
    (4, 0, None, 0, 0), (0, 4, None, 0, 0), (30, 4, None, 0, 0), (4, 2, numbers(1), 4, 0), (4, 1, numbers(-1), 4, 0),
    (4, 1, numbers(25), 4, 0), (4, 1, numbers(24), 4, 1), (4, 1, numbers(2 ** 62), 4, 0), (101, 1, numbers(0), 1, 0)])
def test_places_outside_of_the_memory_are_refused(way: ModuleType, bad: tuple[int, int, Any, int, int]) -> None:
    with pytest.raises(ValueError, match=r"outside of the memory|no blocks"):
        way.Scatter(bytearray(100), *bad, 0)


@pytest.mark.parametrize("part", [-1, 5])
def test_parts_are_no_larger_than_rows(way: ModuleType, part: int) -> None:
    with pytest.raises(ValueError, match="no blocks, or too many"):
        way.Scatter(bytearray(100), 4, 1, None, 0, 0, part)


def test_nothing_is_kept_of_what_is_done(way: ModuleType) -> None:
    memory, ids = bytearray(1 << 20), array("q", range(1024))
    source = ctypes.create_string_buffer(1 << 20)
    before = sys.getrefcount(memory), sys.getrefcount(ids)
    most = 0
    for turn in range(400):
        scatter = way.Scatter(memory, 1024, 1024, memoryview(ids), 1024, 0, 512)
        if not turn % 10:
            scatter.copy(ctypes.addressof(source))
            assert len(scatter.sums()) == 8 * 2 * 1024
        with pytest.raises(ValueError, match="outside"):
            way.Scatter(memory, 1024, 1024, memoryview(ids), 2048, 0, 512)
        if turn == 100:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    del scatter
    assert (sys.getrefcount(memory), sys.getrefcount(ids)) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 4 << 10, "KiB"
    memory += b"x"  # an exported buffer would forbid it
