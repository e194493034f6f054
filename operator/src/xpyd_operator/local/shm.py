"""Removes the shared memory that engines leave behind when they are killed.

Names of shared memory are random, so it is found by who uses it: the files under /dev/shm that the processes of an engine
map or hold open are listed in a file while they live, and removed when they are gone and no other process uses them.

glibc's sem_open(3) makes a named semaphore under a temporary name, links it to the real one and removes the first. So the
process that made it maps a file that shows as deleted, and its real name is found by the file's inode number.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from xpyd_operator.local import procs
from xpyd_operator.local.procs import Stat
from xpyd_sidecar.contract import run_folder

SHM = "/dev/shm/"  # noqa: S108 (looked at, not created)
_DELETED = " (deleted)"
_SEMAPHORE = "sem."


def used_by(processes: Iterable[Stat]) -> set[str]:
    """Paths of the files in /dev/shm that these processes map or hold open."""
    names = _semaphores()
    return {name for process in processes for name in _used(process.pid, names)}


def remember(path: Path, names: set[str]) -> None:
    """Add paths of shared memory to the list in the file ``path``, which is replaced as a whole and so never half written.

    Raises:
        OSError: it cannot be written.
    """
    known = remembered_names(path)
    if names - known:
        run_folder.put(path, "".join(f"{name}\n" for name in sorted(known | names)).encode())


def remembered_names(path: Path) -> set[str]:
    """The paths of shared memory on the list in the file ``path``; empty where it cannot be read."""
    try:
        return set(path.read_text("utf-8").splitlines())
    except OSError:
        return set()


def clean(path: Path) -> list[str]:
    """Remove the shared memory on the list in the file ``path`` that no process uses, and then the list. To be called when
    the engine's processes are gone. Returns the paths of what was removed.
    """
    names = remembered_names(path)
    if names:
        names -= used_by(procs.all_processes())
    removed = []
    for name in sorted(names):
        with contextlib.suppress(OSError):
            os.unlink(name)
            removed.append(name)
    path.unlink(missing_ok=True)
    return removed


def _semaphores() -> dict[int, str]:
    """The names of all semaphores in /dev/shm, by inode number."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            if entry.name.startswith(_SEMAPHORE):
                with contextlib.suppress(OSError):
                    found[entry.inode()] = entry.name
    return found


def _used(pid: int, semaphores: dict[int, str]) -> set[str]:
    found: set[str] = set()
    folder = procs.PROC / str(pid)
    with contextlib.suppress(OSError), open(folder / "maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if SHM in line:
                before, _, name = line.rstrip("\n").partition(SHM)
                if name.startswith(_SEMAPHORE) and name.endswith(_DELETED):
                    name = semaphores.get(int(before.split()[4]), "")  # addresses, rights, offset, device, file's number
                found.add(name)
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder / "fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith(SHM):
                    found.add(target[len(SHM) :])
    return {SHM + name for name in found if name and not name.endswith(_DELETED) and "/" not in name}
