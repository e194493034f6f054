"""A copy of the tree in which code is broken, and tests that run there.

The copy has all that git knows or would take, as it is now, and the compiled parts. It lies in a temporary folder, which
goes away whatever happens. A deadline ends the tests with all processes that they have started.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.mutation.functions import PACKAGES, Change, apply, path_of

TOOL_S = 60.0
"""Of git, and of an import."""
TEST_S = 60
"""Of one test."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)


class TreeError(Exception):
    """No copy of the tree can be made, or tests cannot be run in it; says why."""


@dataclass(frozen=True)
class Ran:
    """What tests have said."""

    killed: bool
    """One failed, brought its process down, or did not end in time where that was asked to count."""
    test: str = ""
    """The first that failed."""
    why: str = ""
    late: bool = False
    """They did not end in time."""


def files_of(root: Path) -> Iterator[Path]:
    """What a copy consists of."""
    done = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                          capture_output=True, text=True, check=False, timeout=TOOL_S)
    if done.returncode:
        raise TreeError(f"git ls-files: {done.stderr.strip()}")
    for name in sorted(set(done.stdout.split("\0")) - {""}):
        if (root / name).is_file():
            yield Path(name)
    for source in PACKAGES.values():
        for path in sorted((root / source).rglob("*.so")):
            yield path.relative_to(root)


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of a tree, for as long as it is used.

    Raises:
        TreeError: Python takes a package from elsewhere when it runs in the copy.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder).resolve()
        for name in files_of(root):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)
        for package, source in PACKAGES.items():
            if not (tree / source / package / "__init__.py").is_file():
                continue
            _, words = run(tree, ["-c", f"import {package}; print({package}.__file__)"], TOOL_S)
            if not words.startswith(str(tree)):
                raise TreeError(f"{package} is not that of the copy, but {words.strip()}")
        yield tree


@contextlib.contextmanager
def broken(tree: Path, change: Change) -> Iterator[None]:
    """A change in a copy, taken back afterwards.

    Raises:
        UnfitError: it does not fit.
    """
    path = path_of(tree, change.module)
    source = path.read_text("utf-8")
    changed = apply(source, change)
    try:
        _write(path, changed)
        yield
    finally:
        _write(path, source)


def _write(path: Path, text: str) -> None:
    """Write a module. Bytecode is found by size and second, which a change may share with the original: it goes."""
    path.write_text(text, "utf-8")
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def run(tree: Path, command: Sequence[str], deadline_s: float) -> tuple[int | None, str]:
    """Run Python in a tree, with its own packages: its exit code, None where it did not end in time, and what it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / source) for source in PACKAGES.values())}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled anew, a file's tests take twice as long
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen([sys.executable, *command], cwd=tree, env=environment, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # with all that it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read()


def run_tests(tree: Path, tests: Sequence[str], deadline_s: float, *, late_is_killed: bool = True,
              without: Sequence[str] = ()) -> Ran:
    """Run tests in a tree up to the first that fails.

    Args:
        tree: the copy.
        tests: files, or tests by pytest's names.
        deadline_s: for all of them.
        late_is_killed: what it means that they did not end in time.
        without: tests that are left out.

    Raises:
        TreeError: pytest could not run them.
    """
    command = ["-m", "pytest", "-x", "-p", "no:cacheprovider", "--timeout", str(TEST_S),
               *(f"--deselect={one}" for one in without), *tests]
    code, words = run(tree, command, deadline_s)
    last = next((line for line in reversed(words.splitlines()) if line.strip()), "it said nothing")
    failed = next(iter(_FAILED.findall(words)), "")
    match code:
        case None:
            return Ran(late_is_killed, "", f"no end within {deadline_s:g} s", late=True)
        case 0 | 5:  # 5: all of them are left out
            return Ran(False, "", last)
        case 1:
            return Ran(True, failed, failed or last)
        case int() if code < 0:
            return Ran(True, "", f"the tests were ended by signal {-code}")
        case _ if failed:  # a test file that cannot be imported
            return Ran(True, failed, failed)
        case _:
            raise TreeError(f"pytest ended with {code}: {last}")

