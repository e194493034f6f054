"""What a launcher that was killed alone has left behind: its engine's processes, found by whoever takes its place.

Two marks, since each can be lost: the engine's process group, of which the number may be another's by now, and the life and
the run folder in the environment, which vLLM's processes overwrite with a title. With the life alone, those of the other
members on this host would be taken for this one's.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

from xpyd_sidecar.contract.group import ENV_LIFE, MemberState
from xpyd_sidecar.contract.launch import ENV_RUN_DIR

PROC = Path("/proc")


class ProcessStat(NamedTuple):
    """The fields of /proc/<pid>/stat that count here."""

    state: str
    parent: int
    group: int
    session: int
    start: int
    """In ticks since the boot."""


def session_and_start(pid: int) -> tuple[int, int]:
    """Session and start of an engine's first process, as ``MemberState`` has them; zeros where it has ended already."""
    found = stat_of(pid)
    return (found.session, found.start) if found is not None else (0, 0)


def marks(life: str, run_dir: Path) -> dict[str, str]:
    """What an engine has in its environment."""
    return {ENV_LIFE: life, ENV_RUN_DIR: str(run_dir)}


def find(before: MemberState, run_dir: Path) -> list[int]:
    """Processes of the engine that ran when this was written, in this folder; those that have ended and were not waited for
    are none.
    """
    found = {pid: stat for pid in pids() if pid != os.getpid() and (stat := stat_of(pid)) is not None and stat.state != "Z"}
    first = found.get(before.group)
    reused = first is not None and first.start != before.start
    ours = {os.fsencode(f"{name}={value}") for name, value in marks(before.life, run_dir).items()}
    return [pid for pid, stat in found.items()
            if (stat.group == before.group > 0 and stat.session == before.session and stat.start >= before.start
                and not reused) or ours.issubset(_environment(pid))]


def kill(left: list[int]) -> None:
    """SIGKILL for each that is still there and ours."""
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def pids() -> list[int]:
    """The ids of all processes of the host."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]


def stat_of(pid: int) -> ProcessStat | None:
    """None where there is no such process. The name in parentheses may hold anything, so fields count from its end."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def _environment(pid: int) -> list[bytes]:
    """As it was when the program began; empty where it may not be read."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
