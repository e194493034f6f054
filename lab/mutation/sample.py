"""``python -m lab mutation``: break the product at places that are drawn, and say where no test notices.

    --changed [--base REV]     places in functions of which lines differ from REV (main)
    --sample 200 --seed 7      places of the whole product; --seed may stand several times
    --operators 60 --seed 7    one comparison or and/or of the modules that decide; needs no cosmic-ray
    --again FILE               the places of FILE's runs, in this tree: to compare two commits

Places are broken in a copy of the tree, one at a time. Of each, the test file of the module's name is asked, then up to six
that import it, then, with --broad S, those that reach its package within S seconds (with --all, every unit test file). What
was judged is kept in the file of --write, so the same command goes on after --minutes or a break.

The exit code is 0 however many live, since a change may mean nothing; it is 2 where nothing was judged.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import repeat, zip_longest
from pathlib import Path

from lab import extras
from lab.mutation import cosmic, operators
from lab.mutation.choose import suite_of
from lab.mutation.figures import Figures, Row, change_of, summary
from lab.mutation.functions import moved
from lab.mutation.judge import ALIVE, GONE, Judge
from lab.mutation.tree import TreeError, copied

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("bench", "results", "mutation.json")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m lab mutation", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = made.add_mutually_exclusive_group(required=True)
    kind.add_argument("--changed", action="store_true", help="places in what differs from --base")
    kind.add_argument("--sample", type=int, metavar="N", help="N places of the whole product")
    kind.add_argument("--operators", type=int, metavar="N", help="N comparisons and and/or of the modules that decide")
    kind.add_argument("--again", type=Path, metavar="FILE", help="the places of another run")
    made.add_argument("--base", default="main", metavar="REV", help="for --changed (main)")
    made.add_argument("--seed", type=int, action="append", help="of the draw; drawn itself where it is not given")
    made.add_argument("--places", type=int, metavar="N", help="only so many for now, the first of the draw")
    made.add_argument("--without", action="append", default=[], metavar="PATTERN",
                      help="modules that --operators leaves out")
    made.add_argument("--tree", type=Path, default=ROOT, help="the checkout that is broken (this one)")
    made.add_argument("--write", type=Path, metavar="FILE", help=f"({RESULTS})")
    made.add_argument("--minutes", type=float, default=240.0, help="no place is begun after that (240)")
    made.add_argument("--broad", type=float, default=0.0, metavar="S",
                      help="seconds for all test files that reach the package")
    made.add_argument("--all", action="store_true", help="every unit test file, for what is left alive")
    return made


def commit_of(root: Path) -> str:
    """What is checked out, with a mark where files differ from it."""
    done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty"], capture_output=True,
                          text=True, check=True, timeout=60)
    return done.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, judge, write; the exit code."""
    options = parser().parse_args(argv)
    root = options.tree.resolve()
    figures = Figures(options.write or root / RESULTS)
    try:
        runs = drawn(options, root, figures)
        deals = zip_longest(*(list(zip(repeat(run), run["places"], hints))[:options.places] for run, hints in runs))
        rows = [one for deal in deals for one in deal if one and open_(one[1], options)]
        until = time.monotonic() + 60 * options.minutes
        with copied(root) as tree:
            judge = Judge(tree, suite_of(tree), options.broad, options.all)
            for number, (run, row, hint) in enumerate(rows, 1):
                if time.monotonic() > until:
                    break
                verdict = judge.judge(change_of(row), hint, again=row.get("asked", 0) > 0)
                row["broad"] = options.broad
                figures.judged(run, row, verdict)
                say(f"{number}/{len(rows)} {verdict.verdict} {row['function']}  {verdict.seconds} s  {verdict.why}")
    except (TreeError, extras.ExtraError) as error:
        say(f"mutation: {error}")
        return 2
    for run, _ in runs:
        say(summary(run))
    return 0 if any(run["judged"] for run, _ in runs) else 2


def open_(row: Row, options: argparse.Namespace) -> bool:
    """Whether a place is still to be judged, or more tests are to be asked than before."""
    if row.get("verdict") != ALIVE:
        return "verdict" not in row
    return bool(options.broad or options.all) and row["broad"] != options.broad


def drawn(options: argparse.Namespace, root: Path, figures: Figures) -> list[tuple[Row, list[str]]]:
    """The runs that are asked for, with a test file to ask first for each place."""
    commit = commit_of(root)
    if options.again:
        before = json.loads(options.again.read_text("utf-8"))["runs"]
        return [again(figures, run, root, commit) for run in before]
    if options.changed:
        changes = cosmic.changed(root, options.base, 0)
        run = figures.run("changed", None, commit, changes)
        return [(run, [""] * len(run["places"]))]
    runs = []
    for seed in options.seed or [random.SystemRandom().randrange(1000, 10_000)]:
        say(f"seed {seed}")
        if options.operators:
            changes = operators.draw(root, options.operators, seed, tuple(options.without))
        else:
            changes = cosmic.draw(root, options.sample, seed)
        run = figures.run("operators" if options.operators else "sample", seed, commit, changes)
        runs.append((run, [""] * len(run["places"])))
    return runs


def again(figures: Figures, before: Row, root: Path, commit: str) -> tuple[Row, list[str]]:
    """The places of a run elsewhere, which were judged there; first the test file is asked that noticed there."""
    rows = [row for row in before["places"] if row.get("verdict", GONE) != GONE]
    kind, changes = f"{before['kind']} of {before['commit'][:8]}", [moved(root, change_of(row)) for row in rows]
    run = figures.run(kind, before["seed"], commit, changes)
    return run, [Path(row["test"].partition("::")[0]).name for row in rows]


def say(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
