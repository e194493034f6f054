"""Real processes for tests: each in a group of its own, with a log file, and never left behind.

A guard process, one per interpreter and started with the first group, holds the read end of a pipe: when this
interpreter ends in whatever way (kill -9 too), the pipe closes and the guard kills every group that is still named to it.
A local service runs on by itself: the guard removes its home, and a supervisor whose folder is gone ends all of it.
A killed process leaves files of random names, which go with its group: sockets and temporary files, since TMPDIR is a
folder of the group's own; semaphores, since Python's resource trackers, which know their names, are ended last; and shared
memory that no tracker knows, by who maps it.

    Group(["vllm", …], log=Path("e0.log"))   start
    .wait_until(condition, deadline_s, what)  fails with the tail of the log, at once if the process has ended
    .stop()  .kill()                          SIGTERM then SIGKILL; SIGKILL of the whole group
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from fork_server import Forked, ForkServer

TAIL_LINES = 60
GONE_S = 120.0
TRACKERS_S = 5.0
TRACKER = b"multiprocessing.resource_tracker"

SHM = "/dev/shm/"
PORTS = range(30000, 32768)
CLAIMS = 128
"""Ports that this process holds on to: the newest."""
_claims: deque[socket.socket] = deque()
_guard: subprocess.Popen[str] | None = None


class ProcessFailed(AssertionError):
    """A process ended, or did not do in time what a test needs. Carries the tail of its log."""


def _claimed(port: int) -> socket.socket | None:
    """A hold on a port, which no other test process of this machine has while it is open; None: somebody has one."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0xpyd-tests-port-{port}")  # the kernel takes it back however this process ends
    except OSError:
        claim.close()
        return None
    return claim


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))  # some listen on every address
        except OSError:
            return False
    return True


def free_port() -> int:
    """A TCP port that nobody listens on now, on whatever address, and that no test process is given for a while."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many such TCP ports in a row. Raises OSError where there are none.

    An engine listens a minute after its port was chosen. So they are chosen below those that Linux gives to whoever asks
    for any, and where neither a service (20000 to 29999) nor a cluster of tests (10000 to 19999) chooses its own.
    """
    start = Random().randrange(len(PORTS))
    for first in (*PORTS[start:], *PORTS[:start]):
        row: list[socket.socket] = []
        for port in range(first, first + count):
            claim = _claimed(port) if port in PORTS else None
            if claim is not None:
                row.append(claim)
            if claim is None or not _free(port):
                break
        else:
            _claims.extend(row)
            while len(_claims) > CLAIMS:
                _claims.popleft().close()
            return first
        for claim in row:
            claim.close()
    raise OSError(f"no {count} free ports in a row")


def pids_of(group: int) -> list[int]:
    """Living processes of the session that a group leads: also those in groups of their own, as Ray's workers are."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == group and fields[0] != "Z":
                    found.append(int(entry.name))
    return sorted(found)


def processor_s(pids: Iterable[int]) -> float:
    """Processor seconds of these processes so far; those that have ended count nothing."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def kept_waiting_s(pids: Iterable[int]) -> float:
    """Seconds so far in which a main thread was ready to run, and did not: of that one of these which waited longest."""
    most = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            most = max(most, int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9)
    return most


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Files under /dev/shm that these processes map."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line[line.find("/"):]
                if path.startswith(SHM) and not path.endswith(" (deleted)"):
                    found.add(path)
    return found


def is_tracker(pid: int) -> bool:
    """Whether a process removes what others of Python's multiprocessing leave: it ends by itself once they have."""
    with contextlib.suppress(OSError):
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _kill(group: int, *, spare: Callable[[int], bool], within_s: float) -> None:
    """kill -9 of those that are not spared, until none of them is left, new ones included."""
    end = time.monotonic() + within_s
    while (left := [pid for pid in pids_of(group) if not spare(pid)]) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def end_group(group: int, shm: Set[str] = frozenset()) -> None:
    """kill -9 of a group; returns once its processes are gone, and with them the shared memory that was theirs alone."""
    shm = set(shm) | shared_memory(pids_of(group))
    _kill(group, spare=is_tracker, within_s=GONE_S)
    for tracker in pids_of(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(tracker, signal.SIGCONT)  # a test may have stopped all of the group
    end = time.monotonic() + TRACKERS_S
    while pids_of(group) and time.monotonic() < end:
        time.sleep(0.01)
    _kill(group, spare=lambda pid: False, within_s=GONE_S)
    if shm:
        everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        for path in shm - shared_memory(everyone):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def guard(lines: Iterable[str]) -> None:
    """Keep what ``lines`` tell: groups and homes that begin ("+123 /tmp/its-folder", "+ /the/home") and end ("-123").

    At the end of the lines kill the groups that are left, and remove folders and homes.
    """
    alive: dict[str, tuple[str, str]] = {}
    for line in lines:
        number, _, folder = line[1:].strip("\n").partition(" ")
        if line[0] == "+":
            alive[number or folder] = number, folder
        else:
            alive.pop(number or folder, None)
    for number, folder in alive.values():
        if number:
            end_group(int(number))
        shutil.rmtree(folder, ignore_errors=True)


def home_begins(home: Path) -> None:
    """A local service may run whose state is in this folder."""
    _tell_guard(f"+ {home}")


def home_ends(home: Path) -> None:
    """It runs no more."""
    _tell_guard(f"- {home}")


def _tell_guard(line: str) -> None:
    global _guard  # noqa: PLW0603 (one guard per interpreter)
    if _guard is None:
        _guard = subprocess.Popen([sys.executable, "-S", __file__], stdin=subprocess.PIPE, text=True,
                                  start_new_session=True)
    assert _guard.stdin is not None
    _guard.stdin.write(line + "\n")
    _guard.stdin.flush()


class Group:
    """A process and its children, which stay in its process group."""

    def __init__(self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, name: str = "",
                 forks: ForkServer | None = None) -> None:
        """``forks``: who forks it rather than starting it anew."""
        self.name = name or Path(command[0]).name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = open(log, "ab")  # noqa: SIM115 (closed by kill)
        self._tmp = tempfile.mkdtemp(prefix="g-")  # not under the log's folder: paths of sockets must be short
        environment = {**(os.environ if env is None else env), "TMPDIR": self._tmp}
        self._process: subprocess.Popen[bytes] | Forked = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.STDOUT,
            start_new_session=True) if forks is None else forks.start(command, environment, log)
        self.pid = self._process.pid
        self._gone = False
        self._shm: set[str] = set()
        _tell_guard(f"+{self.pid} {self._tmp}")

    def returncode(self) -> int | None:
        """None while the first process of the group lives."""
        return self._process.poll()

    def wait(self, deadline_s: float) -> int:
        """The exit code of the first process, once it has ended. Raises ``subprocess.TimeoutExpired``."""
        return self._process.wait(deadline_s)

    def pids(self) -> list[int]:
        """Every living process of the group."""
        return pids_of(self.pid)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of the log."""
        with contextlib.suppress(OSError):
            text = self.log.read_text("utf-8", errors="replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""

    def wait_until(self, condition: Callable[[], bool], deadline_s: float, what: str, poll_s: float = 0.2) -> None:
        """Wait until ``condition()``; raise ProcessFailed when the process ends first or the deadline passes."""
        end = time.monotonic() + deadline_s
        while not condition():
            code = self.returncode()
            if code is not None:
                raise ProcessFailed(f"{self.name} ended with {code} before it was {what}; {self.log}:\n{self.tail()}")
            if time.monotonic() > end:
                raise ProcessFailed(f"{self.name} was not {what} within {deadline_s:.0f} s; {self.log}:\n{self.tail()}")
            time.sleep(poll_s)

    def signal(self, number: signal.Signals) -> None:
        """Signal the first process alone, as an orderly stop does."""
        if self.returncode() is None:
            self._process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Signal every process of the group; what shared memory they have now goes with the group in the end."""
        self._shm |= shared_memory(self.pids())
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_process(self, pid: int) -> None:
        """kill -9 of one process alone. What shared memory the group has now goes with it in the end."""
        self._shm |= shared_memory(self.pids())
        os.kill(pid, signal.SIGKILL)

    def stop(self, grace_s: float = 20.0) -> int | None:
        """SIGTERM, wait, then kill what is left. Returns the exit code, None when it had to be killed."""
        self._shm |= shared_memory(self.pids())
        self.signal(signal.SIGTERM)
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(grace_s)
        self.kill()
        return code

    def kill(self) -> None:
        """kill -9 of the group; returns when all its processes are gone. Calling it again does nothing."""
        if self._gone:  # the number may be another's by now
            return
        end_group(self.pid, self._shm)
        self._process.wait(GONE_S)
        self._gone = True
        self._file.close()
        shutil.rmtree(self._tmp)
        _tell_guard(f"-{self.pid}")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.stdin)
