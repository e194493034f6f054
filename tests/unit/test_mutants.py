"""Mutants stay applicable, and the tool that judges them is right about a small tree of its own."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from scripts import load

ROOT = Path(__file__).parents[2]
mutants = load(ROOT / "scripts/mutants.py")
ALL = {one.name: one for one in mutants.mutants(ROOT)}
BOUNDS = {"bound-idle-connections", "idle-connection-ended", "resent-without-end", "alone-for-ever",
          "bound-fast-prefill-answer", "bound-early-answer", "tls-minimum", "compare-keys"}
"""Those that once lived, most of them bounds."""


@pytest.mark.parametrize("name", ALL)
def test_every_mutant_applies_to_this_tree_and_names_tests_that_are_there(name: str) -> None:
    mutant = ALL[name]
    assert mutants.apply(mutant, ROOT, check=True) == ""
    assert all(touched.startswith(mutants.SOURCES) for touched in mutant.touched), "code is broken, not its tests"
    for test in mutant.tests:
        file, _, function = test.partition("::")
        wanted = re.escape(function.partition("[")[0]) if function else "test_"
        assert re.search(rf"^(async )?def {wanted}", (ROOT / file).read_text(), re.MULTILINE), test


def test_those_that_once_lived_are_there() -> None:
    assert ALL.keys() >= BOUNDS
    assert len({one.breaks for one in ALL.values()}) == len(ALL)


# ---- a tree of its own

CODE = """\
def double(number):
    if number > 100:
        number = 100
    return number * 2
"""
TEST = """\
from toy import double


def test_it_doubles():
    assert double(3) == 6
"""


def patch(old: str, new: str) -> str:
    """A mutant of one line of the code."""
    lines = CODE.splitlines()
    at = lines.index(old)
    context = f" {lines[at + 1]}\n" if at + 1 < len(lines) else ""
    return (f"Breaks: {old.strip()}\nTests: tests/test_toy.py\n\n--- a/sidecar/src/toy/__init__.py\n"
            f"+++ b/sidecar/src/toy/__init__.py\n@@ -{at + 1},{2 if context else 1} +{at + 1},{2 if context else 1} @@\n"
            f"-{old}\n+{new}\n{context}")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one function, one test, and mutants of every kind."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts in a quarter of the time
    files = {
        "sidecar/src/toy/__init__.py": CODE, "tests/test_toy.py": TEST, "operator/src/none.txt": "", ".gitignore": "*.so\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\n", "sidecar/src/toy/part.so": "compiled",
        "tests/mutants/a-killed.patch": patch("    return number * 2", "    return number * 3"),
        "tests/mutants/b-lives.patch": patch("    if number > 100:", "    if number > 1000:"),
        "tests/mutants/c-moved.patch": patch("        number = 100", "        number = 5").replace("= 100", "= 99"),
        "tests/mutants/d-no-code.patch": patch("    return number * 2", "    return number *"),
        "tests/mutants/e-hangs.patch": patch("    return number * 2", "    while True: pass"),
    }
    root = tmp_path / "tree"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True, timeout=60)
    return root


def state(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and ".git" not in path.relative_to(root).parts}


def judged(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """The exit code, the lines of the table, and what else was said."""
    code = mutants.main(["--root", str(root), *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_each_mutant_gets_its_verdict_and_the_tree_stays_as_it_is(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(tree)
    code, lines, _ = judged(tree, capsys, "--only", "[a-d]-*")
    assert code == 1
    assert [line.split()[:2] for line in lines[:4]] == [["KILLED", "a-killed"], ["LIVES", "b-lives"], ["BROKEN", "c-moved"],
                                                        ["BROKEN", "d-no-code"]]
    assert "c-moved.patch no longer applies: error: patch failed" in "\n".join(lines)
    assert lines[-1] == "4 mutants: 1 KILLED, 1 LIVES, 2 BROKEN"
    assert state(tree) == before


def test_all_killed_is_0(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, words = judged(tree, capsys, "--only", "a-killed")
    assert (code, lines[-1]) == (0, "1 mutants: 1 KILLED, 0 LIVES, 0 BROKEN")
    assert words == "1/1 a-killed: KILLED, tests/test_toy.py::test_it_doubles\n"


def test_a_mutant_whose_tests_do_not_end_is_killed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, words = judged(tree, capsys, "--only", "e-hangs", "--deadline", "3")
    assert (code, words) == (0, "1/1 e-hangs: KILLED, no end within 3 s\n")


def test_tests_that_fail_without_a_mutant_judge_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests/test_toy.py").write_text(TEST.replace("6", "7"))
    code, lines, words = judged(tree, capsys, "--only", "a-killed")
    assert (code, lines) == (2, [])
    assert "the tests fail without any mutant: tests/test_toy.py::test_it_doubles" in words


@pytest.mark.parametrize(("text", "words"), [
    ("Tests: tests/test_toy.py\n", "Breaks and a diff is missing"), ("Breaks: it\n", "Tests and a diff is missing"),
    (patch("    return number * 2", "    return 1").replace("Tests", "Tets"), "Tests is missing"),
])
def test_a_mutant_that_does_not_say_enough_is_named(tree: Path, text: str, words: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests/mutants/f-short.patch").write_text(text)
    code, _, said = judged(tree, capsys)
    assert (code, said) == (2, f"mutants: f-short.patch: {words}\n")


def test_a_name_that_nobody_has_is_told(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(tree, capsys, "--only", "nobody")[::2] == (2, "mutants: no mutant is called nobody\n")


def test_a_copy_has_what_git_would_take_and_the_compiled_parts(tree: Path, tmp_path: Path) -> None:
    (tree / "sidecar/src/toy/__pycache__").mkdir()
    (tree / "elsewhere.txt").write_text("")
    mutants.copy(tree, tmp_path / "copy")
    files = set(state(tmp_path / "copy"))
    assert {"sidecar/src/toy/__init__.py", "sidecar/src/toy/part.so", "tests/test_toy.py", "pyproject.toml"} <= files
    assert "elsewhere.txt" not in files


def test_a_mutant_of_c_is_compiled_in_its_copy(tree: Path) -> None:
    (tree / "sidecar/src/toy/part.c").write_text("int one = 1;\n")
    (tree / "sidecar/hatch_build.py").write_text(textwrap.dedent("""\
        import pathlib, sys
        here = pathlib.Path(__file__).parent / "src/toy"
        text = (here / "part.c").read_text()
        (here / "part.so").write_text("made of " + text)
        sys.exit("no compiler takes that" if "wrong" in text else 0)
        """))
    (tree / "tests/test_toy.py").write_text(textwrap.dedent("""\
        import pathlib, toy
        def test_part():
            assert (pathlib.Path(toy.__file__).parent / "part.so").read_text() in {"compiled", "made of int one = 1;\\n"}
        """))
    for new, verdict in (("int one = 2;", "KILLED"), ("int wrong", "BROKEN")):
        (tree / "tests/mutants/part.patch").write_text(
            "Breaks: it\nTests: tests/test_toy.py\n\n--- a/sidecar/src/toy/part.c\n+++ b/sidecar/src/toy/part.c\n"
            f"@@ -1,1 +1,1 @@\n-int one = 1;\n+{new}\n")
        [mutant] = mutants.mutants(tree, ["part"])
        assert mutants.judge(tree, mutant, 60.0).verdict == verdict
