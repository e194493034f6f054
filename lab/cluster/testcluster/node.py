"""The one node of a full cluster: containerd, kubelet, kube-proxy and netpol, with their configuration.

All of it runs in the node's own network and mount table (see network), so the usual places below /run and /var are its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from testcluster import images, network, probes, remains
from testcluster.addresses import is_v4
from testcluster.control_plane import Place, login
from testcluster.errors import CommandFailed
from testcluster.packages import CNI_PLUGINS
from testcluster.runner import Component, Runner

CONTAINERD, KUBELET, PROXY, NETPOL = "containerd", "kubelet", "kube-proxy", "netpol"
NAME = "node"
PAUSE = "localhost/testcluster-pause:1"
DOMAIN = "cluster.local"
NEVER_SHORT = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree")
PROXY_HEALTH, KUBELET_HEALTH = 10256, 10248


def prepare(place: Place) -> None:
    """Everything on disk that the node's programs read."""
    config, var = place.folder.sub("config"), place.folder.sub("node/var")
    place.folder.sub("config/cni")
    for folder in ("lib/cni", "lib/kubelet"):
        (var / folder).mkdir(parents=True, exist_ok=True)
    place.pki.server(KUBELET, (NAME, *place.addresses.node))
    login(place, KUBELET + "-node", f"system:node:{NAME}", ("system:nodes",))
    login(place, PROXY, "system:kube-proxy", ())
    login(place, NETPOL, NETPOL, ("system:masters",))
    (config / "containerd.toml").write_text(_containerd(place))
    (config / "cni/10-pods.conflist").write_text(json.dumps(_pod_network(place), indent=1))
    (config / "kubelet.yaml").write_text(yaml.safe_dump(_kubelet(place)))


def containerd(place: Place) -> Component:
    """The container runtime."""
    command = [*place.prefix, "containerd", f"--config={place.folder / 'config/containerd.toml'}"]
    return Component(CONTAINERD, command, lambda: _answers(place))


def kubelet(place: Place) -> Component:
    """The kubelet. Ready means that it answers; the node is ready later, when the API server says so."""
    command = place.command(
        KUBELET, f"--config={place.folder / 'config/kubelet.yaml'}", f"--kubeconfig={place.kubeconfig(KUBELET + '-node')}",
        f"--hostname-override={NAME}", f"--node-ip={','.join(place.addresses.node)}",
    )  # fmt: skip
    return Component(KUBELET, command, lambda: probes.plain(f"http://{place.at(KUBELET_HEALTH)}/healthz"), deadline_s=90)


def proxy(place: Place) -> Component:
    """kube-proxy: the addresses of Services, for the node's pods and, by way of the node, for the host."""
    command = place.command(
        PROXY, f"--kubeconfig={place.kubeconfig(PROXY)}", "--proxy-mode=nftables",
        f"--cluster-cidr={','.join(place.addresses.pods)}", f"--hostname-override={NAME}",
        "--conntrack-max-per-core=0", "--conntrack-min=0",
        f"--healthz-bind-address={place.at(PROXY_HEALTH)}",
    )  # fmt: skip
    return Component(PROXY, command, lambda: probes.plain(f"http://{place.at(PROXY_HEALTH)}/healthz"))


def netpol(place: Place, program: Path, runner: Runner) -> Component:
    """NetworkPolicy: judges every new connection from or to a pod. While it is down, there are no new ones."""
    command = [*place.prefix, str(program), f"--kubeconfig={place.kubeconfig(NETPOL)}", f"--node-name={NAME}",
               f"--queue={network.QUEUE}"]
    return Component(NETPOL, command, lambda: _reads_queue(runner))


def _answers(place: Place) -> str:
    if fault := probes.exists(images.socket(place.folder)):
        return fault
    try:
        images.ctr(place.folder, "version")
    except CommandFailed as error:
        return str(error)
    return ""


def _reads_queue(runner: Runner) -> str:
    """The kernel lists the queues of the network that a process is in, the number first."""
    identity = runner.record.processes.get(NETPOL)
    try:
        lines = Path(f"/proc/{identity.pid if identity else 0}/net/netfilter/nfnetlink_queue").read_text().splitlines()
    except OSError as error:
        return str(error)
    return "" if any(line.split()[0] == str(network.QUEUE) for line in lines) else f"nobody reads queue {network.QUEUE}"


def _containerd(place: Place) -> str:
    """Without the right to lower OOM scores (as in many containers) a sandbox fails unless that is restricted."""
    node = place.folder / "node"
    return f"""\
version = 2
root = "{node}/containerd"
state = "/run/testcluster-containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]

[grpc]
  address = "{images.socket(place.folder)}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{node}/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{place.folder / 'config/cni'}"
"""


def _pod_network(place: Place) -> dict[str, object]:
    """Pods on a bridge, with an address of each family."""
    pods = place.addresses.pods
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": each}] for each in pods],
                    "routes": [{"dst": "0.0.0.0/0" if is_v4(each) else "::/0"} for each in pods],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _kubelet(place: Place) -> dict[str, object]:
    pki = place.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": place.host,
        "healthzBindAddress": place.host,
        "healthzPort": KUBELET_HEALTH,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.certificate("ca"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki.certificate(KUBELET)),
        "tlsPrivateKeyFile": str(pki.key(KUBELET)),
        "containerRuntimeEndpoint": f"unix://{images.socket(place.folder)}",
        "clusterDNS": [place.addresses.dns],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{remains.short_name(place.folder)}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "serializeImagePulls": False,
        # A test's images stay and its pods are not evicted, however full the host's disk is.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": dict.fromkeys(NEVER_SHORT, "0%"),
    }
