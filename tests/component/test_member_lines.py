"""Command lines of a group's members go through vLLM's own parser, and say what the layout says; all sizes: a campaign."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from member_lines import check, paper_model

pytest.importorskip("vllm")


@pytest.mark.parametrize("sizes", [
    (2, 1, 1, 2), (16, 1, 1, 2), (4, 2, 1, 4), (16, 1, 1, 16), (1, 3, 1, 3), (1, 1, 2, 2), (2, 1, 4, 2), (1, 1, 16, 8)])
def test_each_member_is_the_node_or_has_the_ranks_that_the_layout_says(
        parser: argparse.ArgumentParser, tmp_path: Path, sizes: tuple[int, int, int, int]) -> None:
    tensor, pipeline, data, pods = sizes
    check(parser, paper_model(tmp_path, experts=data > 1), tensor=tensor, pipeline=pipeline, data=data, pods=pods)
