"""What runs on a cluster to make it whole: the names of Services (CoreDNS), and fake nodes (kwok plays their kubelets)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testcluster import probes
from testcluster.control_plane import Place
from testcluster.runner import Component

KWOK = "kwok"
FAKE = "kwok.x-k8s.io/node"
FAKE_PODS = "10.200.0.0/16"
LEASE_S = 40
# One pod after the other: kwok makes its pool of addresses at the first pod without a lock, so two that begin side by
# side may each make one, and get the same address out of them. The rest are its defaults, which a file without them
# sets to nothing.
KWOK_OPTIONS = """\
apiVersion: config.kwok.x-k8s.io/v1alpha1
kind: KwokConfiguration
options:
  podPlayStageParallelism: 1
  nodePlayStageParallelism: 4
  nodeLeaseParallelism: 4
  podsOnNodeSyncParallelism: 1
  enablePodsOnNodeSyncListPager: true
"""
DNS = "localhost/testcluster-coredns:1"
COREFILE = """\
.:53 {
    errors
    health :8080
    ready :8181
    kubernetes %DOMAIN% in-addr.arpa ip6.arpa {
        pods insecure
    }
    template ANY ANY . {
        rcode NXDOMAIN
    }
}
"""


def kwok(place: Place, program: Path) -> Component:
    """Nodes with the annotation become ready; pods on them run at once, and end at once when they are deleted."""
    config = place.folder / "config/kwok.yaml"
    stages = [path.read_text() for path in sorted((program.parent.parent / "assets").iterdir())]
    config.write_text("\n---\n".join((KWOK_OPTIONS, *stages)))
    command = [
        *place.prefix, str(program), f"--kubeconfig={place.kubeconfig(KWOK)}", f"--config={config}",
        f"--manage-nodes-with-annotation-selector={FAKE}=fake", f"--node-lease-duration-seconds={LEASE_S}",
        f"--cidr={FAKE_PODS}", f"--server-address={place.at(place.ports[KWOK])}",
    ]  # fmt: skip
    return Component(KWOK, command, lambda: probes.plain(f"http://{place.at(place.ports[KWOK])}/readyz"))


def fake_node(name: str, allocatable: Mapping[str, str], labels: Mapping[str, str] | None = None,
              tainted: bool = False) -> dict[str, Any]:
    """A node for kwok. ``allocatable`` is also the capacity; with a taint only pods that tolerate it come there."""
    known = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", FAKE: "fake"}
    resources = {"cpu": "64", "memory": "512Gi", "pods": "250"} | dict(allocatable)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {FAKE: "fake"}, "labels": known | dict(labels or {})},
        "spec": {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]} if tainted else {},
        "status": {"allocatable": resources, "capacity": resources},
    }


def dns(address: str, domain: str) -> list[dict[str, Any]]:
    """CoreDNS as every cluster has it: ``kube-dns`` in ``kube-system``. Names of the world outside do not exist here."""
    labels = {"k8s-app": "kube-dns"}
    where = {"name": "kube-dns", "namespace": "kube-system"}
    container = {
        "name": "coredns",
        "image": DNS,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [{"name": "dns", "containerPort": 53, "protocol": "UDP"},
                  {"name": "dns-tcp", "containerPort": 53, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1, "timeoutSeconds": 5,
                           "failureThreshold": 10},
        # Engines that start take all of a small host: slow answers are no reason to leave a cluster without names.
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8080}, "initialDelaySeconds": 30, "timeoutSeconds": 10,
                          "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "kube-dns",
        "dnsPolicy": "Default",
        "priorityClassName": "system-cluster-critical",
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "kube-dns"}}],
    }
    reads = [{"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
             {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": where},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "testcluster:dns"}, "rules": reads},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "testcluster:dns"},
         "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "testcluster:dns"},
         "subjects": [{"kind": "ServiceAccount", **where}]},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": where,
         "data": {"Corefile": COREFILE.replace("%DOMAIN%", domain)}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {**where, "labels": labels},
         "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {**where, "labels": labels},
         "spec": {"selector": labels, "clusterIP": address,
                  "ports": [{"name": "dns", "port": 53, "protocol": "UDP"},
                            {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]}},
    ]
