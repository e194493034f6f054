"""The light cluster: a real API server with its store and controllers on loopback, without nodes.

    with LightCluster(folder) as cluster:
        cluster.kubectl("apply", "-f", "crds/")
        operator = start_operator(cluster.kubeconfig_for("operator", namespace="xpyd"))
        cluster.stop("kube-apiserver")
        cluster.start("kube-apiserver")

With ``scheduler=True`` pods are bound to nodes; with ``kwok=True`` they run, on fake nodes that ``add_nodes`` makes.
Any number of light clusters runs side by side; they need no special rights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import yaml

from testcluster import addons, build, control_plane, packages
from testcluster.addons import KWOK
from testcluster.base import Cluster
from testcluster.control_plane import API, CONTROLLERS, ETCD, SCHEDULER, Place
from testcluster.errors import ClusterError
from testcluster.kubectl import wait_until
from testcluster.runner import Runner
from testcluster.state import Options, choose_ports

LOOPBACK = "127.0.0.1"
CONTROLLERS_S = 60.0
NODES_S = 60.0


class LightCluster(Cluster):
    """A cluster without nodes, in ``folder``."""

    profile = "light"

    def __init__(self, folder: Path, *, scheduler: bool = False, kwok: bool = False) -> None:
        super().__init__(folder, Options(scheduler=scheduler or kwok, kwok=kwok))
        self._here: Place | None = None

    def up(self) -> list[str]:
        """See Cluster."""
        packages.ensure("light")
        self._load()
        programs = build.ensure(build.PROFILES["kwok" if self.options.kwok else "light"])
        with self.folder.changing():
            record = self._load()
            for port in (*control_plane.PORTS, KWOK):
                if port not in record.ports:
                    record.ports |= choose_ports((port,), LOOPBACK, Random())
            self.folder.save(record)
            self._runner = Runner(self.folder, record)
            # Nobody reaches a pod's or Service's address here, so the API server need not publish its own.
            self._here = place = Place(self.folder, programs["kube"], record.ports, address=LOOPBACK, listen=LOOPBACK)
            control_plane.prepare(place)
            self._components = {
                ETCD: lambda: control_plane.etcd(place),
                API: lambda: control_plane.api_server(place, "--endpoint-reconciler-type=none"),
                CONTROLLERS: lambda: control_plane.controllers(place, LOOPBACK),
            }
            if self.options.scheduler:
                self._components[SCHEDULER] = lambda: control_plane.scheduler(place, LOOPBACK)
            if self.options.kwok:
                control_plane.login(place, KWOK, KWOK, ("system:masters",))
                self._components[KWOK] = lambda: addons.kwok(place, programs["kwok"] / "kwok")
            started = self._launch(tuple(self._components))
        wait_until(lambda: bool(self.kubectl("get", "serviceaccount", "default", "-n", "default", "-o", "name")),
                   CONTROLLERS_S, "the controllers made the service account default")
        return started

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

    @property
    def _place(self) -> Place:
        if self._here is None:
            raise ClusterError(f"the cluster in {self.folder.path} is not up")
        return self._here
