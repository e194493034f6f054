"""docs/development/late-copies.md lists every test that fails for a known row, and no other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/development/late-copies.md"
ROWS = {*(f"A{number}" for number in range(1, 10)), *(f"B{number}" for number in range(1, 12))}
"""Those that were known before; each has a line until it is mended."""
MARK = "fails"


def marked() -> Counter[tuple[str, str, str, str]]:
    """(row, why, file, test) of all marks."""
    out: Counter[tuple[str, str, str, str]] = Counter()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if f"import {MARK}" not in text:
            continue
        for test in ast.walk(ast.parse(text)):
            for call in (ast.walk(ast.Module(test.decorator_list, [])) if isinstance(test, ast.FunctionDef) else ()):  # type: ignore[arg-type]
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == MARK:
                    row, why = (ast.literal_eval(one) for one in call.args[:2])
                    out[row, why, path.relative_to(ROOT / "tests").as_posix(), test.name] += 1
    return out


def listed(today: str) -> Counter[tuple[str, str, str, str]]:
    """The same of the page's table."""
    lines = re.findall(rf"^\| ([ABN]\d+) \| (.+) \| `(\S+)` `(\w+)` \| {today} \|$", PAGE.read_text(), flags=re.MULTILINE)
    return Counter((row, why, file, test) for row, why, file, test in lines)


def test_the_page_lists_and_counts_the_tests_that_are_marked() -> None:
    assert listed("xfail") == marked()
    assert f"{marked().total()} marks, {listed('skip').total()} skips." in PAGE.read_text()


def test_tests_of_rows_that_are_mended_are_there() -> None:
    for _, _, file, test in listed("passes"):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()


def test_every_row_that_was_known_has_a_line() -> None:
    assert set(re.findall(r"^\| ([AB]\d+) \|", PAGE.read_text(), flags=re.MULTILINE)) == ROWS


def test_marks_of_rows_are_made_in_one_way() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert not re.search(r"""(xfail|skip)\([^)]*reason=f?["'][ABN]\d+: """, path.read_text()), path
