"""The launcher: runs the engine of one member of an instance, one life after the other
(``python -m xpyd_sidecar.member [--grace-s S] -- COMMAND …``).

    round.json (agent) ──▶ life? ── begin ──▶ COMMAND, marks filled in ──▶ ended by itself: in member.json, and counted
                            └─ another one, or none ──▶ SIGTERM, 1 s, SIGKILL

A life is one run of the engines of all members (docs/protocols/group.md). The launcher stays between two lives, so that
containers, caches and devices do. When the engine ends by itself for the third time within 10 minutes, the launcher ends
with its exit code, so that whoever started it counts and delays restarts. SIGTERM ends the engine, within ``--grace-s``
seconds, and the launcher. Imports nothing of the sidecar but ``contract``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.group import (
    LEADER_HERE,
    LIFE_HERE,
    MOST_WORDS,
    PORT_HERE,
    ROUND,
    STATE,
    GroupRound,
    MemberState,
)
from xpyd_sidecar.contract.launch import ENV_RUN_DIR
from xpyd_sidecar.member import remains

logger = logging.getLogger("xpyd_sidecar.member")

FAILURES_MAX: Final = 3
WITHIN_S: Final = 600.0
LOOK_S: Final = 0.2
SAY_S: Final = 1.0
END_S: Final = 1.0
"""From SIGTERM to SIGKILL, where a round is over: launchers hear of it up to 18.3 s after a member was stopped, and an
engine is to run alone for 20 s at most. A server that answers would wait for its streams, which go on elsewhere by then.
"""
KILL_S: Final = 20.0
"""From SIGKILL until the kernel has taken all processes down."""
_COMPILED: Final = "compiled-"
_COMPILED_VAR: Final = "TORCHINDUCTOR_CACHE_DIR"
_SUBREAPER: Final = 36
"""PR_SET_CHILD_SUBREAPER, prctl(2): what the engine leaves behind becomes a child of this process."""
_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG: what a process is sent when its parent ends."""


def next_step(state: MemberState, told: GroupRound | None) -> Literal["", "begin", "end"]:
    """What to do about the engine: ``begin`` it, ``end`` it, or nothing (empty). ``state``: what runs here, or ran last;
    ``told``: what the agent asks for; None: nothing. The life that ran last is never begun again.
    """
    life = told.life if told is not None else ""
    if state.running:
        return "end" if life != state.life else ""
    return "begin" if life and life != state.life else ""


def gives_up(failures: Sequence[float], now: float) -> bool:
    """Whether ``FAILURES_MAX`` engines ended by themselves within the last ``WITHIN_S`` seconds, so that the launcher is to
    end and leave restarts to whoever started it. ``failures``: when they did; ``now``: seconds of the same clock.
    """
    return sum(now - at <= WITHIN_S for at in failures) >= FAILURES_MAX


def fill_marks(args: Sequence[str], told: GroupRound) -> list[str]:
    """The engine's arguments with the round's life, leader's host and port in place of the marks ``{xpyd:life}``,
    ``{xpyd:leader}`` and ``{xpyd:port}``.
    """
    found = {LIFE_HERE: told.life, LEADER_HERE: told.leader, PORT_HERE: str(told.port)}
    out = []
    for argument in args:
        for mark, text in found.items():
            argument = argument.replace(mark, text)  # noqa: PLW2901  # an argument may have several
        out.append(argument)
    return out


class Launcher:
    """Begins and ends the engine of one member as its agent asks. Call ``run``, and ``stop`` from a signal's handler."""

    def __init__(self, run_dir: Path, command: Sequence[str], grace_s: float) -> None:
        """``run_dir``: the member's run folder; ``command``: of the engine, with marks; ``grace_s``: seconds from SIGTERM
        to SIGKILL where the launcher is stopped.
        """
        self._run_dir = run_dir
        self._command = command
        self._grace_s = grace_s
        self._child: subprocess.Popen[bytes] | None = None
        self._group = 0
        """Of an engine that has not ended whole; it counts as running."""
        self._failures: list[float] = []
        self._stopped = False
        self._before = self._state_before()
        """What the launcher before this one said last in this folder."""
        life = self._before.life if self._before is not None else ""
        self._state = MemberState(secrets.token_hex(8), 0, life=life, running=bool(life))
        self._said_at = float("-inf")

    def stop(self) -> None:
        """Have ``run`` end the engine and return."""
        self._stopped = True

    def run(self) -> int:
        """Begin and end engines until ``stop`` is called, or they have failed too often (``gives_up``). Returns the exit
        code of this process: 0 where it was stopped; else the last engine's, or 1 where that could not be started, was
        killed by a signal, or had exit code 0.
        """
        if not self._end_what_was_left():
            return 0
        while not self._stopped:
            if self._child is None and self._group and self._end(0.0):
                self._say(running=False)
            code = self._child.poll() if self._child is not None else None
            if code is not None and not self._ended(code):
                return code if code > 0 else 1
            told = self._told()
            match next_step(self._state, told):
                case "begin":
                    assert told is not None
                    if not self._begin(told):
                        return 1
                case "end":
                    self._say(running=not self._end(END_S))
                case _:
                    pass
            if told is not None and told.turn != self._state.turn:
                self._say(turn=told.turn)
            elif time.monotonic() - self._said_at >= SAY_S:
                self._say()
            time.sleep(LOOK_S)
        self._say(running=not self._end(self._grace_s))
        return 0

    def _state_before(self) -> MemberState | None:
        """The state that a former launcher left in this run folder; None where there is none, or it cannot be read."""
        try:
            return run_folder.read(self._run_dir / STATE, MemberState)
        except (ValueError, OSError) as error:
            logger.warning("%s", error)
            return None

    def _end_what_was_left(self) -> bool:
        """End the engine that a former launcher in this run folder may have left, if it was killed alone: until that has
        ended, the engine counts as running. False: this process was stopped meanwhile.
        """
        before, said = self._before, False
        while before is not None and before.life and (left := remains.find(before, self._run_dir)):
            if self._stopped:
                return False
            if not said:
                logger.warning("life %s: the launcher before this one has left processes %s, which are ended", before.life,
                               ", ".join(map(str, left)))
            said = True
            remains.kill(left)
            if time.monotonic() - self._said_at >= SAY_S:
                self._say()
            time.sleep(0.05)
        self._say(running=False)
        return True

    def _told(self) -> GroupRound | None:
        """The round that the agent asks for; None where there is no file. Where it cannot be read: what runs now."""
        try:
            return run_folder.read(self._run_dir / ROUND, GroupRound)
        except (ValueError, OSError) as error:
            logger.warning("%s; what runs goes on", error)
            return GroupRound(self._state.turn, self._state.life if self._state.running else "")

    def _begin(self, told: GroupRound) -> bool:
        """Begin the engine of a round. Where its life cannot be written to ``member.json`` first, nothing is begun, and it
        is tried again later: a launcher that took this one's place would not know of the engine. False: the engine could
        not be started, and this process is to end (``gives_up``).
        """
        for stale in (*self._run_dir.glob("engine-*.json"), *self._run_dir.glob("pulse-*.json")):
            stale.unlink(missing_ok=True)
        before = self._state
        if not self._say(turn=told.turn, life=told.life, running=True, why=""):
            self._state = before
            return True
        logger.info("life %s: the engine begins, its leader is %s", told.life, told.leader)
        try:
            self._child = subprocess.Popen(fill_marks(self._command, told), env=self._environment(told.life),
                                           stdin=subprocess.DEVNULL, process_group=0,
                                           preexec_fn=functools.partial(_ends_with, os.getpid()))  # noqa: PLW1509 (one thread)
        except OSError as error:
            logger.error("cannot start %s: %s", self._command[0], error)  # noqa: TRY400  # its words say all
            self._say(running=False, why=str(error)[:MOST_WORDS])
            return self._goes_on()
        session, start = remains.session_and_start(self._child.pid)
        self._say(group=self._child.pid, session=session, start=start)
        return True

    def _environment(self, life: str) -> dict[str, str]:
        """The environment of the engine. What torch compiles at first use goes to a folder of this life, unless another
        one is set: an engine that is killed while it compiles leaves half a library, on which the next one would fail.
        Removes the folders of earlier lives.
        """
        for stale in self._run_dir.glob(f"{_COMPILED}*"):
            shutil.rmtree(stale, ignore_errors=True)
        compiled = {_COMPILED_VAR: str(self._run_dir / f"{_COMPILED}{life}")}
        return {**compiled, **os.environ, **remains.marks(life, self._run_dir)}

    def _ended(self, code: int) -> bool:
        """The engine has ended by itself, with this exit code or (negative) signal. Whether this process goes on."""
        words = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        logger.error("life %s: the engine ended: %s", self._state.life, words)
        self._say(running=not self._end(0.0), why=words)
        return self._goes_on()

    def _goes_on(self) -> bool:
        """Count a failure of the engine that happened now. Whether this process goes on (``gives_up``)."""
        now = time.monotonic()
        self._failures = [*self._failures[1 - FAILURES_MAX:], now]
        if gives_up(self._failures, now):
            logger.error("that was the third time in 10 minutes: the launcher ends")
            return False
        return True

    def _end(self, grace_s: float) -> bool:
        """End the engine and all processes that it has started, in its process group or not: SIGTERM, ``grace_s``
        seconds, SIGKILL. Whether none is left, ``KILL_S`` seconds later at most.
        """
        child, self._child = self._child, None
        if child is not None:
            self._group = child.pid
            if grace_s > 0:
                child.terminate()
                self._wait(child, grace_s)
        end = time.monotonic() + KILL_S
        while self._group and time.monotonic() < end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
            if (child is None or child.poll() is not None) and not _others_left(self._group) and not _children_left():
                self._group = 0
                break
            if time.monotonic() - self._said_at >= SAY_S:
                self._say()
            time.sleep(0.02)
        if self._group:
            logger.error("processes of the engine do not end within %g s of SIGKILL", KILL_S)
        return not self._group

    def _wait(self, child: subprocess.Popen[bytes], grace_s: float) -> None:
        """Wait until the child has ended, ``grace_s`` seconds at most, and write the state every second meanwhile, by
        which the agent sees that this process lives.
        """
        end = time.monotonic() + grace_s
        while child.poll() is None and time.monotonic() < end:
            if time.monotonic() - self._said_at >= SAY_S:
                self._say()
            time.sleep(0.05)

    def _say(self, **changed: object) -> bool:
        """Write the state to ``member.json``, with these fields ``changed``. Whether it could be written."""
        self._state = msgspec.structs.replace(self._state, beat=self._state.beat + 1, **changed)
        self._said_at = time.monotonic()
        try:
            run_folder.write(self._run_dir / STATE, self._state)
        except OSError as error:  # its agent sees a launcher that is gone
            logger.warning("cannot write %s: %s", self._run_dir / STATE, error)
            return False
        return True


def _ends_with(launcher: int) -> None:
    """Called in the child before it executes the engine: have the kernel send it SIGTERM when its parent, the process
    ``launcher``, ends, so that it does not outlive a launcher that is killed alone. Exits where the parent is gone already.
    """
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _others_left(process_group: int) -> bool:
    """Whether there are processes in a process group, once children of this process in it that have ended are reaped."""
    while True:
        try:
            pid, _ = os.waitpid(-process_group, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            return True
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def _children_left() -> bool:
    """Whether children of this process were still alive: what the engine has left behind in process groups of their own.
    Sends SIGKILL to each and reaps those that have ended, whose own children then become this process's (subreaper).
    """
    left = False
    for pid in remains.pids():
        stat = remains.stat_of(pid)
        if stat is None or stat.parent != os.getpid():
            continue
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
            left |= os.waitpid(pid, os.WNOHANG) == (0, 0)
    return left


def main(argv: Sequence[str] | None = None) -> int:
    """The program: run a launcher with these arguments (None: those of the process) until it ends; returns its exit code.

    Raises:
        SystemExit: an argument is wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m xpyd_sidecar.member", description="Runs the engine of a member.")
    parser.add_argument("--run-dir", type=Path, default=os.environ.get(ENV_RUN_DIR), help=f"default: ${ENV_RUN_DIR}")
    parser.add_argument("--grace-s", type=float, default=600.0, help="for the engine to end after SIGTERM")
    parser.add_argument("command", nargs="+", help="of the engine")
    given = parser.parse_args(argv)
    if given.run_dir is None:
        parser.error(f"--run-dir, or {ENV_RUN_DIR} in the environment")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    launcher = Launcher(Path(given.run_dir), given.command, given.grace_s)
    signal.signal(signal.SIGTERM, lambda *_: launcher.stop())
    signal.signal(signal.SIGINT, lambda *_: launcher.stop())
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main())
