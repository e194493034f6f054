"""Removes a cluster when the program that owns it has ended without doing so, kill -9 included.

The guard is a process of its own that reads from a pipe whose other end the owner holds: first the folder, then nothing
until the owner dismisses it. If the pipe ends without that word, the owner is gone, and the guard takes the cluster down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from testcluster import remains
from testcluster.state import Folder

DISMISSED = b"dismissed\n"
WAIT_S = 30.0


def start(folder: Folder) -> subprocess.Popen[bytes]:
    """Guard a cluster until ``dismiss`` or the end of this interpreter."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-m", "testcluster.guard"], env=environment, stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(os.fsencode(folder.path) + b"\n")
    process.stdin.flush()
    return process


def dismiss(process: subprocess.Popen[bytes]) -> None:
    """The owner has taken the cluster down itself."""
    process.communicate(DISMISSED, timeout=WAIT_S)


def main() -> None:
    """Read the folder, wait for the end of the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    path = sys.stdin.buffer.readline().rstrip(b"\n")
    if sys.stdin.buffer.readline() != DISMISSED and path:
        remains.remove(Folder(Path(os.fsdecode(path))))


if __name__ == "__main__":
    main()
