"""``python -m lab sizes``: what is counted where."""

from __future__ import annotations

from collections import Counter

import pytest
from lab.tools.sizes import area, lines_now, table


@pytest.mark.parametrize(("path", "where"), [
    ("operator/src/xpyd_operator/api/kv.py", "operator/src"), ("operator/hatch_build.py", None),
    ("sidecar/src/xpyd_sidecar/router/relay/_fast.c", "sidecar/src/router"),
    ("sidecar/src/xpyd_sidecar/config.py", "sidecar/src"), ("lab/gpu/__main__.py", "lab"), ("bench/kv/raw.c", "bench"),
    ("images/wheels.py", None), ("e2e/test_images.py", "e2e"), ("tests/conftest.py", "tests"),
    ("tests/support/fuzz/turns.py", "tests/support"), ("tests/support/fuzz/entry.c", None), ("docs/guide.md", None)])
def test_each_file_is_counted_in_one_area_or_in_none(path: str, where: str | None) -> None:
    assert area(path) == where


def test_the_table_has_the_difference_and_the_sums() -> None:
    made = table(Counter({"operator/src": 10, "lab": 1000}), Counter({"operator/src": 7, "tests/unit": 5})).splitlines()
    assert made[2:] == ["| lab | 1,000 | 0 | -1,000 |", "| operator/src | 10 | 7 | -3 |", "| tests/unit | 0 | 5 | +5 |",
                        "| **product** | 10 | 7 | -3 |", "| **beside it** | 1,000 | 0 | -1,000 |",
                        "| **tests** | 0 | 5 | +5 |", "| **all** | 1,010 | 12 | -998 |"]


def test_the_tree_is_counted() -> None:
    found = lines_now()
    assert min(found[name] for name in ("operator/src", "sidecar/src/router", "lab", "tests/unit")) > 1000
