"""What both kinds of cluster share: components by name, users, kubectl, the life of the cluster.

As a context manager a cluster ends with the block, or with this interpreter, however that ends. ``up`` alone leaves it
running until ``down``.
"""

from __future__ import annotations

import abc
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from testcluster import addons, guard, remains
from testcluster.control_plane import Place
from testcluster.errors import ClusterError, InUse
from testcluster.kubectl import Kubectl
from testcluster.runner import Component, Runner, tail
from testcluster.state import Folder, Options, Profile, Record

TOKEN_HOURS = 24
NODES_S = 180.0


class Cluster(abc.ABC):
    """What both profiles share: components by name, kubectl, users."""

    profile: Profile

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = Folder(folder)
        self.options = options
        self._guard: subprocess.Popen[bytes] | None = None
        self._runner: Runner | None = None
        self._here: Place | None = None
        self._components: dict[str, Callable[[], Component]] = {}

    @abc.abstractmethod
    def up(self) -> list[str]:
        """Start what does not run yet and wait until all is ready. Returns the names of what was started.

        Raises:
            ClusterError: the folder holds another kind of cluster, or something cannot be built, installed or started.
        """

    def down(self) -> None:
        """End everything and remove the cluster from the host; its logs stay in the folder."""
        remains.remove(self.folder)
        if self._runner is not None:
            self._runner.collect()
            self._runner = None
        self._end_guard()

    def leftovers(self) -> list[str]:
        """Everything of this cluster that is still on the host, in words; empty after ``down``."""
        return remains.leftovers(self.folder)

    @property
    def kubeconfig(self) -> Path:
        """Of the user ``admin``, who may do everything."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON object for each request that the API server answered."""
        return self.folder / "logs/audit.log"

    @property
    def kubectl(self) -> Kubectl:
        """kubectl as ``admin``."""
        return Kubectl(self._place.binaries / "kubectl", self.kubeconfig)

    def kubectl_as(self, kubeconfig: Path) -> Kubectl:
        """kubectl as another user."""
        return Kubectl(self._place.binaries / "kubectl", kubeconfig)

    def kubeconfig_for(self, service_account: str, namespace: str = "default") -> Path:
        """Log in as a service account, which must exist, with a token of a day."""
        token = self.kubectl("create", "token", service_account, "-n", namespace, f"--duration={TOKEN_HOURS}h").strip()
        path = self.folder / "kubeconfigs" / f"{namespace}.{service_account}.kubeconfig"
        return self._place.pki.token_kubeconfig(path, self._place.server, service_account, token, namespace)

    def add_nodes(self, count: int, allocatable: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None,
                  prefix: str = "fake", tainted: bool = False) -> list[str]:
        """Fake nodes ``<prefix>-0`` and on, returned once they are ready.

        Raises:
            ClusterError: this cluster has no kwok, or the nodes are not ready in time.
        """
        if not self.options.kwok:
            raise ClusterError("fake nodes need a cluster with kwok=True")
        names = [f"{prefix}-{index}" for index in range(count)]
        nodes = [addons.fake_node(name, allocatable or {}, labels, tainted) for name in names]
        self.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(nodes))
        self.kubectl("wait", "--for=condition=Ready", f"--timeout={NODES_S:.0f}s", *(f"node/{name}" for name in names),
                     timeout_s=NODES_S + 10)
        return names

    def components(self) -> tuple[str, ...]:
        """Names of the processes, in the order in which they start."""
        return tuple(self._components)

    def start(self, component: str) -> None:
        """Start one component and wait until it is ready."""
        self._run.start(self._known(component)())

    def stop(self, component: str) -> None:
        """SIGTERM; returns when the process is gone."""
        self._known(component)
        self._run.end(component)

    def kill(self, component: str) -> None:
        """SIGKILL; returns when the process is gone."""
        self._known(component)
        self._run.end(component, signal.SIGKILL)

    def pause(self, component: str) -> None:
        """SIGSTOP: its connections stay open and nothing answers."""
        self._known(component)
        self._run.signal(component, signal.SIGSTOP)

    def resume(self, component: str) -> None:
        """SIGCONT."""
        self._known(component)
        self._run.signal(component, signal.SIGCONT)

    def pid(self, component: str) -> int:
        """Process id of a component that lives."""
        self._known(component)
        if not self._run.alive(component):
            raise ClusterError(f"{component} does not run in {self.folder.path}")
        return self._run.record.processes[component].pid

    def logs(self, component: str, lines: int = 1000) -> str:
        """The end of a component's output."""
        self._known(component)
        return tail(self.folder.log(component), lines)

    def __enter__(self) -> Self:
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self._guard = guard.start(self.folder)
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    def _load(self) -> Record:
        """The record of this folder, which must be of this profile."""
        record = self.folder.load() or Record(self.profile, self.options)
        if record.profile != self.profile:
            raise InUse(f"{self.folder.path} holds a {record.profile} cluster; take it down first or name another folder")
        if self.options.ipv6 and not record.options.ipv6:
            raise InUse(f"{self.folder.path} holds a cluster with IPv4; take it down first or name another folder")
        merged = Options(scheduler=self.options.scheduler or record.options.scheduler,
                         kwok=self.options.kwok or record.options.kwok, ipv6=record.options.ipv6)
        self.options = record.options = merged
        return record

    def _launch(self, names: tuple[str, ...]) -> list[str]:
        """Start these in turn where they do not run; those that run must be ready too."""
        started = []
        for name in names:
            if not self._run.alive(name):
                started.append(name)
            self._run.start(self._components[name]())
        return started

    def _known(self, component: str) -> Callable[[], Component]:
        if component not in self._components:
            raise ClusterError(f"there is no {component} in this cluster; there are {', '.join(self._components)}")
        return self._components[component]

    def _end_guard(self) -> None:
        process, self._guard = self._guard, None
        if process is not None:
            guard.dismiss(process)

    @property
    def _run(self) -> Runner:
        if self._runner is None:
            raise ClusterError(f"the cluster in {self.folder.path} is not up")
        return self._runner

    @property
    def _place(self) -> Place:
        if self._here is None:
            raise ClusterError(f"the cluster in {self.folder.path} is not up")
        return self._here
