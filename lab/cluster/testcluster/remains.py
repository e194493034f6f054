"""Everything of one cluster that is on the host, found without trusting the record, and its removal.

    processes   the recorded ones, those with our mark in the environment (containerd's shims inherit it), daemons that name
                the folder in their arguments, and everything in the cluster's control groups (pods)
    mounts      below the folder: what keeps the node's namespaces; all other mounts are inside these
    links       the one that joins the node's network to the host; its alias names the folder
    cgroups     one tree, named after the folder, in every hierarchy

So a cluster can be removed after kill -9 of all its processes, after a start that was cut off, and by another program.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.runner import marker
from testcluster.state import Folder
from xpyd_operator.local import procs

DEADLINE_S = 60.0
POLL_S = 0.1
LINKS = Path("/sys/class/net")
DAEMONS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kwok",
           "containerd", "containerd-shim-runc-v2", "netpol")
DATA = ("etcd", "pki", "config", "kubeconfigs", "kubectl-cache", "node", "admin.kubeconfig", "cluster.json",
        "cluster.partial")
"""What ``remove`` deletes in the folder. Logs stay."""
_OCTAL = re.compile(r"\\([0-7]{3})")


def short_name(folder: Folder) -> str:
    """``xpyd-`` and eight characters: of the host's link and the control groups."""
    return "xpyd-" + hashlib.sha256(str(folder.path).encode()).hexdigest()[:8]


def leftovers(folder: Folder) -> list[str]:
    """Everything that is there, one line each."""
    return [
        *(f"process {pid}: {_title(pid)}" for pid in processes(folder)),
        *(f"mount {path}" for path in mounts(folder)),
        *(f"link {path.name}" for path in links(folder)),
        *(f"control group {path}" for path in cgroups(folder)),
    ]


def remove(folder: Folder) -> None:
    """End and remove everything; logs stay. Nothing happens where nothing is.

    Raises:
        ClusterError: something stays in spite of all; says what. The folder's data stays too then.
    """
    if not folder.path.exists() and not leftovers(folder):
        return
    with folder.changing():
        clear(folder)
        for name in DATA:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def clear(folder: Folder) -> None:
    """End and remove everything, but for the files in the folder.

    Raises:
        ClusterError: something stays in spite of all; says what.
    """
    end = time.monotonic() + DEADLINE_S
    while True:
        _kill(folder)
        problems = [*_unmount(folder), *_unlink(folder), *_remove_cgroups(folder)]
        left = leftovers(folder)
        if not left:
            return
        if time.monotonic() > end:
            raise ClusterError(f"left of the cluster in {folder.path}: {'; '.join([*left, *problems])}")
        time.sleep(POLL_S)


def processes(folder: Folder) -> list[int]:
    """Living processes of the cluster, this one never."""
    return sorted(pid for pid, _ in _found(folder))


def mounts(folder: Folder) -> list[Path]:
    """Mount points below the folder, the deepest first. The kernel writes blanks in octal."""
    below = str(folder.path) + "/"
    points = [_OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split(" ")[4]) for line in _mountinfo()]
    return [Path(point) for point in sorted((each for each in points if each.startswith(below)), key=len, reverse=True)]


def links(folder: Folder) -> list[Path]:
    """The host's end of the node's network."""
    path = LINKS / short_name(folder)
    return [path] if path.exists() else []


def cgroups(folder: Folder) -> list[Path]:
    """Roots of the cluster's control groups."""
    return [root / short_name(folder) for root in hierarchies() if (root / short_name(folder)).is_dir()]


def hierarchies() -> list[Path]:
    """Where the host mounts control groups."""
    lines = [line.split(" ") for line in _mountinfo()]
    return [Path(fields[4]) for fields in lines if _type(fields) in ("cgroup", "cgroup2")]


def _found(folder: Folder) -> Iterator[tuple[int, int]]:
    """Process id and start time."""
    record = folder.load()
    recorded = {identity.pid: identity for identity in record.processes.values()} if record is not None else {}
    mark, group, below = marker(folder), f"/{short_name(folder)}", f"{folder.path}/".encode()
    for stat in procs.all_processes():
        if stat.pid == os.getpid():
            continue
        identity = recorded.get(stat.pid)
        if (
            (identity is not None and procs.alive(identity))
            or procs.environment_marker(stat.pid) == mark
            or _in_group(stat.pid, group)
            or _is_daemon(stat.pid, below)
        ):
            yield stat.pid, stat.start


def _in_group(pid: int, group: str) -> bool:
    with contextlib.suppress(OSError):
        for line in (procs.PROC / str(pid) / "cgroup").read_text("utf-8", errors="replace").splitlines():
            path = line.split(":", 2)[2]
            if path == group or path.startswith(group + "/"):
                return True
    return False


def _is_daemon(pid: int, below: bytes) -> bool:
    """One of our programs with an argument in the folder. Others, such as a shell that says ``down``, are left alone."""
    with contextlib.suppress(OSError):
        words = (procs.PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        return os.fsdecode(words[0]).rpartition("/")[2] in DAEMONS and any(below in word for word in words[1:])
    return False


def _kill(folder: Folder) -> None:
    """Everything at once: what is half dead restarts nothing."""
    for pid, start in list(_found(folder)):
        procs.send(pid, start, signal.SIGKILL)
        procs.reap(pid)


def _unmount(folder: Folder) -> list[str]:
    return [problem for path in mounts(folder) if (problem := _run("umount", "--lazy", str(path)))]


def _unlink(folder: Folder) -> list[str]:
    return [problem for path in links(folder) if (problem := _run("ip", "link", "delete", path.name))]


def _remove_cgroups(folder: Folder) -> list[str]:
    """Children first. A group stays busy for a moment after its last process."""
    problems = []
    for root in cgroups(folder):
        for path, _, _ in os.walk(root, topdown=False):
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                problems.append(str(error))
    return problems


def _run(*command: str) -> str:
    """What went wrong; empty when nothing did."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    return f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode else ""


def _mountinfo() -> list[str]:
    return (procs.PROC / "self/mountinfo").read_text("utf-8", errors="surrogateescape").splitlines()


def _type(fields: list[str]) -> str:
    """The file system's type follows the separator, which stands after any number of optional fields."""
    return fields[fields.index("-") + 1]


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        raw = (procs.PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return raw if len(raw) <= 120 else f"{raw[:117]}..."
    return "(gone)"
