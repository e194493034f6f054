"""``python -m lab mutants``: break each law of ``laws.toml`` in a copy of the tree, and say which ones no test misses.

    python -m lab mutants [--only PATTERN …] [--check]

PATTERN is a function's name or a part of it, as in a shell. ``--check`` only says which rows no longer fit the code.

    killed   one of the row's test files failed, did not end in time, or brought its process down
    ALIVE    all of them passed
    UNFIT    the function, the text or a test file is not there, or the text is there twice

The exit code is 0 where all are killed, 1 where one is not, 2 where the tests fail without any change.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from lab.mutation.choose import FOLDERS
from lab.mutation.functions import Change, UnfitError, apply, path_of
from lab.mutation.tree import TreeError, broken, copied, run_tests

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("laws.toml")
DEADLINE_S = 240.0
"""Of the tests of one law."""
TEST_ALL_S = 900.0
"""Of the test files of all rows, run once without any change."""


@dataclass(frozen=True)
class Law:
    """A row of the table."""

    words: str
    change: Change
    tests: tuple[str, ...]


def laws(table: Path = TABLE) -> list[Law]:
    """All rows, in their order.

    Raises:
        UnfitError: one lacks a field, or has one that nobody knows.
    """
    found = []
    for number, row in enumerate(tomllib.loads(table.read_text("utf-8"))["law"], 1):
        if wrong := {"law", "function", "before", "after", "tests"} ^ set(row):
            raise UnfitError(f"row {number} of {table.name}: missing or unknown: {', '.join(sorted(wrong))}")
        module, _, function = row["function"].partition(":")
        found.append(Law(row["law"], Change(module, function, row["before"], row["after"]), tuple(row["tests"])))
    return found


def files_of(root: Path, law: Law) -> list[str]:
    """The test files of a law, wherever they lie in the folders that need no engines.

    Raises:
        UnfitError: there is none of a name, or several.
    """
    found = []
    for name in law.tests:
        paths = [path for folder in FOLDERS for path in sorted((root / "tests" / folder).rglob(name))]
        if len(paths) != 1:
            raise UnfitError(f"{law.change.name}: {len(paths)} test files are called {name}")
        found.append(str(paths[0].relative_to(root)))
    if not found:
        raise UnfitError(f"{law.change.name}: no test file is named")
    return found


def unfit(root: Path, rows: Sequence[Law]) -> Iterator[str]:
    """What no longer fits, in words that name the row."""
    for row in rows:
        try:
            files_of(root, row)
            apply(path_of(root, row.change.module).read_text("utf-8"), row.change)
        except UnfitError as error:
            yield str(error)


def judge(root: Path, rows: Sequence[Law], deadline_s: float = DEADLINE_S) -> int:
    """Break them one by one; the exit code.

    Raises:
        TreeError: the tests fail without any change, or cannot be run.
    """
    alive = []
    with copied(root) as tree:
        every = sorted({name for row in rows for name in files_of(tree, row)})
        clean = run_tests(tree, every, TEST_ALL_S + deadline_s)
        if clean.killed:
            raise TreeError(f"the tests fail without any change: {clean.why}")
        for number, row in enumerate(rows, 1):
            began = time.monotonic()
            with broken(tree, row.change):
                ran = run_tests(tree, files_of(tree, row), deadline_s)
            if not ran.killed:
                alive.append(row)
            verdict, words = ("killed", ran.why) if ran.killed else ("ALIVE ", row.words)
            say(f"{number}/{len(rows)} {verdict} {row.change.name}  {time.monotonic() - began:.1f} s  {words}")
    say(f"{len(rows)} laws: {len(rows) - len(alive)} killed, {len(alive)} alive")
    return 1 if alive else 0


def say(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="functions of these names alone")
    parser.add_argument("--check", action="store_true", help="only say which rows no longer fit")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree (this one)")
    parser.add_argument("--table", type=Path, default=TABLE, help="the rows (laws.toml)")
    options = parser.parse_args(argv)
    root = options.root.resolve()
    try:
        rows = [row for row in laws(options.table) if any(fnmatch(row.change.name, f"*{one}*") for one in options.only)]
        wrong = list(unfit(root, rows))
        for words in wrong:
            say(f"UNFIT {words}")
        if wrong or options.check or not rows:
            say(f"{len(rows)} laws: {len(wrong)} no longer fit")
            return 1 if wrong or not rows else 0
        return judge(root, rows)
    except (UnfitError, TreeError) as error:
        say(f"mutants: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
