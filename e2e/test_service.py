"""`kubectl apply` on a whole cluster: real engines in pods, traffic from other pods, and what may happen to them."""

from __future__ import annotations

import base64
import json
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from external_metrics import served
from kube_routers import key_secret_of
from service_in_cluster import ServiceInCluster, asked, check, strangers_reach_the_router_alone
from testcluster.errors import CommandFailed
from testcluster.kubectl import wait_until
from testcluster.network import HOST_ADDRESS

from xpyd_sidecar.contract.ids import join_host_port

pytestmark = pytest.mark.timeout(900)
AWAY_S = 60.0
AUTOSCALING = Path(__file__).resolve().parent.parent / "examples/kubernetes/autoscaling.yaml"


@pytest.mark.smoke
def test_an_answer_through_the_service_from_another_pod(service: ServiceInCluster) -> None:
    url = service.get(f"dsvc/{service.name}")["status"]["url"]
    (answer,) = asked(service, f"{url}/v1")
    assert answer.strip()
    row = service.kubectl("get", "dsvc", service.name).splitlines()[1].split()
    assert row[:5] == ["tiny", "tiny", "1P1D", "1P1D", "True"]
    (prefill,), (decode,) = service.pods("prefill"), service.pods("decode")
    # The client has its answer before prefill has heard that its KV came, and before either has counted it.
    wait_until(lambda: service.metric(prefill, "xpyd_kv_pushed_bytes_total") > 0, 120, "prefill pushed KV")
    wait_until(lambda: service.metric(decode, "vllm:request_success_total") > 0, 120, "decode counted the request")
    wait_until(lambda: service.metric(decode, "xpyd_kv_link_bytes_total", 'link="shm"') > 0, 120, "KV came through memory")


def test_both_families_lead_to_the_router(service: ServiceInCluster) -> None:
    addresses = [*service.get("service", service.name)["spec"]["clusterIPs"]]
    (decode,) = service.get("pods", "-l", "xpyd.dev/role=decode")["items"]
    addresses += [each["ip"] for each in decode["status"]["podIPs"]]
    assert [":" in address for address in addresses] == [False, True, False, True]
    answers = asked(service, *(f"http://{join_host_port(address, 10001)}/v1" for address in addresses))
    assert len(answers) == 4
    assert len(set(answers)) == 1


def test_a_stranger_reaches_the_router_and_nothing_else(service: ServiceInCluster) -> None:
    strangers_reach_the_router_alone(service)


@pytest.mark.smoke
def test_prefill_scales_up_and_loses_a_pod_under_load(service: ServiceInCluster) -> None:
    document = service.document()
    document["spec"]["prefill"]["replicas"] = 2
    (first,) = service.pods("prefill")
    before = service.uids()[first]
    with service.traffic(least=30) as ended:
        service.cluster.kubectl.apply(document)
        service.wait_ready("2P1D")
        service.kubectl("delete", "pod", first, "--timeout=150s", timeout_s=160)
        service.wait_ready("2P1D")
    assert before not in service.uids().values()
    check(ended, 30)
    service.apply()
    service.wait_ready("1P1D")


def autoscaler(service: ServiceInCluster) -> dict[str, Any]:
    """The one of the example for this service, without its patience."""
    _, found = yaml.safe_load_all(AUTOSCALING.read_text("utf-8"))
    pool = f"{service.name}-decode"
    at_once = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 4, "periodSeconds": 1}]}
    spec = found["spec"] | {"maxReplicas": 2, "behavior": {"scaleUp": at_once, "scaleDown": at_once}}
    spec["scaleTargetRef"] = found["spec"]["scaleTargetRef"] | {"name": pool}
    return {**found, "metadata": {"name": pool, "namespace": service.namespace}, "spec": spec}


def untouched(service: ServiceInCluster) -> bool:
    """Git sees no difference."""
    document = json.dumps(service.document())
    return service.cluster.kubectl("diff", "-f", "-", stdin=document) == ""


def test_an_autoscaler_scales_decode_up_under_load(service: ServiceInCluster) -> None:
    """The real HorizontalPodAutoscaler: pool, pods, routers, and no failed request."""
    with served(service.cluster, "default", HOST_ADDRESS) as metrics:
        metrics.value = "10"
        service.cluster.kubectl.apply(autoscaler(service))
        wait_until(lambda: metrics.asked > 1, 240, "the autoscaler asks for the metric")
        try:
            with service.traffic(least=20) as ended:
                metrics.value = "60"  # 32 for each
                service.wait_ready("1P2D")
                assert service.get(f"dpool/{service.name}-decode")["spec"]["replicas"] == 2
                assert untouched(service)
                time.sleep(5)
        finally:
            service.kubectl("delete", "hpa", f"{service.name}-decode")
    check(ended, 20)


def test_the_operator_is_upgraded_and_rolled_back_under_load(service: ServiceInCluster) -> None:
    """Both of its pods are replaced, twice; what a new version would bring to engine pods waits for their next rollout."""
    deployment = ("-n", "xpyd-system", "rollout")
    rolled = (*deployment, "status", "deployment/xpyd-operator", "--timeout=300s")

    def engines() -> list[tuple[str, list[int]]]:
        pods = service.get("pods", "-l", f"xpyd.dev/service={service.name}")["items"]
        return sorted((pod["metadata"]["uid"], [
            each["restartCount"] for kind in ("containerStatuses", "initContainerStatuses") for each in pod["status"][kind]
        ]) for pod in pods)

    def operators() -> set[str]:
        pods = service.cluster.kubectl.get("-n", "xpyd-system", "pods", "-l", "app.kubernetes.io/name=xpyd-operator")
        return {pod["metadata"]["uid"] for pod in pods["items"] if "deletionTimestamp" not in pod["metadata"]}

    service.wait_ready()
    before = engines()
    with service.traffic(pause_s=1.0) as ended:
        first = operators()
        image = f"XPYD_SIDECAR_IMAGE={service.images.name('sidecar')}-next"
        service.cluster.kubectl("-n", "xpyd-system", "set", "env", "deployment/xpyd-operator", image)
        service.cluster.kubectl(*rolled, timeout_s=310)
        second = operators()
        assert not first & second
        service.wait_ready()
        service.cluster.kubectl(*deployment, "undo", "deployment/xpyd-operator")
        service.cluster.kubectl(*rolled, timeout_s=310)
        assert not second & operators()
        service.wait_ready()
        assert untouched(service)
    check(ended, 10)
    assert engines() == before, "no engine pod was replaced, no container of one restarted"


def test_engine_pods_deleted_under_load(service: ServiceInCluster) -> None:
    """A decode pod, whose peer takes over, and the only prefill pod, which decode stands in for."""
    service.scale("decode", 2)
    service.wait_ready("1P2D")
    victims = [service.pods(role)[0] for role in ("decode", "prefill")]
    before = service.uids()
    with service.traffic(least=30) as ended:
        began = time.monotonic()
        service.kubectl("delete", "pod", *victims, "--timeout=150s", timeout_s=160)
        print(f"{' and '.join(victims)} ended after {time.monotonic() - began:.0f} s")
        service.wait_ready("1P2D")
    assert not {before[name] for name in victims} & {*service.uids().values()}
    check(ended, 30)


def test_node_drained_under_load(service: ServiceInCluster) -> None:
    """The only node, so the last decode pod may not go: the budget holds it, and requests go on."""
    service.scale("decode", 2)
    service.wait_ready("1P2D")
    (node,) = service.cluster.kubectl.get("nodes")["items"]
    name = node["metadata"]["name"]
    before = {*service.uids().values()}
    with service.traffic(least=20) as ended:
        try:
            with pytest.raises(CommandFailed, match=r"timed out|disruption budget|timeout"):
                service.cluster.kubectl("drain", name, "--delete-emptydir-data", "--force", "--ignore-daemonsets",
                                        "--timeout=60s", f"--pod-selector=xpyd.dev/service={service.name}", timeout_s=90)
            left = before & {*service.uids().values()}
            assert len(left) == 1, "one decode stays"
            assert left <= {*service.uids("decode").values()}
            time.sleep(5)
        finally:
            service.cluster.kubectl("uncordon", name)
        service.wait_ready("1P2D")
    check(ended, 20)


def test_decode_scales_down_under_load(service: ServiceInCluster) -> None:
    service.scale("decode", 2)
    service.wait_ready("1P2D")
    with service.traffic() as ended:
        time.sleep(5)
        service.scale("decode", 1)
        wait_until(lambda: len(service.get("pods", "-l", "xpyd.dev/role=decode")["items"]) == 1, 300, "one decode is left")
        service.wait_ready("1P1D")
    check(ended, 10)
    service.cluster.kubectl.apply(service.document())
    assert untouched(service)


def test_keys_are_changed_under_load(service: ServiceInCluster) -> None:
    """Another generation of the master: every pod is replaced by one with another key, and no request is lost."""

    def secrets_used() -> set[str]:
        pods = service.get("pods", "-l", f"xpyd.dev/service={service.name},app.kubernetes.io/component=engine")["items"]
        return {key_secret_of(pod) for pod in pods}

    service.wait_ready("1P1D")
    before, first = {*service.uids().values()}, secrets_used()
    with service.traffic(least=30) as ended:
        value = base64.b64encode(secrets.token_hex(32).encode()).decode()
        service.cluster.kubectl("-n", "xpyd-system", "patch", "secret", "xpyd-master", "--type=merge",
                                "-p", json.dumps({"data": {"2": value}}))
        wait_until(lambda: not secrets_used() & first, 600, "no pod has the key of before")
        service.wait_ready("1P1D")
        time.sleep(5)
    assert not before & {*service.uids().values()}
    check(ended, 30)


def test_requests_go_on_without_the_operator(service: ServiceInCluster) -> None:
    with service.traffic(least=20) as ended:
        service.cluster.kubectl("-n", "xpyd-system", "scale", "deployment/xpyd-operator", "--replicas=0")
        try:
            time.sleep(AWAY_S)
        finally:
            service.cluster.kubectl("-n", "xpyd-system", "scale", "deployment/xpyd-operator", "--replicas=2")
    check(ended, 20)
    service.wait_ready("1P1D")


def test_requests_go_on_without_the_api_server(service: ServiceInCluster) -> None:
    with service.traffic(least=20) as ended:
        service.cluster.stop("kube-apiserver")
        try:
            time.sleep(AWAY_S)
        finally:
            service.cluster.start("kube-apiserver")
    check(ended, 20)
    service.wait_ready("1P1D")


def test_nothing_is_left_of_a_deleted_service(service: ServiceInCluster) -> None:
    service.kubectl("delete", "dsvc", service.name, "--timeout=150s", timeout_s=160)
    wait_until(lambda: not service.left(), 300, "nothing is left")
    assert service.left() == []
