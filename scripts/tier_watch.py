"""Runs one tier's command and says what it cost: ``python scripts/tier_watch.py FIGURES.json LOG COMMAND…``

    wall_s, processor_s   of the command and of all that came of it. Orphans come to this process (it asks to be their
                          reaper, prctl(2)), so engines that a test kills -9, and their workers, count too
    engines               vLLM servers among them: seconds and processor seconds, workers included, until they listened
    left                  commands that still ran 10 s after the tier's own had ended; they are killed

The exit code is the command's; 128 + n where signal n ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.5
LEFT_S = 10.0
LISTEN = "0A"
TICK = os.sysconf("SC_CLK_TCK")
SERVER = b"vllm.entrypoints.launchers.api_server.entry"


class Process(NamedTuple):
    """What /proc says of one."""

    parent: int
    began: int
    """Ticks since the machine's start."""
    processor: int
    """Ticks, those of its ended children included."""


def look() -> dict[int, Process]:
    """Every process of this machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fields = Path("/proc", name, "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                found[int(name)] = Process(int(fields[1]), int(fields[19]), sum(map(int, fields[11:15])))
    return found


def below(root: int, all_of_them: dict[int, Process]) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, one in all_of_them.items():
        children.setdefault(one.parent, []).append(pid)
    found, todo = set(), [root]
    while todo:
        found.add(pid := todo.pop())
        todo += children.get(pid, [])
    return found


def is_server(pid: int) -> bool:
    """Whether a process is the first one of a vLLM server, or has that command as its title."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()[:4]
        return SERVER in words or (b"serve" in words[1:] and any(word.rpartition(b"/")[2] == b"vllm" for word in words))
    return False


def listens(pid: int) -> bool:
    """Whether a process has a socket that listens, in whatever network namespace it is."""
    with contextlib.suppress(OSError):
        inodes = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                    return True
    return False


class Engines(threading.Thread):
    """Looks for servers below this process, and for when they begin to listen."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.seen: dict[tuple[int, int], dict[str, float | bool]] = {}

    def run(self) -> None:
        """Until it is over."""
        while not self.over.wait(LOOK_S):
            self.once(look(), float(Path("/proc/uptime").read_text("ascii").split()[0]))

    def once(self, everyone: dict[int, Process], now_s: float) -> None:
        """One look."""
        for pid in below(os.getpid(), everyone):
            key = pid, everyone[pid].began
            known = self.seen.get(key)
            if known is None and is_server(pid) and not is_server(everyone[pid].parent):
                known = self.seen[key] = {"ready": False, "wall_s": 0.0, "processor_s": 0.0}
            if known is not None and not known["ready"]:
                ticks = sum(everyone[one].processor for one in below(pid, everyone))
                known |= {"ready": listens(pid), "wall_s": round(now_s - everyone[pid].began / TICK, 2),
                          "processor_s": round(ticks / TICK, 2)}


def reap_others(deadline: float) -> list[str]:
    """Wait for what is left; after the deadline kill it. Its commands, where it had to be killed."""
    killed: list[str] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return killed
        if pid == 0:
            if time.monotonic() > deadline:
                for one in below(os.getpid(), look()) - {os.getpid()}:
                    with contextlib.suppress(OSError):
                        command = Path(f"/proc/{one}/cmdline").read_bytes()
                        os.kill(one, signal.SIGKILL)
                        killed.append(command.replace(b"\0", b" ").decode(errors="replace"))
            time.sleep(0.05)


def main(figures: str, log: str, command: list[str]) -> int:
    """Run it."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the command gets it too; what it cost is still said
    engines, began = Engines(), time.monotonic()
    with open(log, "ab") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    engines.start()
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            break
    wall_s = time.monotonic() - began
    engines.over.set()
    engines.join()
    left = reap_others(time.monotonic() + LEFT_S)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(figures).write_text(json.dumps({
        "wall_s": round(wall_s, 1), "processor_s": round(used.ru_utime + used.ru_stime, 1),
        "engines": list(engines.seen.values()), "left": left}), "utf-8")
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
