"""The full cluster: a control plane and one real node that runs pods, with Services, DNS and network policies.

    with FullCluster(folder) as cluster:
        cluster.import_image(archive)          pods: imagePullPolicy Never or IfNotPresent
        cluster.kubectl("apply", "-f", …)
        urlopen("http://10.96.1.2")            the host reaches pods and Services, and the policies apply to it

One per host, and only as root. Pods and Services have addresses of IPv4 and IPv6, or of IPv6 alone (``addresses``). Where
its parts are: see network. Pods reach the host at ``network.HOST_ADDRESS`` and nothing beyond it.
"""

from __future__ import annotations

from pathlib import Path

from testcluster import addons, build, control_plane, images, network, node, packages
from testcluster.addons import KWOK
from testcluster.addresses import DUAL, IPV6, Addresses
from testcluster.base import Cluster
from testcluster.control_plane import API, CONTROLLERS, ETCD, SCHEDULER, Place
from testcluster.errors import CommandFailed, ComponentFailed
from testcluster.kubectl import wait_until
from testcluster.node import CONTAINERD, KUBELET, NETPOL, PROXY
from testcluster.runner import Runner
from testcluster.state import Options, held

NODE_S = 240.0
PORTS = {ETCD: 2379, "etcd-peer": 2380, "etcd-health": 2381, API: 6443, CONTROLLERS: 10257, SCHEDULER: 10259, KWOK: 10247}
"""The usual ones: nobody else is in the node's network."""
DNS = ("deployment/kube-dns", "--namespace=kube-system")
HOST = Path("/run")
"""Locked while a full cluster starts: two at once would not see each other yet."""


class FullCluster(Cluster):
    """A cluster with a node, in ``folder``."""

    profile = "full"

    def __init__(self, folder: Path, *, kwok: bool = False, ipv6: bool = False) -> None:
        """``ipv6``: there is no IPv4 but on loopback."""
        super().__init__(folder, Options(scheduler=True, kwok=kwok, ipv6=ipv6))

    @property
    def addresses(self) -> Addresses:
        """Of the node, of pods and Services."""
        return IPV6 if self.options.ipv6 else DUAL

    def up(self) -> list[str]:
        """See Cluster."""
        self._load()
        addresses = self.addresses
        network.check(self.folder, addresses)
        packages.ensure()
        programs = build.ensure((*build.PROFILES["full"], *(("kwok",) if self.options.kwok else ())))
        with self.folder.changing(), held(HOST, "another full cluster is being started on this host"):
            network.check(self.folder, addresses)
            record = self._load()
            record.ports = PORTS
            network.ensure(self.folder, addresses)
            self.folder.save(record)
            self._runner = runner = Runner(self.folder, record)
            self._here = place = Place(self.folder, programs["kube"], record.ports, address=addresses.node[0],
                                       listen=addresses.anywhere, host=addresses.node[0], addresses=addresses,
                                       prefix=network.node_prefix(self.folder))
            control_plane.prepare(place)
            node.prepare(place)
            self._components = {
                ETCD: lambda: control_plane.etcd(place),
                CONTAINERD: lambda: node.containerd(place),
                API: lambda: control_plane.api_server(place),
                CONTROLLERS: lambda: control_plane.controllers(place),
                SCHEDULER: lambda: control_plane.scheduler(place),
                KUBELET: lambda: node.kubelet(place),
                PROXY: lambda: node.proxy(place),
                NETPOL: lambda: node.netpol(place, programs["netpol"] / "netpol", runner),
            }
            if self.options.kwok:
                control_plane.login(place, KWOK, KWOK, ("system:masters",))
                self._components[KWOK] = lambda: addons.kwok(place, programs["kwok"] / "kwok")
            started = self._launch((ETCD, CONTAINERD))
            for name, reference in (("pause", node.PAUSE), ("coredns", addons.DNS)):
                archive = self.folder.sub("node") / f"{name}.tar"
                self.import_image(images.assemble(archive, reference, programs[name] / name, [f"/{name}"]))
            started += self._launch(tuple(self._components)[2:])
        self.kubectl.apply(*addons.dns(addresses.dns, node.DOMAIN))
        self._wait_ready()
        return started

    def _wait_ready(self) -> None:
        """Until the node takes pods, names are answered, and a pod can be made in the namespace ``default``."""
        limit = f"--timeout={NODE_S:.0f}s"
        try:
            self.kubectl("wait", "--for=condition=Ready", f"node/{node.NAME}", limit, timeout_s=NODE_S + 10)
        except CommandFailed as error:
            raise ComponentFailed(f"the node is not ready: {error}; {self._run.quote(KUBELET)}") from None
        try:
            self.kubectl("rollout", "status", *DNS, limit, timeout_s=NODE_S + 10)
        except CommandFailed as error:
            said = self.kubectl("logs", *DNS, "--tail=20", "--ignore-errors")
            raise ComponentFailed(f"CoreDNS is not ready: {error}; it says: {said}; {self._run.quote(KUBELET)}") from None
        wait_until(lambda: bool(self.kubectl("get", "serviceaccount", "default", "-n", "default", "-o", "name")), NODE_S,
                   "the controllers made the service account default")

    def import_image(self, archive: Path) -> list[str]:
        """Bring an OCI archive to the node. Returns the names of its images, which must be full ones.

        Raises:
            ClusterError: it is no such archive, or an image in it has no full name.
        """
        return images.load(self.folder, archive)
