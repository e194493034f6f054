"""A unit: one process of ours in a session of its own, with its log, and what is known of its ends.

    <folder>/<name>.pid       who it is, written by the process itself (``shim``)
    <folder>/<name>.ends      how it ended before: facts only, so that back-off survives a restart of the supervisor
    <folder>/<name>.log       output, both streams; bounded by ``logs.bound``

A unit outlives whoever started it. Everything that its process started belongs to it, and is ended with it (vLLM's engine
core lives on for minutes when its API server is killed).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from xpyd_operator.errors import LocalError
from xpyd_operator.local import logs, procs, shim
from xpyd_operator.local.procs import Identity, Scan, Stat
from xpyd_operator.plan import backoff
from xpyd_operator.plan.cause import cause
from xpyd_operator.plan.observed import ObservedUnit
from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.liveness import STACKS_SIGNAL

RECORD_DEADLINE_S = 60.0
"""From starting an interpreter until it has written its record; long, since the host may be busy loading models."""
FOLLOWERS_S = 5.0
"""How long the rest of a session may go on after its leader has ended in good order."""
KILL_DEADLINE_S = 20.0
"""From SIGKILL until the kernel has taken the process down (large memory takes a while)."""
TRACKER_S = 3.0
"""How long a resource tracker may take to clean up after the processes it served."""
POLL_S = 0.05
CAUSE_LINES = 4000
"""Lines of a log in which the cause of an end is looked for: tracebacks of many workers are long."""
ENDING_LINES = 200
"""An end that has a cause has a traceback in its last lines; an older one was overcome."""
START_LINE = "=== xpyd: start of"
"""Begins the output of each process in a log that has that of several."""
T = TypeVar("T", bound=msgspec.Struct)


class Ends(msgspec.Struct, frozen=True):
    """What is remembered of earlier ends."""

    crashes: int = 0
    """Ends without being asked, in a row."""
    ended: float = 0.0
    """The last one, unix seconds."""
    exit: str = ""
    """How, in words."""
    total: int = 0
    """Ends without being asked, ever."""
    counted: Identity | None = None
    """The process whose end is counted in this; each counts once."""


class Unit:
    """One process of ours; see the module."""

    def __init__(self, name: str, folder: Path, marker: str) -> None:
        self.name = name
        self.folder = folder
        self.marker = marker
        self.log = folder / f"{name}.log"
        self._record = folder / f"{name}.pid"
        self._ends = folder / f"{name}.ends"
        self._child: subprocess.Popen[bytes] | None = None

    def leader(self) -> Identity | None:
        """The process that was started last, alive or not; None where none was (or the record is unreadable)."""
        return _read(self._record, Identity)

    def alive(self) -> bool:
        """Whether its process lives."""
        if self._child is not None:
            self._child.poll()
        leader = self.leader()
        return leader is not None and procs.alive(leader)

    def processes(self, scan: Scan | None = None) -> list[Stat]:
        """Every living process that belongs to it."""
        return procs.members(self.leader(), self.marker, self.log, scan)

    def observe(self, now: float) -> ObservedUnit:
        """The unit as the planner sees it at ``now``, unix seconds."""
        leader, ends = self.leader(), self.ends()
        living = self.alive()
        ran_s = now - leader.unix if leader is not None and living else None
        crashes = backoff.crashes_in_a_row(ends.crashes, ran_s)
        return ObservedUnit(self.name, living, crashes, ends.ended, ends.exit or "it was not started yet")

    def stopping(self) -> bool:
        """Whether somebody has asked its process to end and it still lives."""
        return self.alive() and self.ends().counted == self.leader()

    def ends(self) -> Ends:
        """Earlier ends; nothing where none is known."""
        return _read(self._ends, Ends) or Ends()

    def note_end(self, now: float) -> Ends | None:
        """Write down an end that nobody asked for, once; None where there is none that is new."""
        leader, ends = self.leader(), self.ends()
        if leader is None or ends.counted == leader or self.alive():
            return None
        code = self._child.poll() if self._child is not None and self._child.pid == leader.pid else None
        ran_s = max(0.0, now - leader.unix)
        crashes = backoff.count_crash(ends.crashes, ran_s)
        new = Ends(crashes, now, self._why(code), ends.total + 1, leader)
        run_folder.write(self._ends, new)
        return new

    def _why(self, code: int | None) -> str:
        """How its process ended, with the innermost cause in its log where it ended by itself."""
        words = how_it_ended(code)
        if code is not None and code <= 0:
            return words
        lines: list[str] = []
        for line in logs.tail(self.log, CAUSE_LINES):
            if line.startswith(START_LINE):
                lines.clear()
            else:
                lines.append(line)
        found = cause(lines) if cause(lines[-ENDING_LINES:]) else ""
        return f"{words}: {found}" if found else words

    def note_failed_start(self, now: float, reason: str) -> None:
        """A start that did not even make a process backs off like a crash."""
        ends = self.ends()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_folder.write(self._ends, Ends(ends.crashes + 1, now, reason, ends.total + 1, self.leader()))

    async def start(self, argv: Sequence[str], env: Mapping[str, str]) -> Identity:
        """Start the process, after ending whatever is left of the one before.

        ``env`` is laid over this process's own environment.

        Raises:
            LocalError: it did not come up, or what was there before cannot be ended.
        """
        await self.kill()
        self._record.unlink(missing_ok=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-I", "-S", str(Path(shim.__file__)), str(self._record), "--", *argv]
        whole = {**os.environ, **env, procs.MARKER: self.marker}
        try:
            with open(self.log, "ab", buffering=0) as log:  # noqa: ASYNC230 (a local file)
                log.write(f"{START_LINE} {self.name}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n".encode())
                self._child = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                    command,
                    env=whole,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,
                )
        except OSError as error:
            raise LocalError(f"{self.name}: cannot start {argv[0]}: {error.strerror}") from None
        end = time.monotonic() + RECORD_DEADLINE_S
        while True:
            over = self._child.poll() is not None or time.monotonic() > end
            if (leader := self.leader()) is not None:  # what came up and ended at once has left it, too
                return leader
            if over:
                raise LocalError(f"{self.name}: did not come up ({how_it_ended(self._child.returncode)}); see {self.log}")
            await asyncio.sleep(POLL_S / 5)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, up to ``grace_s`` seconds, then SIGKILL for all that is left. Counts as asked for.

        Raises:
            LocalError: something survives SIGKILL.
        """
        leader = self.leader()
        if leader is not None:
            self._asked(leader)
            if grace_s > 0 and procs.send(leader.pid, leader.start, signal.SIGTERM):
                await wait_until(lambda: not self.alive(), grace_s)
                if not self.alive():
                    await wait_until(lambda: not self.processes(), FOLLOWERS_S, POLL_S * 4)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL for every process of the unit, until none is left. Counts as asked for.

        Resource trackers are spared at first: they clean up after the others, as nothing else can (the names of
        semaphores are random, and nobody need have them open), and then end by themselves.

        Raises:
            LocalError: something survives it (a process stuck in the kernel).
        """
        leader = self.leader()
        if leader is not None and procs.alive(leader):
            self._asked(leader)
        began = time.monotonic()
        end = began + KILL_DEADLINE_S
        while left := self.processes():
            spare = time.monotonic() < began + TRACKER_S
            for process in left:
                if not (spare and procs.tracks_resources(process.pid)):
                    procs.send(process.pid, process.start, signal.SIGKILL)
            if time.monotonic() > end:
                pids = ", ".join(str(process.pid) for process in left)
                raise LocalError(f"{self.name}: processes {pids} do not end, even after SIGKILL")
            await asyncio.sleep(POLL_S)
            for process in left:
                if self._child is None or process.pid != self._child.pid:
                    procs.reap(process.pid)
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=0)

    def dump(self) -> list[Stat]:
        """Have its processes write their stacks to its log, those that can; all of them, with their states. A process that
        is stopped writes nothing before it is continued.
        """
        found = self.processes()
        for process in found:
            if procs.catches(process.pid, STACKS_SIGNAL):
                procs.send(process.pid, process.start, STACKS_SIGNAL)
        return found

    def abort(self) -> None:
        """SIGKILL for its processes as they are now, but for resource trackers (``kill``). Counts as an end that nobody
        asked for, so that it is started again as one that crashed; what is left then is ended at that start.
        """
        for process in self.processes():
            if not procs.tracks_resources(process.pid):
                procs.send(process.pid, process.start, signal.SIGKILL)

    def _asked(self, leader: Identity) -> None:
        """The coming end of this process is no crash."""
        ends = self.ends()
        if ends.counted != leader:
            run_folder.write(self._ends, msgspec.structs.replace(ends, counted=leader))


async def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Wait for a condition that has no event behind it; whether it came true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(poll_s)
    return True


def how_it_ended(code: int | None) -> str:
    """An exit status in words; None where it is not known (the process was not our child)."""
    if code is None:
        return "it ended"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit code {code}"


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
