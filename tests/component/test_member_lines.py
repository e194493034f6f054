"""Command lines of a group's members go through vLLM's own parser, and say what the layout says; all sizes: a campaign."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from member_lines import check, paper_model

pytest.importorskip("vllm")


@pytest.mark.parametrize(("tensor", "pipeline", "data", "pods"), [
    (2, 1, 1, 2), (16, 1, 1, 2), (4, 2, 1, 4), (16, 1, 1, 16), (1, 3, 1, 3), (1, 1, 2, 2), (2, 1, 4, 2), (1, 1, 16, 8)])
def test_each_member_is_the_node_or_has_the_ranks_that_the_layout_says(
        parser: argparse.ArgumentParser, tmp_path: Path, tensor: int, pipeline: int, data: int, pods: int) -> None:
    check(parser, paper_model(tmp_path, experts=data > 1), tensor=tensor, pipeline=pipeline, data=data, pods=pods)
