"""Shared memory that engines leave behind when they are killed.

Its names are random, so it is known by who has it open: what the processes of a unit map or hold under /dev/shm is written
down while they live, and removed when they are gone and nobody else uses it.

A named semaphore is made under a name of its own, linked to its real one, and then has its first name taken away
(sem_open(3) of glibc): who has made it maps a file that has been removed, and is known by the file's number.
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
    """Files under /dev/shm that these processes map or hold open."""
    names = _semaphores()
    return {name for process in processes for name in _used(process.pid, names)}


def remember(path: Path, names: set[str]) -> None:
    """Add to the list of a unit, which is whole also where this process is killed meanwhile."""
    known = remembered_names(path)
    if names - known:
        run_folder.put(path, "".join(f"{name}\n" for name in sorted(known | names)).encode())


def remembered_names(path: Path) -> set[str]:
    """Names of the segments on the list of a unit; empty where there is no list."""
    try:
        return set(path.read_text("utf-8").splitlines())
    except OSError:
        return set()


def clean(path: Path) -> list[str]:
    """Remove what is on the list of a unit whose processes are gone, and the list; what was removed."""
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
    """The names of semaphores, by the numbers of their files."""
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
