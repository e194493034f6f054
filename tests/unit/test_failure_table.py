"""The failure table of docs/protocols/kv.md names tests that exist, at least one in each row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/protocols/kv.md"
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    table = PAGE.read_text().split("## Failures\n")[1].split("\n## ")[0]
    found = [line for line in table.splitlines() if line.startswith("| ")]
    return found[1:]  # without its head


def test_the_table_is_there() -> None:
    assert len(rows()) >= 18


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split(" | ")[0].strip("| "))
def test_each_row_names_tests_that_exist(row: str) -> None:
    named = TEST.findall(row)
    assert named
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}, f"{file}::{name}"
