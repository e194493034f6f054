"""Break the code on purpose, one mutant at a time, and say whether the tests notice: a test that never fails tests nothing.

    python scripts/mutants.py [--only 'NAME …']      NAME: of files in tests/mutants, with * and ? as in a shell

A mutant is a patch, ``tests/mutants/NAME.patch``: a unified diff against this tree below two lines of words:

    Breaks: what is wrong with it
    Tests: tests/unit/test_some.py tests/unit/test_other.py::test_of_it

The tests that are named must fail with it. Each mutant is a copy of its own in a temporary folder, with the compiled parts;
where it changes C, these are compiled there again. The working tree is never changed.

    KILLED   a test failed, did not end in time, or brought its process down
    LIVES    all of them passed
    BROKEN   the patch no longer applies, does not compile, or the tests could not be run

The exit code is 0 where all are killed, 1 where one is not, 2 where the tests fail without any mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("tests", "mutants")
PARTS = ("pyproject.toml", "sidecar", "operator", "tests", "e2e", "scripts", "docs", "README.md", "CHANGELOG.md")
"""What a copy has of the tree, where it is there."""
SOURCES = ("sidecar/src", "operator/src")
DEADLINE_S = 240.0
"""Of the tests of one mutant."""
TOOL_S = 60.0
"""Of git, and of a compiler."""
_HEADER = re.compile(r"^(Breaks|Tests): +(.+)$", re.MULTILINE)
_TOUCHED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
KILLED, LIVES, BROKEN = "KILLED", "LIVES", "BROKEN"


class Wrong(Exception):
    """Something that keeps mutants from being judged; says what."""


@dataclass(frozen=True)
class Mutant:
    """One patch."""

    name: str
    patch: Path
    breaks: str
    tests: tuple[str, ...]
    touched: tuple[str, ...]
    """Files that it changes."""


@dataclass(frozen=True)
class Verdict:
    """What became of one."""

    mutant: Mutant
    verdict: str
    seconds: float
    why: str
    """The first test that failed, or what went wrong."""


def read(patch: Path) -> Mutant:
    """A mutant from its file.

    Raises:
        Wrong: it does not say what it breaks, which tests must notice, or changes nothing.
    """
    text = patch.read_text()
    said = dict(_HEADER.findall(text.partition("\n--- ")[0]))
    touched = tuple(_TOUCHED.findall(text))
    missing = [name for name in ("Breaks", "Tests") if name not in said] + ([] if touched else ["a diff"])
    if missing:
        raise Wrong(f"{patch.name}: {' and '.join(missing)} is missing")
    return Mutant(patch.stem, patch, said["Breaks"], tuple(said["Tests"].split()), touched)


def mutants(root: Path, only: Sequence[str] = ()) -> list[Mutant]:
    """Those of a tree, by name.

    Raises:
        Wrong: there is none, or none of a name that is asked for.
    """
    found = [read(patch) for patch in sorted((root / FOLDER).glob("*.patch"))]
    for pattern in only or ("*",):
        if not any(fnmatch.fnmatch(one.name, pattern) for one in found):
            raise Wrong(f"no mutant is called {pattern}")
    return [one for one in found if not only or any(fnmatch.fnmatch(one.name, pattern) for pattern in only)]


def apply(mutant: Mutant, tree: Path, *, check: bool = False) -> str:
    """Apply a patch to a tree, or only say whether it can be; what is wrong, or nothing."""
    command = ["git", "apply", *(["--check"] if check else []), str(mutant.patch)]
    # A folder inside a repository is patched as if it were none: paths would count from the repository's own root.
    apart = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent), "GIT_DIR": str(tree / ".no-repository")}
    done = subprocess.run(command, cwd=tree, env=apart, capture_output=True, text=True, check=False, timeout=TOOL_S)
    return done.stderr.strip() or f"git apply: exit code {done.returncode}" if done.returncode else ""


def files_of(root: Path) -> Iterator[Path]:
    """What a copy consists of: all that git knows or would take, as it is now, and the compiled parts."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--",
               *(part for part in PARTS if (root / part).exists())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TOOL_S)
    if done.returncode:
        raise Wrong(f"git ls-files: {done.stderr.strip()}")
    for name in sorted(set(done.stdout.split("\0")) - {""}):
        if (root / name).is_file():
            yield Path(name)
    for source in SOURCES:
        for path in sorted((root / source).rglob("*.so")):
            yield path.relative_to(root)


def copy(root: Path, to: Path) -> None:
    """Copy a tree."""
    for name in files_of(root):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, to / name)


def run(tree: Path, command: Sequence[str], deadline_s: float) -> tuple[int | None, str]:
    """Run Python in a tree, with its own packages: its exit code, None where it did not end in time, and what it said."""
    paths = os.pathsep.join(str(tree / source) for source in SOURCES)
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen([sys.executable, *command], cwd=tree, env=environment, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            words, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # with all that it has started
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, words


def tested(tree: Path, tests: Sequence[str], deadline_s: float) -> tuple[str, str]:
    """Run tests in a tree: the verdict on a mutant that is there, and why."""
    code, words = run(tree, ["-m", "pytest", "-x", "-p", "no:cacheprovider", *tests], deadline_s)
    last = next((line for line in reversed(words.splitlines()) if line.strip()), "it said nothing")
    match code:
        case None:
            return KILLED, f"no end within {deadline_s:g} s"
        case 0:
            return LIVES, last
        case 1:
            return KILLED, next(iter(_FAILED.findall(words)), last)
        case int() if code < 0:
            return KILLED, f"the tests were ended by signal {-code}"
        case _:
            return BROKEN, f"pytest ended with {code}: {last}"


def judge(root: Path, mutant: Mutant, deadline_s: float) -> Verdict:
    """Make a mutant, and test it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy(root, tree)
        wrong = apply(mutant, tree)
        if wrong:
            verdict, why = BROKEN, f"{mutant.patch.name} no longer applies: {' '.join(wrong.split())}"
        else:
            wrong = compiled(mutant, tree)
            verdict, why = (BROKEN, wrong) if wrong else tested(tree, mutant.tests, deadline_s)
    return Verdict(mutant, verdict, time.monotonic() - began, why)


def compiled(mutant: Mutant, tree: Path) -> str:
    """Compile again what a mutant changes in C; what is wrong, or nothing."""
    if not any(name.endswith((".c", ".h")) for name in mutant.touched):
        return ""
    code, words = run(tree, [str(tree / "sidecar/hatch_build.py")], TOOL_S)
    return f"it does not compile: {' '.join(words.split())}" if code != 0 else ""


def without(root: Path, chosen: Sequence[Mutant], deadline_s: float) -> str:
    """Run all named tests without any mutant; what is wrong, or nothing."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve()
        copy(root, tree)
        for package in [path.parent for source in SOURCES for path in sorted((tree / source).glob("*/__init__.py"))]:
            _, words = run(tree, ["-c", f"import {package.name}; print({package.name}.__file__)"], TOOL_S)
            if not words.startswith(str(tree)):
                return f"{package.name} is not that of the copy, but {words.strip()}"
        verdict, why = tested(tree, sorted({test for mutant in chosen for test in mutant.tests}), deadline_s)
    return "" if verdict == LIVES else f"the tests fail without any mutant: {why}"


def table(verdicts: Sequence[Verdict]) -> str:
    """All of them, in lines."""
    width = max(len(one.mutant.name) for one in verdicts)
    lines = [f"{one.verdict:<7} {one.mutant.name:<{width}} {one.seconds:6.1f} s  {one.mutant.breaks}" for one in verdicts]
    lines += [f"        {one.mutant.name}: {one.why}" for one in verdicts if one.verdict != KILLED]
    counts = ", ".join(f"{sum(one.verdict == kind for one in verdicts)} {kind}" for kind in (KILLED, LIVES, BROKEN))
    return "\n".join([*lines, f"{len(verdicts)} mutants: {counts}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge them; the exit code."""
    parser = argparse.ArgumentParser(description="Break the code on purpose, and say whether the tests notice.")
    parser.add_argument("--only", default="", metavar="'NAME …'", help="mutants of these names alone (*, ? as in a shell)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="seconds for the tests of a mutant")
    options = parser.parse_args(arguments)
    root, verdicts = options.root.resolve(), []
    try:
        chosen = mutants(root, options.only.split())
        wrong = without(root, chosen, TOOL_S + options.deadline * len(chosen))
        for number, mutant in enumerate(chosen if not wrong else (), 1):
            verdict = judge(root, mutant, options.deadline)
            verdicts.append(verdict)
            sys.stderr.write(f"{number}/{len(chosen)} {mutant.name}: {verdict.verdict}, {verdict.why}\n")
    except (Wrong, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    if wrong:
        sys.stderr.write(f"mutants: {wrong}\n")
        return 2
    sys.stdout.write(table(verdicts) + "\n")
    return 0 if all(one.verdict == KILLED for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
