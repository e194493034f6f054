"""``campaign-groups``: all sizes of groups through vLLM's parser, and more states of their rounds than CI explores."""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import NoReturn

import pytest
from group_model import Bounds, explore, walk
from member_lines import check, paper_model, sizes

MINUTES = float(os.environ.get("MINUTES", "10"))
KINDS = ("engine", "launcher", "agent", "pod", "lost", "late", "time passes")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    return make_arg_parser(Parser())


@pytest.mark.parametrize("pods", range(2, 17))
def test_all_sizes_of_so_many_members(parser: argparse.ArgumentParser, tmp_path: Path, pods: int) -> None:
    for tensor, pipeline, data in sizes(pods):
        check(parser, paper_model(tmp_path, experts=data > 1), tensor=tensor, pipeline=pipeline, data=data, pods=pods)


@pytest.mark.parametrize("kind", KINDS)
def test_three_members_and_a_fault(kind: str) -> None:
    found = explore(Bounds(3, 1, kinds=frozenset({kind})))
    print(f"{kind}: {found.states} states, {found.transitions} transitions")
    assert found.verdict in {"ok", "cut off"}, found.trace


@pytest.mark.parametrize("kind", KINDS)
def test_two_members_and_two_faults(kind: str) -> None:
    found = explore(Bounds(2, 2, kinds=frozenset({kind})))
    print(f"{kind}: {found.states} states, {found.transitions} transitions")
    assert found.verdict in {"ok", "cut off"}, found.trace


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_ways(size: int) -> None:
    rng = random.Random(size)
    for _ in range(round(200 * MINUTES)):
        found = walk(Bounds(size, faults=8), rng)
        assert found.verdict == "ok", found.trace
