"""BlockRows of a paged cache to packed memory and back: the kernel itself, by Triton's interpreter on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory import device
from xpyd_sidecar.memory.device import spans
from xpyd_sidecar.memory.device_rows import BlockRows, PackedRows, RowShape, tables, view_of

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
from xpyd_sidecar.memory import device_kernel, device_rows
cache = eval(sys.argv[1])
view, ids = device_rows.view_of(cache), np.array(json.loads(sys.argv[2]), np.int64)
packed = torch.zeros(len(ids) * view.size + 8, dtype=torch.uint8)[int(sys.argv[3]):]
rows = [([device_rows.BlockRows(view, [cache.data_ptr()], [0], ids)], packed.data_ptr())]
((shape, table, aligned),) = device_rows.tables(rows)
def move(out):
    device_kernel.launch(torch.from_numpy(table), shape, out=out, programs=3, tile=256, aligned=aligned)
before = cache.clone()
move(True)
size = len(ids) * view.size
right = torch.equal(packed[:size], before[list(ids)].contiguous().view(torch.uint8).reshape(-1))
cache.zero_()
move(False)
back = torch.equal(cache[list(ids)], before[list(ids)])
others = [block for block in range(len(cache)) if block not in ids]
print(json.dumps({"right": right, "back": back, "others": bool(cache[others].any()), "beyond": bool(packed[size:].any())}))
"""


def run(cache: str, ids: list[int], shift: int = 0) -> dict[str, Any]:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    command = [sys.executable, "-c", SCRIPT, cache, json.dumps(ids), str(shift)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400,
                          env=os.environ | {"TRITON_INTERPRET": "1"})
    assert not done.returncode, done.stderr[-2000:]
    out: dict[str, Any] = json.loads(done.stdout)
    return out


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_the_kernel_moves_blocks_out_and_back_and_touches_nothing_else(cache: str) -> None:
    assert run(cache, [5, 0, 15]) == {"right": True, "back": True, "others": False, "beyond": False}


def test_packed_memory_need_not_be_aligned() -> None:
    assert run(CACHES["odd sizes"], [3], shift=1)["right"]
    assert run(CACHES["fp8 with a scale"], [3], shift=4)["right"]


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
    rows = [([BlockRows(view_of(two[0]), arrays, [0, 10_000], ids)], 10_000),
            ([BlockRows(view_of(other), [other.data_ptr()], [8], ids)], 30_000)]
    first, second = tables(rows)
    assert (first.shape, first.aligned) == (view_of(two[0]).shape, True)
    assert (second.shape, second.aligned) == (view_of(other).shape, False)
    assert first.addresses.tolist() == [
        [arrays[0] + 7 * 128, 10_000], [arrays[0] + 2 * 128, 10_128],
        [arrays[1] + 7 * 128, 20_000], [arrays[1] + 2 * 128, 20_128]]
    assert second.addresses.tolist() == [[other.data_ptr() + 7 * 96, 30_008], [other.data_ptr() + 2 * 96, 30_104]]


def test_neighbours_of_one_allocation_are_copied_as_one() -> None:
    whole, other = torch.arange(100, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    found = spans([PackedRows([], one, one.data_ptr(), len(one)) for one in (
        whole[:10], whole[10:30], whole[40:50], other, whole[50:60])])
    assert [one.tolist() for one in found] == [
        list(range(30)), list(range(40, 50)), [0] * 10, list(range(50, 60))]
    found[0][12] = 99
    assert whole[12] == 99, "it is the same memory"


def test_without_triton_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(device.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="copies on cuda:0 need Triton: No module named"):
        device.Mover(torch.device("cuda", 0))


