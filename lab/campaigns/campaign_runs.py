"""Runs one campaign after the other, each in a process group of its own, and keeps in a file how far it has come."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lab.campaigns.campaign_plan import Figure, Run, State, clock, forget, judge, of_code, outcome, to_run, unwritten
from lab.campaigns.campaign_rows import Row

PATIENCE_S = (90.0, 10.0, 5.0)
"""What a campaign has to end after SIGINT, SIGTERM and SIGKILL: it has engines to end, too."""
NOT_CODE = (":(exclude)bench/results", ":(exclude)docs", ":(exclude)*.md")
"""What campaigns write themselves, and what tells of it."""
TAIL = 12


def code_of(root: Path) -> str:
    """Names the code of a checkout: the last commit that changed more than figures and texts, and what is not committed."""
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments, "--", ".", *NOT_CODE], capture_output=True, text=True,
                              errors="replace", check=False, timeout=60)
        if done.returncode:
            raise SystemExit(f"campaigns: git {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    changed = hashlib.sha256(git("diff", "HEAD").encode())
    new = [root / name for name in git("ls-files", "--others", "--exclude-standard", "-z").split("\0") if name]
    files = [path for path in new if path.is_file()]
    for path in files:
        changed.update(str(path).encode() + b"\0" + path.read_bytes())
    head = git("log", "-1", "--format=%H").strip()[:12]
    return f"{head}+{changed.hexdigest()[:8]}" if files or git("diff", "HEAD", "--stat") else head


class Runner:
    """Campaigns of a checkout. ``lab``: the lab's command, ``say``: takes a line of progress."""

    def __init__(self, root: Path, folder: Path, code: str, *, lab: Sequence[str] = (sys.executable, "-m", "lab"),
                 is_root: bool = True, say: Callable[[str], None] = print, patience_s: Sequence[float] = PATIENCE_S,
                 minute_s: float = 60.0) -> None:
        self.state: State = {}
        self._root = root
        self._folder = folder
        self._code = code
        self._lab = tuple(lab)
        self._is_root = is_root
        self._say = say
        self._patience_s = patience_s
        self._minute_s = minute_s
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "state.json"
        self.load()

    def load(self) -> None:
        """Read what is kept; of other code nothing counts."""
        self.state = of_code(json.loads(self._file.read_text()), self._code) if self._file.exists() else {}

    def run(self, rows: Sequence[Row], *, fresh: bool = False) -> None:
        """All that has not ended yet.

        Raises:
            KeyboardInterrupt: of who called; the campaign that ran has been ended, and will go on.
        """
        with self._alone():
            if fresh:
                self.state = forget(self.state, rows)
                self._save()
            left = to_run(rows, self.state, root=self._is_root)
            self._say(f"{len(left)} of {len(rows)} campaigns to run, about {clock(sum(row.minutes for row in left) * 60)}; "
                      f"code {self._code}")
            for row in left:
                self._one(row)

    def _one(self, row: Row) -> None:
        goes_on = row.name in self.state
        result = self._root / row.result if row.result else None
        if not goes_on:
            self.state[row.name] = Run(code=self._code, before=_written(result), seconds=0.0, done=False)
        run = self.state[row.name]
        self._save()
        log = self._folder / f"{row.name}.log"
        self._say(f"{row.name}: {'goes on' if goes_on else 'begins'}, about {row.minutes} min, output in {log}")
        command = [*self._lab, *([] if goes_on else ["--fresh"]), row.target]
        began = time.monotonic()
        try:
            with log.open("a" if goes_on else "w") as out:
                run["exit"], run["ended"] = self._play(command, out, row.deadline * self._minute_s)
            run["done"] = True
        finally:
            run["seconds"] = round(run["seconds"] + time.monotonic() - began, 1)
            self._save()
        if result is not None:
            run["figures"] = [list(figure) for figure in _figures(row, result, run["before"])]
            self._save()
        self._say(f"{row.name}: {outcome(row, run, root=self._is_root)} after {clock(run['seconds'])}")
        if run["exit"]:
            self._say("\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-TAIL:]))

    def _play(self, command: Sequence[str], out: IO[str], limit_s: float) -> tuple[int, str]:
        """Its exit code, and why it was ended, if it was."""
        process = subprocess.Popen(command, cwd=self._root, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        ended = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = f"ended at its deadline of {clock(limit_s)}"
        finally:
            self._end(process)
        return process.returncode, ended

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Nothing of its group is left. A second Ctrl-C kills at once."""
        try:
            for way, patience_s in zip((signal.SIGINT, signal.SIGTERM), self._patience_s, strict=False):
                if not _alive(process):
                    return
                os.killpg(process.pid, way)
                _wait_gone(process, patience_s)
        finally:
            if _alive(process):
                os.killpg(process.pid, signal.SIGKILL)
                _wait_gone(process, self._patience_s[-1])

    def _save(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.replace(self._file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit("campaigns: another run is on in this checkout") from None
            self.load()
            yield


def _figures(row: Row, result: Path, before: int) -> list[Figure]:
    if _written(result) in {before, 0}:
        return unwritten(row.goals)
    try:
        found = json.loads(result.read_text())
    except ValueError:
        return unwritten(row.goals, "not JSON")
    return judge(row.goals, found)


def _written(path: Path | None) -> int:
    return path.stat().st_mtime_ns if path is not None and path.exists() else 0


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether something of its group still runs; what only waits to be reaped does not."""
    process.poll()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(fields[2]) == process.pid and fields[0] not in {"Z", "X"}:
            return True
    return False


def _wait_gone(process: subprocess.Popen[bytes], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while _alive(process) and time.monotonic() < end:
        time.sleep(0.05)
