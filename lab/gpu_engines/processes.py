"""Processes that the driver starts, all of which end with it, and what /proc tells of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from lab.gpu_engines.figures import Thread

PROC: Final = Path("/proc")
MARK: Final = "CHECK_GPU_ENGINES"


class Processes:
    """Those of one run. Each carries a mark in its environment, so that what they start in turn is found again, too."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.environ = {**environ, MARK: self.mark}
        self._begun: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str | Path], log: Path,
              more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """In a session of its own, with its output in a file."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=out,
                                       stderr=subprocess.STDOUT, env={**self.environ, **(more or {})},
                                       start_new_session=True)
        self._begun.append(process)
        return process

    def call(self, command: Sequence[str | Path], limit_s: float) -> str:
        """Its standard output, whatever its exit code. Raises subprocess.TimeoutExpired."""
        return subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              env=self.environ, check=False, timeout=limit_s).stdout

    def end(self) -> int:
        """Kill all that is left of the run; how many processes there were.

        Sessions count as a whole, since vLLM's processes write their title over the environment.
        """
        found = 0
        for _ in range(3):
            sessions = {session for pid, session in _sessions() if self._marked(pid)}
            sessions |= {process.pid for process in self._begun}
            sessions -= {os.getsid(0)}
            left = [pid for pid, session in _sessions() if session in sessions and not _dead(pid)]
            if not left:
                break
            found = max(found, len(left))
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, signal.SIGKILL)
            for process in self._begun:
                process.poll()
            time.sleep(0.3)
        return found

    def _marked(self, pid: int) -> bool:
        try:
            return f"{MARK}={self.mark}".encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            return False


def _sessions() -> Iterator[tuple[int, int]]:
    """Every process, with its session."""
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):  # it has ended
                yield int(entry.name), os.getsid(int(entry.name))


def _dead(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    except OSError:
        return True


def core_of(server: int) -> int:
    """The engine core that a server has started, or itself where it has none of its own."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and b"EngineCore" in (entry / "cmdline").read_bytes():
                return int(entry.name)
    return server


def threads(pid: int) -> dict[int, Thread]:
    """Processor time of each thread."""
    out = {}
    for entry in (PROC / str(pid) / "task").iterdir():
        with contextlib.suppress(OSError, IndexError):  # it has ended
            text = (entry / "stat").read_text()
            name, fields = text[text.index("(") + 1:text.rindex(")")], text.rpartition(")")[2].split()
            out[int(entry.name)] = Thread(name, int(fields[11]), int(fields[12]), int(fields[7]))
    return out
