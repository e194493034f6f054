"""A cluster's folder, and what is recorded in it.

    <folder>/cluster.json    profile, options, ports, processes: rewritten at every change, by renaming
             lock            held while somebody changes the cluster
             admin.kubeconfig
             pki/ config/ kubeconfigs/ logs/ etcd/
             node/           of a full cluster: namespaces, containerd, and what the node sees as /var
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from testcluster.errors import ClusterError, InUse
from xpyd_operator.local import ports
from xpyd_operator.local.procs import Identity

Profile = Literal["light", "full"]
FIRST_PORT, LAST_PORT = 10000, 19999
"""Below the tests' engines and Linux' ephemeral ports, so that a port stays free while its component is stopped."""
_claims: list[socket.socket] = []
LOCK_S = 120.0


class Options(msgspec.Struct, frozen=True):
    """What a cluster has beside the least that its profile needs."""

    scheduler: bool = False
    kwok: bool = False
    ipv6: bool = False
    """No IPv4, in a full cluster; it has both otherwise."""


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """What ``cluster.json`` holds."""

    profile: Profile
    options: Options
    ports: dict[str, int] = {}
    processes: dict[str, Identity] = {}


class Folder:
    """One cluster on disk. ``path`` may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._record = self.path / "cluster.json"

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def sub(self, name: str) -> Path:
        """A folder below, made if missing."""
        path = self.path / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log(self, component: str) -> Path:
        """Where a component writes to."""
        return self.path / "logs" / f"{component}.log"

    def load(self) -> Record | None:
        """None where no cluster was made.

        Raises:
            ClusterError: the file is not one of ours.
        """
        try:
            data = self._record.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return msgspec.json.decode(data, type=Record)
        except msgspec.MsgspecError as error:
            raise ClusterError(f"{self._record}: {error}; remove the folder") from None

    def save(self, record: Record) -> None:
        """Replace what is recorded."""
        partial = self._record.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        partial.rename(self._record)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Keep everybody else from changing this cluster meanwhile.

        Raises:
            InUse: somebody else changes it for minutes.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with held(self.path / "lock", f"somebody else changes the cluster in {self.path}"):
            yield


@contextlib.contextmanager
def held(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file, made if missing, or a folder; ``refusal`` is what a caller hears who waited for too long."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise InUse(f"{refusal} ({path})") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def choose_ports(names: tuple[str, ...], host: str, random: Random) -> dict[str, int]:
    """Ports of ``host`` that nobody listens on now, and that no cluster which begins meanwhile is given."""
    chosen: dict[str, int] = {}
    while len(chosen) < len(names):
        port = random.randint(FIRST_PORT, LAST_PORT)
        if _claim(port) and ports.is_free(host, port):
            chosen[names[len(chosen)]] = port
    return chosen


def _claim(port: int) -> bool:
    """Whether nobody else has claimed it; who has it keeps it until this process ends."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0xpyd-cluster-port-{port}")  # the kernel takes it back however this process ends
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
