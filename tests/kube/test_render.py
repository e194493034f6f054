"""What is rendered, before a real API server: dry runs, strict about fields, in a namespace that enforces "restricted"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kube_cluster import start_light
from testcluster.errors import CommandFailed
from testcluster.kubectl import wait_until
from testcluster.light import LightCluster

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.load import documents
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.compare import differs
from xpyd_operator.render.gateway import KINDS
from xpyd_operator.render.labels import FIELD_MANAGER
from xpyd_operator.render.objects import children, key_secret, manifests
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.unsupported import kube_refusals
from xpyd_sidecar.contract.ids import InstanceName, Role

pytestmark = pytest.mark.timeout(1200)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "kubernetes").glob("*.yaml"))
GUIDE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
NAMESPACE = "models"
SETTINGS = KubeSettings(sidecar_image="xpyd-sidecar:1")
SECRET = {"name": "s", "key": "k"}
CORNERS: dict[str, dict[str, Any]] = {
    "claims": {
        "model": {"source": "pvc://models/a"},
        "router": {"placement": "deployment", "apiKeySecret": SECRET},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 8443}]}],
        },
    },
    "cache": {
        "model": {"source": "a/b", "cache": {"claim": "hub"}, "tokenSecret": SECRET},
        "engine": {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}}]},
        "router": {"apiKeySecret": SECRET},
        "decode": {"resources": {"limits": {"cpu": "1500m", "memory": "4Gi"}, "requests": {"cpu": 1}}},
    },
    "offload": {
        "model": {"source": "a/b"},
        "kv": {"audit": 0.01, "offload": {"memory": "64Gi", "disk": "500Gi", "store": {
            "connector": "LMCacheMPConnector", "options": {"lmcache.mp.host": "tcp://x", "lmcache.mp.port": 5555}}}},
    },
    "routers": {
        "router": {
            "placement": "deployment", "resources": {"limits": {"cpu": 2}},
            "template": {
                "metadata": {"annotations": {"team": "a"}},
                "spec": {
                    "imagePullSecrets": [{"name": "registry"}],
                    "tolerations": [{"operator": "Exists"}],
                    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                        {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}]}},
                    "containers": [{
                        "name": "router", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
                        "ports": [{"name": "debug", "containerPort": 5678}],
                        "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                        "resources": {"limits": {"memory": "2048Mi"}},
                    }],
                    "volumes": [{"name": "ca", "projected": {"sources": [{"configMap": {"name": "ca"}}]}}],
                },
            },
        },
    },
    "devices": {
        "prefill": {"parallelism": {"device": "amd.com/gpu", "tensor": 2}, "resources": {"limits": {"memory": "9Gi"}}},
        "decode": {
            "resources": {"limits": {"memory": "9Gi"}, "claims": [{"name": "gpu"}]},
            "template": {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}},
        },
    },
    "template": {
        "decode": {
            "template": {
                "metadata": {"labels": {"team": "a"}},
                "spec": {
                    "priorityClassName": None,
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "c"}},
                                {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}],
                    "containers": [
                        {"name": "main", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                         "ports": [{"name": "debug", "containerPort": 5678}],
                         "volumeMounts": [{"name": "shm", "mountPath": "/more"}]}
                    ],
                },
            }
        }
    },
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    with start_light(tmp_path_factory) as running:
        running.kubectl("create", "namespace", NAMESPACE)
        running.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        running.kubectl("create", "namespace", "guide")
        for name in (NAMESPACE, "guide"):  # before, a pod is refused
            account = ("get", "serviceaccount", "default", "-n", name)
            wait_until(lambda account=account: bool(running.kubectl(*account)), 240, f"{name} has a service account")
        yield running


def try_out(
    cluster: LightCluster, made: list[dict[str, Any]] | tuple[dict[str, Any], ...], namespace: str = NAMESPACE
) -> None:
    text = msgspec.json.encode({"apiVersion": "v1", "kind": "List", "items": made}).decode()
    flags = ("--dry-run=server", "--validate=strict", "--warnings-as-errors")
    answer = cluster.kubectl("create", *flags, "-n", namespace, "-f", "-", stdin=text)
    assert answer.count("(server dry run)") == len(made)


def from_server(cluster: LightCluster, document: dict[str, Any]) -> DisaggService:
    """Created for good, so that owner references mean something."""
    document = document | {"metadata": {**document["metadata"], "namespace": NAMESPACE}}
    cluster.kubectl("create", "-f", "-", stdin=msgspec.json.encode(document).decode())
    live = cluster.kubectl.get("disaggservice", document["metadata"]["name"], "-n", NAMESPACE)
    return decode_service(live, target=Target.KUBERNETES).service


def corner(name: str) -> dict[str, Any]:
    spec = {"model": {"source": "Qwen/Qwen3-8B"}, **CORNERS[name]}
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_api_server_takes_every_object_of_every_example(cluster: LightCluster, path: Path) -> None:
    document = documents(path.read_text())[0].value
    service = decode_service(document, target=Target.KUBERNETES).service
    if "# Not built yet" in path.read_text():
        assert list(kube_refusals(service)) != []
        return
    assert list(kube_refusals(service)) == []
    namespace = NAMESPACE if service.spec.kv.shared_folder is None else "guide"  # a folder of the node is not "restricted"
    made = [each for each in manifests(service, SETTINGS) if each["kind"] not in KINDS]  # those are of CRDs
    try_out(cluster, made, namespace)


def shown() -> list[dict[str, Any]]:
    """Every service of the guide."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = [each.value for block in blocks for each in documents(block)]
    return [each for each in found if each.get("kind") == "DisaggService"]


@pytest.mark.parametrize("number", range(len(shown())), ids=lambda number: shown()[number]["metadata"]["name"])
def test_the_api_server_takes_every_service_that_the_guide_shows(cluster: LightCluster, number: int) -> None:
    """Not all of them are for namespaces that enforce ``restricted``: locked memory is a capability."""
    document = shown()[number]
    service = decode_service(document, target=Target.KUBERNETES).service
    try_out(cluster, [document, *manifests(service, SETTINGS)], "guide")


@pytest.mark.parametrize("name", CORNERS)
def test_the_api_server_takes_every_setting(cluster: LightCluster, name: str) -> None:
    service = from_server(cluster, corner(name))
    assert list(kube_refusals(service)) == []
    try_out(cluster, manifests(service, SETTINGS))


@pytest.mark.parametrize("name", ["claims", "routers"])
def test_what_was_applied_does_not_differ_and_what_was_edited_does(cluster: LightCluster, name: str) -> None:
    document = corner(name) | {"metadata": {"name": f"applied-{name}"}}
    service = from_server(cluster, document)
    for one in children(service, {Role.PREFILL: 2, Role.DECODE: 3}, SETTINGS):
        kind, name = one["kind"], one["metadata"]["name"]
        text = msgspec.json.encode(one).decode()
        apply = ("apply", "--server-side", f"--field-manager={FIELD_MANAGER}", "--force-conflicts", "-f", "-")
        cluster.kubectl(*apply, stdin=text)
        live = cluster.kubectl.get(kind, name, "-n", NAMESPACE)
        assert differs(one, live) == "", f"{kind} {name}"
        field, path = EDITS[kind]
        cluster.kubectl("patch", kind, name, "-n", NAMESPACE, "--type=merge", "-p", msgspec.json.encode(field).decode())
        assert differs(one, cluster.kubectl.get(kind, name, "-n", NAMESPACE)).startswith(path), f"{kind} {name}"
        cluster.kubectl(*apply, stdin=text)
        assert differs(one, cluster.kubectl.get(kind, name, "-n", NAMESPACE)) == "", f"{kind} {name}"


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "Service": ({"spec": {"selector": {"stray": "x"}}}, "spec.selector.stray"),
    "NetworkPolicy": ({"spec": {"ingress": [{}]}}, "spec.ingress"),
    "PodDisruptionBudget": ({"spec": {"selector": {"matchLabels": {"example.com/other": "x"}}}}, "spec.selector"),
    "Deployment": ({"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}}, "spec.template"),
}


def test_a_secret_is_made_once_and_a_pod_can_be_created(cluster: LightCluster) -> None:
    document = corner("cache") | {"metadata": {"name": "real"}}
    service = from_server(cluster, document)
    pod = engine_pods(service, Role.DECODE, InstanceName("real-e0"), Revision("abc"), SETTINGS)[0]
    for one in (key_secret(service, "ab" * 32), pod):
        cluster.kubectl("create", "--validate=strict", "-f", "-", stdin=msgspec.json.encode(one).decode())
    assert differs(pod, cluster.kubectl.get("pod", "real-e0", "-n", NAMESPACE)) == ""
    with pytest.raises(CommandFailed, match="immutable"):
        cluster.kubectl("patch", "secret", "real-key", "-n", NAMESPACE, "--type=merge", "-p", '{"data":{"key":"eA=="}}')


def test_the_namespace_really_enforces(cluster: LightCluster) -> None:
    service = decode_service(corner("template"), target=Target.KUBERNETES).service
    pod = engine_pods(service, Role.DECODE, InstanceName("template-e0"), Revision("abc"), SETTINGS)[0]
    pod["spec"] = pod["spec"] | {"hostPID": True}
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        try_out(cluster, [pod])
    del pod["spec"]["hostPID"]
    with pytest.raises(CommandFailed, match="unknown field"):
        try_out(cluster, [pod | {"spec": pod["spec"] | {"nonsense": 1}}])
