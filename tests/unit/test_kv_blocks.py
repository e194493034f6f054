"""Whole blocks: how many a prompt takes, how runs are cut, what overlaps."""

from __future__ import annotations

import pytest

from xpyd_sidecar.kv.blocks import blocks_of, overlap, runs


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (127, 1), (128, 1), (129, 2), (1900, 15)])
def test_a_prompt_takes_whole_blocks(tokens: int, blocks: int) -> None:
    assert blocks_of(tokens, 128) == blocks


def test_runs_cover_every_block_once_and_keep_to_the_bound() -> None:
    cut = list(runs(3, 10, 400, 1000))
    assert cut == [(3, 2), (5, 2), (7, 2), (9, 2), (11, 2)]
    assert list(runs(0, 2, 5000, 1000)) == [(0, 1), (1, 1)]  # a block larger than the bound goes alone


@pytest.mark.parametrize(("ours", "expected"), [
    ((0, 4), (2, 2)), ((2, 3), (2, 3)), ((4, 9), (4, 2)), ((6, 2), (6, 0)), ((0, 2), (2, 0))])
def test_overlap_with_blocks_two_to_five(ours: tuple[int, int], expected: tuple[int, int]) -> None:
    assert overlap(*ours, 2, 4) == expected
