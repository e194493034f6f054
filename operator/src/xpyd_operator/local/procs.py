"""Processes as /proc shows them: who is who although process ids are used again.

A process is identified by its id, its start time in clock ticks since boot, and the boot. A signal goes through a pidfd
whose process was compared with that first, so that it never hits a stranger.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from xpyd_sidecar.contract import liveness

PROC = Path("/proc")
MARKER = "XPYD_UNIT"
"""Environment variable that every process of a unit inherits."""
EXEC_DEADLINE = 1.0
"""Seconds that one process may stay within exec() before it counts as one without an environment."""
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of a process's flags (include/linux/sched.h)."""


class Identity(msgspec.Struct, frozen=True):
    """One process, for ever."""

    pid: int
    start: int
    """Clock ticks from boot to its start."""
    boot: str
    """``/proc/sys/kernel/random/boot_id``."""
    unix: float = 0.0
    """Start in unix seconds, for people and for run times."""


class Stat(msgspec.Struct, frozen=True):
    """What ``/proc/<pid>/stat`` says."""

    pid: int
    state: str
    parent: int
    session: int
    start: int
    flags: int
    environment_end: int
    """Address just behind its environment; 0 within exec(), for kernel threads, and for processes not ours to read."""

    @property
    def dead(self) -> bool:
        """It is a zombie or gone for good: nothing runs any more."""
        return self.state in ("Z", "X", "x")

    @property
    def executes(self) -> bool:
        """It is within exec(): the old program is gone, the new one is not yet laid out."""
        return not self.environment_end and not self.flags & KERNEL_THREAD and not self.dead


def boot_id() -> str:
    """Identity of this boot."""
    return (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()


def read_stat(pid: int) -> Stat | None:
    """None where there is no such process. The name in parentheses may hold anything, so fields count from its end."""
    try:
        text = (PROC / str(pid) / "stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        flags=int(fields[6]),
        environment_end=int(fields[48]),
    )


def identify(pid: int) -> Identity | None:
    """The identity of a process that lives now."""
    stat = read_stat(pid)
    if stat is None or stat.dead:
        return None
    return Identity(pid, stat.start, boot_id(), time.time())


def alive(identity: Identity) -> bool:
    """Whether exactly this process lives."""
    stat = read_stat(identity.pid)
    return stat is not None and not stat.dead and stat.start == identity.start and identity.boot == boot_id()


def all_processes() -> Iterator[Stat]:
    """Every living process."""
    for entry in os.listdir(PROC):
        if entry.isdecimal():
            stat = read_stat(int(entry))
            if stat is not None and not stat.dead:
                yield stat


def send(pid: int, start: int, number: int) -> bool:
    """Signal the process that has this id and start time; False where it is gone (or is somebody else's)."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        stat = read_stat(pid)
        if stat is None or stat.dead or stat.start != start:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def catches(pid: int, number: int) -> bool:
    """Whether a process catches a signal; False where it is gone."""
    try:
        return liveness.catches((PROC / str(pid) / "status").read_text("utf-8", errors="replace"), number)
    except OSError:
        return False


def environment_marker(pid: int) -> str:
    """The process's XPYD_UNIT as it was when it started; empty where there is none, or it is not ours to read."""
    prefix = MARKER.encode() + b"="
    with contextlib.suppress(OSError):
        for item in _environment(pid).split(b"\0"):
            if item.startswith(prefix):
                return os.fsdecode(item[len(prefix) :])
    return ""


def _environment(pid: int) -> bytes:
    """Within exec() it is empty for a moment (environ_read of the kernel's fs/proc/base.c), while the parent runs again.

    So an empty one is read again until the new program is there, or EXEC_DEADLINE has passed.

    Raises:
        OSError: the process is gone, or not ours to read.
    """
    file, deadline = PROC / str(pid) / "environ", time.monotonic() + EXEC_DEADLINE
    while not (found := file.read_bytes()):
        stat = read_stat(pid)
        if stat is None or not stat.executes or time.monotonic() > deadline:
            return file.read_bytes()  # exec() may have ended between the two looks
        time.sleep(0.001)
    return found


def tracks_resources(pid: int) -> bool:
    """Whether it is Python's resource tracker.

    It outlives the processes it serves, removes the semaphores and shared memory that they left, and ends by itself.
    """
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in (PROC / str(pid) / "cmdline").read_bytes()
    return False


def writes_to(pid: int, path: Path) -> bool:
    """Whether standard output or error of a process is this file."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(PROC / str(pid) / "fd" / str(number)), os.stat(path)):
                return True
    return False


def reap(pid: int) -> None:
    """Collect a zombie if it is our child; nothing otherwise."""
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)


class Scan:
    """All processes at one moment. Looking for the members of many units in one scan reads each process once."""

    def __init__(self) -> None:
        self.stats = list(all_processes())
        self._uid = os.getuid()
        self._markers: dict[int, str] = {}

    def marker(self, pid: int) -> str:
        """The marker of a process of ours; empty for those of others."""
        if pid not in self._markers:
            self._markers[pid] = environment_marker(pid) if _owner(pid) == self._uid else ""
        return self._markers[pid]


def members(leader: Identity | None, marker: str, log: Path, scan: Scan | None = None) -> list[Stat]:
    """Every living process that belongs to a unit, its leader first if that lives.

    Two marks, since each can be lost: the session that the leader opened (a process can leave it with setsid), and the
    marker in the environment (a process that changes its title can overwrite it). A session id is a process id and may be
    used again once the session is empty; so without the living leader a session counts only for processes that write to
    the unit's log.
    """
    here = leader if leader is not None and leader.boot == boot_id() else None
    there = read_stat(here.pid) if here is not None else None
    leads = here is not None and there is not None and there.start == here.start
    reused = here is not None and there is not None and there.start != here.start
    scan = scan or Scan()
    found = []
    for stat in scan.stats:
        in_session = (
            here is not None
            and not reused
            and stat.session == here.pid
            and stat.start >= here.start
            and (leads or writes_to(stat.pid, log))
        )
        if in_session or _marked(scan.marker(stat.pid), marker):
            found.append(stat)
    return sorted(found, key=lambda stat: (here is None or stat.pid != here.pid, stat.pid))


def _marked(found: str, marker: str) -> bool:
    return found == marker or found.startswith(marker + "/")


def _owner(pid: int) -> int:
    try:
        return os.stat(PROC / str(pid)).st_uid
    except OSError:
        return -1
