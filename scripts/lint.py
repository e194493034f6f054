"""``make lint``: style, types, import contracts, generated files; two steps at a time, each with its seconds.

    python scripts/lint.py [STEP...]       all of them, or some: ruff, imports, crds, reference, manifests, lab, laws,
                                           minutes, decisions, names, mypy

Tools are those beside the Python that runs this. All steps run, whatever one says; what one that
fails has said is printed whole. Exit code: the greatest of theirs. The hooks of .pre-commit-config.yaml run the same steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LIMIT_S = 1200.0
BESIDE = 2
STEPS: Mapping[str, tuple[str, ...]] = {
    "mypy": (f"{BIN}/mypy",),  # the longest by far where nothing is in its cache, so it begins first
    "ruff": (f"{BIN}/ruff", "check", "."),
    "imports": (f"{BIN}/lint-imports", "--no-logo"),
    "crds": (f"{BIN}/xpyd", "render", "crds", "--check"),
    "reference": (f"{BIN}/xpyd", "render", "reference", "--check"),
    "manifests": (f"{BIN}/python", "scripts/manifests.py", "--check"),
    "lab": (f"{BIN}/python", "-m", "lab", "--docs", "--check"),
    "laws": (f"{BIN}/python", "-m", "lab.mutation.laws", "--check"),
    "minutes": (f"{BIN}/python", "scripts/tier_minutes.py", "check"),
    "decisions": (f"{BIN}/python", "scripts/decisions.py", "check"),
    "names": (f"{BIN}/python", "scripts/plain_names.py"),
}


class Ended(NamedTuple):
    """A step that has run."""

    name: str
    code: int
    output: str
    seconds: float


def run(name: str, command: Sequence[str], *, root: Path = ROOT, limit_s: float = LIMIT_S) -> Ended:
    """One step to its end, or to its deadline."""
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Ended(name, 1, f"ended after {limit_s:.0f} s\n", time.monotonic() - began)
    except OSError as error:
        return Ended(name, 1, f"{command[0]}: {error.strerror} (make setup installs it)\n", time.monotonic() - began)
    return Ended(name, abs(done.returncode), done.stdout, time.monotonic() - began)


def lint(steps: Mapping[str, Sequence[str]], say: Callable[[str], object], *, root: Path = ROOT,
         limit_s: float = LIMIT_S) -> int:
    """All of the steps; the greatest exit code."""
    with ThreadPoolExecutor(BESIDE) as pool:
        running = [pool.submit(run, name, command, root=root, limit_s=limit_s) for name, command in steps.items()]
        worst = 0
        for one in as_completed(running):
            ended = one.result()
            worst = max(worst, ended.code)
            say(f"{'ok ' if not ended.code else 'BAD'} {ended.name:10} {ended.seconds:5.1f} s\n{_indented(ended)}")
    return worst


def _indented(ended: Ended) -> str:
    """What it says, where that is more than that all is well."""
    lines = ended.output.rstrip().splitlines()
    shown = lines if ended.code else [line for line in lines if line.startswith("left out")]
    return "".join(f"    {line}\n" for line in shown)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    names = parser.parse_args(arguments).steps or list(STEPS)
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"no such step: {', '.join(unknown)}; there are: {', '.join(STEPS)}")

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return lint({name: STEPS[name] for name in names}, say)


if __name__ == "__main__":
    sys.exit(main())
