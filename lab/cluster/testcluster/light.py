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

from pathlib import Path
from random import Random

from testcluster import addons, build, control_plane
from testcluster.addons import KWOK
from testcluster.base import Cluster
from testcluster.control_plane import API, CONTROLLERS, ETCD, SCHEDULER, Place
from testcluster.kubectl import wait_until
from testcluster.runner import Runner
from testcluster.state import Options, choose_ports

LOOPBACK = "127.0.0.1"
CONTROLLERS_S = 180.0


class LightCluster(Cluster):
    """A cluster without nodes, in ``folder``."""

    profile = "light"

    def __init__(self, folder: Path, *, scheduler: bool = False, kwok: bool = False) -> None:
        super().__init__(folder, Options(scheduler=scheduler or kwok, kwok=kwok))

    def up(self) -> list[str]:
        """See Cluster."""
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
            self._here = place = Place(self.folder, programs["kube"], record.ports, address=LOOPBACK,
                                      listen=LOOPBACK, host=LOOPBACK)
            control_plane.prepare(place)
            self._components = {
                ETCD: lambda: control_plane.etcd(place),
                API: lambda: control_plane.api_server(place, "--endpoint-reconciler-type=none"),
                CONTROLLERS: lambda: control_plane.controllers(place),
            }
            if self.options.scheduler:
                self._components[SCHEDULER] = lambda: control_plane.scheduler(place)
            if self.options.kwok:
                control_plane.login(place, KWOK, KWOK, ("system:masters",))
                self._components[KWOK] = lambda: addons.kwok(place, programs["kwok"] / "kwok")
            started = self._launch(tuple(self._components))
        wait_until(lambda: bool(self.kubectl("get", "serviceaccount", "default", "-n", "default", "-o", "name")),
                   CONTROLLERS_S, "the controllers made the service account default")
        return started
