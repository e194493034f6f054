"""Each law of the table fits the code; laws are broken one by one in a copy, and those that no test misses are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.mutation import laws
from mutated import TEST, state, tree

ROOT = Path(__file__).resolve().parents[2]
ROW = """[[law]]
law = "It {words}."
function = "xpyd_sidecar.kv.toy:double"
before = "{before}"
after = "{after}"
tests = ["{test}"]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts in a quarter of the time
    (tmp_path / "tree").mkdir()
    return tree(tmp_path / "tree")


def row(words: str, before: str, after: str, test: str = "test_kv_toy.py") -> str:
    return ROW.format(words=words, before=before, after=after, test=test)


DOUBLES = row("doubles", "number * 2", "number * 3")


def judged(root: Path, capsys: pytest.CaptureFixture[str], *rows: str, more: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit code and what was said of a table of these rows."""
    table = root.parent / "laws.toml"
    table.write_text("\n".join(rows))
    code = laws.main(["--root", str(root), "--table", str(table), *more])
    return code, capsys.readouterr().out


def test_all_rows_fit() -> None:
    rows = laws.laws()
    assert list(laws.unfit(ROOT, rows)) == []
    assert len(rows) >= 40
    assert len({one.words for one in rows}) == len(rows)


def test_a_law_that_no_test_misses_is_named_and_the_tree_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(root)
    code, said = judged(root, capsys, DOUBLES, row("is bounded", "number > LIMIT", "number < 0"))
    assert code == 1
    lines = said.splitlines()
    assert lines[0].startswith("1/2 killed xpyd_sidecar.kv.toy:double")
    assert lines[0].endswith("tests/unit/test_kv_toy.py::test_it_doubles")
    assert lines[1].startswith("2/2 ALIVE  xpyd_sidecar.kv.toy:double")
    assert lines[1].endswith("It is bounded.")
    assert lines[2] == "2 laws: 1 killed, 1 alive"
    assert state(root) == before


def test_all_killed_is_0(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = judged(root, capsys, DOUBLES)
    assert (code, said.splitlines()[-1]) == (0, "1 laws: 1 killed, 0 alive")


def test_tests_that_do_not_end_have_noticed(root: Path) -> None:
    [endless] = laws.laws(written(root, row("ends", "return number * 2", "while True: pass")))
    assert laws.judge(root, [endless], deadline_s=3.0) == 0


def test_tests_that_fail_without_any_change_judge_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tests/unit/test_kv_toy.py").write_text(TEST.replace("6", "7"))
    code, said = judged(root, capsys, DOUBLES)
    assert (code, said) == (2, "mutants: the tests fail without any change: tests/unit/test_kv_toy.py::test_it_doubles\n")


def test_rows_that_no_longer_fit_are_named_and_nothing_is_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = judged(root, capsys, DOUBLES, row("triples", "number * 3", "number * 4"),
                        row("is tested", "number * 2", "number * 3", "test_gone.py"))
    assert code == 1
    assert said.splitlines() == ["UNFIT xpyd_sidecar.kv.toy:double: the text is not there: 'number * 3'",
                                 "UNFIT xpyd_sidecar.kv.toy:double: 0 test files are called test_gone.py",
                                 "3 laws: 2 no longer fit"]


def test_a_row_that_lacks_a_field_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = judged(root, capsys, DOUBLES.replace("tests =", "test ="))
    assert (code, said) == (2, "mutants: row 1 of laws.toml: missing or unknown: test, tests\n")


def test_a_name_that_no_row_has_is_no_success(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = judged(root, capsys, DOUBLES, more=("--only", "nobody"))
    assert (code, said) == (1, "0 laws: 0 no longer fit\n")


def written(root: Path, text: str) -> Path:
    table = root.parent / "laws.toml"
    table.write_text(text)
    return table
