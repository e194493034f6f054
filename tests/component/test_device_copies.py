"""BlockRows of a paged cache to packed memory and back: the kernel itself, by Triton's interpreter on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.memory import device
from xpyd_sidecar.memory.device_rows import BlockRows, RowShape, sum_tables, tables, view_of

BLOCKS = 16
CACHES = {
    "whole blocks lie together": "torch.randint(0, 99, (16, 4, 16, 64), dtype=torch.int32)",
    "tokens before heads": "torch.randn(16, 8, 4, 64).transpose(1, 2)",
    "some heads": "torch.randn(16, 4, 16, 64).narrow(1, 1, 2)",
    "some heads, tokens first": "torch.randn(16, 8, 4, 64, dtype=torch.bfloat16).transpose(1, 2).narrow(1, 3, 1)",
    "fp8 with a scale": "torch.randint(0, 99, (16, 64, 132), dtype=torch.uint8)",
    "odd sizes": "torch.randint(0, 99, (16, 7, 3), dtype=torch.uint8)",
    "kernel blocks": "torch.randn(32, 8, 2, 64).transpose(1, 2).unflatten(0, (16, 2))",
}
SCRIPT = """
import json, sys
import numpy as np, torch
from xpyd_sidecar.kv.packing import PackedArray, sums_of
from xpyd_sidecar.memory import device_kernel, device_rows

def judge(cache, ids, shift, first, heads, run):
    ids, view = np.array(ids, np.int64), device_rows.view_of(cache)
    layout = PackedArray(first, len(ids), heads, view.size // heads, run)
    packed = torch.zeros(layout.size + 8, dtype=torch.uint8)[shift:]
    rows = [device_rows.BlockRows(view, [cache.data_ptr()], [0], layout, ids)]
    ((shape, count, table, aligned),) = device_rows.tables(rows, packed.data_ptr())
    def move(out):
        device_kernel.launch(torch.from_numpy(table), shape, heads=count, out=out, programs=3, tile=256, aligned=aligned)
    before, wanted, each = cache.clone(), [int(one) for one in ids if one >= 0], layout.head_bytes
    move(True)
    right = all(torch.equal(packed[layout.place(first + nth, head):][:each],
                            before[block].contiguous().view(torch.uint8).reshape(-1)[head * each:(head + 1) * each])
                for nth, block in enumerate(ids) if block >= 0 for head in range(heads))
    sums = torch.zeros(layout.sums, dtype=torch.int64)
    ((_, head_bytes, runs),) = device_rows.sum_tables([(layout, packed.data_ptr())])
    device_kernel.launch_sums(torch.from_numpy(runs), sums, heads=heads, head_bytes=head_bytes)
    summed = (sums.numpy().view(np.uint64) == sums_of(packed.numpy()[:layout.size], layout)).all()
    cache.zero_()
    move(False)
    others = [block for block in range(len(cache)) if block not in wanted]
    return {"right": right, "back": torch.equal(cache[wanted], before[wanted]), "others": bool(cache[others].any()),
            "beyond": bool(packed[layout.size:].any()), "summed": bool(summed)}

print(json.dumps([judge(eval(cache), *rest) for cache, *rest in json.loads(sys.argv[1])]))
"""
GOOD = {"right": True, "back": True, "others": False, "beyond": False, "summed": True}


class Case(NamedTuple):
    """Blocks of a cache, packed ``shift`` bytes behind an aligned address, with so many heads, in runs."""

    cache: str
    ids: tuple[int, ...]
    shift: int = 0
    first: int = 0
    heads: int = 1
    run: int = 16


def judged(*cases: Case) -> list[dict[str, bool]]:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    words = json.dumps([one._replace(cache=CACHES[one.cache]) for one in cases])
    done = subprocess.run([sys.executable, "-c", SCRIPT, words], capture_output=True, text=True, check=False, timeout=400,
                          env=os.environ | {"TRITON_INTERPRET": "1"})
    assert not done.returncode, done.stderr[-2000:]
    out: list[dict[str, bool]] = json.loads(done.stdout)
    return out


def test_the_kernels_move_blocks_out_and_back_touch_nothing_else_and_sum_up() -> None:
    assert judged(*(Case(cache, (5, 0, 15)) for cache in CACHES)) == [GOOD] * len(CACHES)


def test_heads_lie_apart_within_a_run_and_each_has_its_sum() -> None:
    kinds = {"whole blocks lie together": 4, "tokens before heads": 4, "some heads": 2, "kernel blocks": 2, "odd sizes": 7}
    cases = [Case(cache, (5, 0, 15, 3, 9), 0, first, heads, run)
             for cache, heads in kinds.items() for first, run in ((0, 2), (3, 4), (5, 3))]
    assert dict(zip(cases, judged(*cases), strict=True)) == dict.fromkeys(cases, GOOD)


def test_blocks_that_are_not_wanted_are_summed_up_and_not_moved() -> None:
    assert judged(Case("tokens before heads", (-1, 4, -1, 7), 0, 2, 4, 4)) == [GOOD]


def test_packed_memory_need_not_be_aligned() -> None:
    odd, scaled = judged(Case("odd sizes", (3,), 1), Case("fp8 with a scale", (3,), 4))
    assert odd["right"]
    assert scaled["right"]


def test_words_are_as_wide_as_what_lies_together_allows() -> None:
    assert view_of(torch.zeros(BLOCKS, 4, 16, 64)).shape == RowShape(8, (1, 1, 1), (0, 0, 0), 2048)
    assert view_of(torch.zeros(BLOCKS, 8, 4, 64).transpose(1, 2)).shape == RowShape(8, (1, 4, 8), (0, 32, 128), 32)
    assert view_of(torch.zeros(BLOCKS, 7, 3, dtype=torch.uint8)).shape == RowShape(1, (1, 1, 1), (0, 0, 0), 21)
    assert view_of(torch.zeros(BLOCKS, 4, 8)[:, :, :3]).shape == RowShape(4, (1, 1, 4), (0, 0, 8), 3)


def test_blocks_that_are_strided_in_too_many_dimensions_are_refused() -> None:
    scattered = torch.zeros(BLOCKS, 4, 4, 4, 4, 4)[:, ::2, ::2, ::2, ::2, :2]
    with pytest.raises(ConfigError, match="strided in more than 3 dimensions"):
        view_of(scattered)


def test_arrays_that_look_alike_share_a_table_and_others_have_their_own() -> None:
    two, other = [torch.zeros(BLOCKS, 4, 8) for _ in range(2)], torch.zeros(BLOCKS, 3, 8)
    ids = np.array([7, 2], np.int64)
    arrays = [one.data_ptr() for one in two]
    whole, third = PackedArray(6, 2, 1, 128, 16), PackedArray(6, 2, 3, 32, 16)
    rows = [BlockRows(view_of(two[0]), arrays, [0, 10_000], whole, ids),
            BlockRows(view_of(other), [other.data_ptr()], [20_008], third, ids)]
    first, second = tables(rows, 10_000)
    assert (first.shape, first.aligned) == (view_of(two[0]).shape, True)
    assert (second.shape, second.aligned) == (view_of(other).shape, False)
    assert first.addresses.tolist() == [
        [arrays[0] + 7 * 128, 10_000, 32], [arrays[0] + 2 * 128, 10_128, 32],
        [arrays[1] + 7 * 128, 20_000, 32], [arrays[1] + 2 * 128, 20_128, 32]]
    assert (first.heads, second.heads) == (1, 3)
    assert second.addresses.tolist() == [
        [other.data_ptr() + 7 * 96, 30_008, 8], [other.data_ptr() + 2 * 96, 30_040, 8]], "two blocks in one run"


def test_sums_are_numbered_array_by_array() -> None:
    first, second = sum_tables([(PackedArray(3, 4, 2, 64, 4), 1000), (PackedArray(0, 1, 1, 8, 16), 5000)])
    assert (first.heads, first.head_bytes, first.runs.tolist()) == (2, 64, [[1000, 1, 0], [1128, 3, 2]])
    assert (second.heads, second.head_bytes, second.runs.tolist()) == (1, 8, [[5000, 1, 4]])


def test_without_triton_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(device.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="copies on cuda:0 need Triton: No module named"):
        device.DeviceCopies(torch.device("cuda", 0))


