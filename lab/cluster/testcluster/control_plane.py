"""Command lines of etcd, API server, controller manager and scheduler.

Certificates and kubeconfigs come from ``prepare``; ports stay as they were chosen, so that a component which is stopped and
started again is found by the others. Only the API server's port needs a login; that of etcd is open to this host (or, in a
full cluster, to the node's own network alone).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from testcluster import probes
from testcluster.addresses import LIGHT, Addresses
from testcluster.pki import Pki
from testcluster.runner import Component
from testcluster.state import Folder
from xpyd_sidecar.contract.ids import join_host_port

PORTS = ("etcd", "etcd-peer", "etcd-health", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ETCD, API, CONTROLLERS, SCHEDULER = "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"
KEPT_OBJECT = "/api/v1/namespaces/kube-public/serviceaccounts/default"
"""The controller manager makes it; nobody uses it."""
FAST_CLIENT = ("--kube-api-qps=1000", "--kube-api-burst=2000")
"""The controllers never wait for their own client's limit, which by default makes a thousand pods take minutes."""
CLIENTS = {
    "admin": ("admin", ("system:masters",)),
    CONTROLLERS: ("system:kube-controller-manager", ("system:masters",)),
    SCHEDULER: ("system:kube-scheduler", ()),
    "kubelet-client": ("kube-apiserver-kubelet-client", ("system:masters",)),
}


class Place(msgspec.Struct, frozen=True):
    """Where a control plane runs."""

    folder: Folder
    binaries: Path
    """Holds the links named after the components."""
    ports: dict[str, int]
    address: str
    """Of the API server, as everybody reaches it."""
    listen: str
    """What the API server binds to."""
    host: str
    """Where the other components serve their health."""
    addresses: Addresses = LIGHT
    prefix: tuple[str, ...] = ()
    """Put before every command, to run it in a network of its own."""

    @property
    def pki(self) -> Pki:
        """The cluster's certificates."""
        return Pki(self.folder / "pki")

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{join_host_port(self.address, self.ports[API])}"

    def at(self, port: int) -> str:
        """``host:port`` of a component that serves its health there."""
        return join_host_port(self.host, port)

    def kubeconfig(self, client: str) -> Path:
        """Of a component's certificate."""
        return self.folder / "kubeconfigs" / f"{client}.kubeconfig"

    def command(self, name: str, *arguments: str) -> list[str]:
        """A component with its arguments."""
        return [*self.prefix, str(self.binaries / name), *arguments]


def prepare(place: Place) -> None:
    """Everything on disk that the components read. Files that are there stay."""
    pki = place.pki
    for authority in ("ca", "front-proxy-ca"):
        pki.authority(authority)
    pki.token_key()
    service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    pki.server(API, dict.fromkeys(("localhost", *service, "127.0.0.1", place.addresses.api_service, place.address)))
    pki.client("front-proxy", "front-proxy-client", authority="front-proxy-ca")
    for name, (user, groups) in CLIENTS.items():
        login(place, name, user, groups)
    place.pki.kubeconfig(place.folder / "admin.kubeconfig", place.server, "admin")
    config = place.folder.sub("config")
    (config / "audit.yaml").write_text(yaml.safe_dump(AUDIT))


def login(place: Place, name: str, user: str, groups: tuple[str, ...]) -> Path:
    """A certificate and a kubeconfig for one client of the API server."""
    place.pki.client(name, user, groups)
    return place.pki.kubeconfig(place.kubeconfig(name), place.server, name)


def etcd(place: Place) -> Component:
    """The store. What it acknowledged survives kill -9 of itself, but not a crash of the host."""
    client, peer = (f"http://127.0.0.1:{place.ports[name]}" for name in ("etcd", "etcd-peer"))
    health = f"http://{place.at(place.ports['etcd-health'])}"
    command = place.command(
        ETCD, "--name=test", f"--data-dir={place.folder / 'etcd'}", "--unsafe-no-fsync",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=test={peer}", "--logger=zap", "--log-level=warn",
        f"--listen-metrics-urls={health}", "--auto-compaction-mode=periodic", "--auto-compaction-retention=10m",
        f"--quota-backend-bytes={4 << 30}",
    )  # fmt: skip
    return Component(ETCD, command, lambda: probes.plain(f"{health}/health"))


def api_server(place: Place, *more: str) -> Component:
    """The API server, ready once every one of its own checks passes."""
    pki = place.pki
    command = place.command(
        API,
        f"--etcd-servers=http://127.0.0.1:{place.ports[ETCD]}",
        f"--bind-address={place.listen}", f"--secure-port={place.ports[API]}", f"--advertise-address={place.address}",
        f"--tls-cert-file={pki.certificate(API)}", f"--tls-private-key-file={pki.key(API)}",
        f"--client-ca-file={pki.certificate('ca')}", "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki.token_keys}", f"--service-account-signing-key-file={pki.key('service-accounts')}",
        f"--service-cluster-ip-range={','.join(place.addresses.services)}",
        f"--kubelet-certificate-authority={pki.certificate('ca')}", "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={pki.certificate('kubelet-client')}",
        f"--kubelet-client-key={pki.key('kubelet-client')}",
        f"--requestheader-client-ca-file={pki.certificate('front-proxy-ca')}",
        "--requestheader-allowed-names=front-proxy-client", "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki.certificate('front-proxy')}", f"--proxy-client-key-file={pki.key('front-proxy')}",
        "--enable-aggregator-routing=true", "--allow-privileged=true",
        f"--audit-policy-file={place.folder / 'config/audit.yaml'}", f"--audit-log-path={place.folder / 'logs/audit.log'}",
        "--audit-log-maxsize=500", "--audit-log-maxbackup=1",
        "--profiling=false", "--shutdown-watch-termination-grace-period=2s", *more,
    )  # fmt: skip
    return Component(API, command, lambda: probes.trusted(f"{place.server}/readyz?verbose", pki, "admin"), deadline_s=120)


def controllers(place: Place) -> Component:
    """The controller manager, ready once its controllers work.

    All controllers act as one user, which starts faster than with a token for each.
    """
    pki = place.pki
    command = place.command(
        CONTROLLERS,
        *_controller_flags(place, CONTROLLERS), *FAST_CLIENT,
        f"--service-account-private-key-file={pki.key('service-accounts')}", f"--root-ca-file={pki.certificate('ca')}",
        f"--cluster-signing-cert-file={pki.certificate('ca')}", f"--cluster-signing-key-file={pki.key('ca')}",
        "--use-service-account-credentials=false", "--controllers=*", "--allocate-node-cidrs=false",
        "--concurrent-deployment-syncs=20", "--concurrent-replicaset-syncs=20", "--concurrent-gc-syncs=40",
        "--horizontal-pod-autoscaler-sync-period=1s",
    )  # fmt: skip
    work = probes.MadeAgain(f"{place.server}{KEPT_OBJECT}", pki, "admin")
    return Component(CONTROLLERS, command, lambda: _health(place, CONTROLLERS) or work())


def scheduler(place: Place) -> Component:
    """The scheduler."""
    command = place.command(SCHEDULER, *_controller_flags(place, SCHEDULER), *FAST_CLIENT)
    return Component(SCHEDULER, command, lambda: _health(place, SCHEDULER))


def _controller_flags(place: Place, name: str) -> list[str]:
    config = place.kubeconfig(name)
    return [f"--kubeconfig={config}", f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}",
            f"--bind-address={place.host}", f"--secure-port={place.ports[name]}", "--leader-elect=false",
            "--profiling=false"]


def _health(place: Place, name: str) -> str:
    return probes.own_certificate(f"https://{place.at(place.ports[name])}/healthz")


AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "rules": [
        {  # a stream is logged when it begins: it may never end
            "level": "Metadata",
            "verbs": ["watch"],
            "omitStages": ["RequestReceived", "ResponseComplete"],
        },
        {"level": "Metadata", "omitStages": ["RequestReceived", "ResponseStarted"]},
    ],
}
"""One line for each request: who, verb, resource, answer; no bodies."""
