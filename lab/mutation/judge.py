"""The verdict on one change: whether the tests that are chosen for its module notice, and which of them does first.

A test that fails also without the change notices nothing. So each one that kills is run once on the unbroken copy; where it
fails there, too, it is left out, and the rest is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.mutation.choose import USERS, Suite
from lab.mutation.functions import Change, UnfitError, apply, path_of
from lab.mutation.tree import Ran, broken, run_tests

KILLED, ALIVE, GONE = "killed", "alive", "gone"
"""GONE: the function is not there, or not with this text."""
STEP_S = 150.0
"""For the file of the module's name, and again for those that import it."""


@dataclass(frozen=True)
class Verdict:
    """What became of a change."""

    verdict: str
    step: str = ""
    """Which choice of tests killed it: hint, own, users, broad, all."""
    test: str = ""
    """The test that killed it."""
    why: str = ""
    """The same with what it is: no end of the tests in time counts, too. Of one that lives: what was not asked."""
    seconds: float = 0.0
    asked: int = 0
    """Test files that were run."""


@dataclass
class Judge:
    """Judges changes in one copy of the tree, one after the other."""

    tree: Path
    tests: Suite
    broad_s: float = 0.0
    """For all files that reach the package of the module; 0: these are not asked."""
    every: bool = False
    """All test files are asked."""
    trusted: set[str] = field(default_factory=set)
    flaky: set[str] = field(default_factory=set)

    def judge(self, change: Change, hint: str = "", *, again: bool = False) -> Verdict:
        """The verdict.

        Args:
            change: what is broken.
            hint: name of a test file that is asked first, wherever it lies.
            again: its own tests and those that import it have not noticed before, and are not asked again.
        """
        began, asked, late = time.monotonic(), list[Path](), ""
        try:
            apply(path_of(self.tree, change.module).read_text("utf-8"), change)
        except UnfitError as error:
            return Verdict(GONE, why=str(error))
        for step, files, deadline_s in self.steps(change.module, hint):
            new = [path for path in files if path not in asked]
            asked += new
            if not new or (again and step in {"own", "users"}):
                continue
            ran = self._killer(change, new, deadline_s, late_is_killed=step in {"hint", "own"})
            late = late or ran.why if ran.late else late
            if ran.killed:
                return Verdict(KILLED, step, ran.test, ran.why, round(time.monotonic() - began, 1), len(asked))
        return Verdict(ALIVE, seconds=round(time.monotonic() - began, 1), asked=len(asked),
                       why=late if asked else "no test file imports the module")

    def steps(self, module: str, hint: str) -> Sequence[tuple[str, list[Path], float]]:
        """What is asked, one after the other: name, test files, deadline."""
        hinted = [path for path in self.tests.imports if path.name == hint]
        steps = [("hint", hinted, STEP_S), ("own", self.tests.own(module), STEP_S),
                 ("users", self.tests.users(module)[:USERS], STEP_S)]
        if self.broad_s:
            steps.append(("broad", self.tests.reaching(module), self.broad_s))
        if self.every:
            steps.append(("all", list(self.tests.imports), 3600.0))
        return steps

    def _killer(self, change: Change, files: Sequence[Path], deadline_s: float, *, late_is_killed: bool) -> Ran:
        """What these files say, but for tests that fail also without the change."""
        names = [str(path) for path in files]
        while True:
            with broken(self.tree, change):
                ran = run_tests(self.tree, names, deadline_s, late_is_killed=late_is_killed, without=sorted(self.flaky))
            test = ran.test.partition("[")[0]  # what parameters are called may hold what pytest does not take back
            if not ran.killed or test in self.trusted:
                return ran
            if not run_tests(self.tree, [test] if test else names, deadline_s).killed:
                self.trusted |= {test} - {""}
                return ran
            if not test:  # they do not end without the change either
                return replace(ran, killed=False)
            self.flaky.add(test)
