"""Drawn places: which tests are asked about them, what their verdicts mean, and that a run goes on where it was ended."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from lab import extras
from lab.mutation import cosmic, sample
from lab.mutation import judge as judging
from lab.mutation.choose import Suite, imported, suite_of
from lab.mutation.functions import Change, apply
from lab.mutation.judge import Judge
from mutated import CODE, MODULE, TEST, state, tree

REPOSITORY = Path(__file__).resolve().parents[2]
DOUBLE = Change(MODULE, "double", "number * 2", "number * 3")
USER = "from xpyd_sidecar.kv.toy import double\n\n\ndef test_bound():\n    assert double(101) == 200\n"
BOUND = Change(MODULE, "double", "number > LIMIT", "number < 0")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts in a quarter of the time
    (tmp_path / "tree").mkdir()
    return tree(tmp_path / "tree")


def test_imports_are_read_with_what_is_taken() -> None:
    text = "import json, a.b as c\nfrom d.e import (\n    f,  # why\n    g as h,\n)\ndef h():\n    from inside import one\n"
    assert imported(text) == {"json", "a.b", "d.e", "d.e.f", "d.e.g", "inside", "inside.one"}


def test_tests_are_chosen_by_name_then_by_import_then_by_what_they_reach() -> None:
    files = {"test_kv_toy": "", "test_other": "from xpyd_sidecar.kv import toy", "test_far": "import helper",
             "test_near": "from xpyd_sidecar.kv.else_ import x", "test_unlike": "from xpyd_sidecar.kv import toys"}
    tests = Suite({Path(f"{name}.py"): imported(text) for name, text in files.items()},
                  {"helper": frozenset({"deeper"}), "deeper": frozenset({MODULE})})
    assert [path.stem for path in tests.own(MODULE)] == ["test_kv_toy"]
    assert [path.stem for path in tests.users(MODULE)] == ["test_other"]
    assert [path.stem for path in tests.reaching(MODULE)] == ["test_other", "test_far", "test_near", "test_unlike"]


def test_who_notices_first_is_said(root: Path) -> None:
    (root / "tests/unit/test_user.py").write_text(USER)
    judge = Judge(root, suite_of(root))
    verdict = judge.judge(DOUBLE)
    assert (verdict.verdict, verdict.step, verdict.test) == ("killed", "own", "tests/unit/test_kv_toy.py::test_it_doubles")
    verdict = judge.judge(BOUND)
    assert (verdict.verdict, verdict.step, verdict.test) == ("killed", "users", "tests/unit/test_user.py::test_bound")
    verdict = judge.judge(BOUND, "test_user.py")
    assert (verdict.verdict, verdict.step) == ("killed", "hint")
    assert judge.judge(Change(MODULE, "double", "number ** 2", "0")).verdict == "gone"
    assert (root / "sidecar/src/xpyd_sidecar/kv/toy.py").read_text() == CODE


def test_a_test_that_fails_anyway_kills_nothing(root: Path) -> None:
    (root / "tests/unit/test_kv_toy.py").write_text(TEST + "\n\ndef test_a_wrong():\n    assert False\n")
    judge = Judge(root, suite_of(root))
    assert judge.judge(BOUND).verdict == "alive"
    assert judge.judge(DOUBLE).test == "tests/unit/test_kv_toy.py::test_it_doubles"
    assert judge.flaky == {"tests/unit/test_kv_toy.py::test_a_wrong"}


def test_tests_that_do_not_end_have_noticed_unless_they_never_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "STEP_S", 6.0)
    endless = Change(MODULE, "double", "return number * 2", "while True: pass")
    verdict = Judge(root, suite_of(root)).judge(endless)
    assert (verdict.verdict, verdict.why) == ("killed", "no end within 6 s")
    (root / "tests/unit/test_kv_toy.py").write_text("import time\n\n\ndef test_a():\n    time.sleep(50)\n")
    verdict = Judge(root, suite_of(root)).judge(BOUND)
    assert (verdict.verdict, verdict.why) == ("alive", "no end within 6 s")


def test_where_no_test_imports_the_module_that_is_said(root: Path) -> None:
    (root / "tests/unit/test_kv_toy.py").unlink()
    assert (verdict := Judge(root, suite_of(root)).judge(DOUBLE)).verdict == "alive"
    assert verdict.why == "no test file imports the module"


def test_a_run_goes_on_where_it_was_ended_and_is_compared_with_another_tree(root: Path, tmp_path: Path,
                                                                           capsys: pytest.CaptureFixture[str]) -> None:
    before, file, other = state(root), tmp_path / "figures.json", tmp_path / "again.json"
    command = ["--operators", "4", "--seed", "1", "--seed", "2", "--tree", str(root), "--write", str(file)]
    assert sample.main([*command, "--places", "1"]) == 0
    first = [one["places"][0] for one in json.loads(file.read_text())["runs"]]
    assert all("verdict" in one for one in first)
    assert sample.main(command) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [(run["seed"], run["judged"], run["killed"] + run["alive"]) for run in runs] == [(1, 4, 4), (2, 4, 4)]
    assert [one["places"][0] for one in runs] == first
    assert "ALIVE xpyd_sidecar.kv.toy:double  if number > LIMIT:  ->  if number >= LIMIT:" in capsys.readouterr().out
    assert state(root) == before

    module = root / "sidecar/src/xpyd_sidecar/kv/toy.py"
    module.write_text("# moved\n" + CODE.replace("if number > LIMIT", "if number > 0 + LIMIT"))
    assert sample.main(["--again", str(file), "--tree", str(root), "--write", str(other)]) == 0
    compared = json.loads(other.read_text())["runs"]
    assert [(run["gone"], run["killed"]) for run in compared] == [(1, run["killed"]) for run in runs]


def test_nothing_judged_is_no_success(root: Path, tmp_path: Path) -> None:
    assert sample.main(["--operators", "4", "--seed", "1", "--tree", str(root), "--write", str(tmp_path / "x.json"),
                        "--without", "*"]) == 2


def test_lines_of_code_are_those_of_functions_without_docstrings() -> None:
    lines = CODE.splitlines()
    assert {lines[at - 1].strip() for at in cosmic.code_lines(CODE)} == {
        "if number > LIMIT:", "number = LIMIT", "return number * 2", "return seen + 1 if seen >= 0 and seen < LIMIT else 0",
        "return 1", "self.value = value + 1"}


def test_lines_of_touched_functions_count_as_changed() -> None:
    at = CODE.splitlines().index("    return number * 2") + 1
    lines = cosmic.touched(CODE, f"@@ -{at} +{at} @@\n")
    assert [CODE.splitlines()[line - 1].strip() for line in sorted(lines)] == [
        "if number > LIMIT:", "number = LIMIT", "return number * 2"]


def test_annotations_are_no_places() -> None:
    assert set(cosmic.annotation_spans("def f(a: int | None) -> str: ...")) == {((1, 9), (1, 19)), ((1, 24), (1, 27))}


@pytest.mark.skipif(not (REPOSITORY / ".cache/mutation/site").exists(),
                    reason="`python -m lab extras mutation` installs cosmic-ray")
def test_cosmic_rays_operators_break_lines_of_code_and_the_draw_is_the_same_for_the_same_seed(
        root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "install", lambda _name: REPOSITORY / ".cache/mutation")
    draws = [cosmic.draw(root, 5, seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) == 5
    for change in draws[0]:
        ast.parse(apply(CODE, change))
    (root / "sidecar/src/xpyd_sidecar/kv/toy.py").write_text(CODE.replace("number * 2", "2 * number"))
    assert {one.function for one in cosmic.changed(root, "main", 1)} == {"double"}
