"""The Kubernetes backend against a real API server: ``Services`` in this process, fed by list and watch, without kopf."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kube_client import NO_NIC, WITH_NIC, Kube, Mirror, Object
from kube_routers import key_secret_of
from kube_watched import DEADLINE_S, Watched, is_ready, is_true, label, wait_account
from node_agent import ROLE, ROUTER, SERVICE, NodeAgent, Script
from testcluster.light import LightCluster

from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.cache import KINDS, OWNER_KIND, WatchCache
from xpyd_operator.kube.client.login import Login
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.service.services import Services
from xpyd_operator.kube.settings import OperatorSettings

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
IMAGE = "registry.example/xpyd-sidecar:test"
_numbers = itertools.count()


class Place(Watched):
    """A namespace with a scripted kubelet, the objects in it, and services that are looked after by this process."""

    def __init__(self, kube: Kube, namespace: str, agent: NodeAgent) -> None:
        self.kube, self.namespace, self.agent = kube, namespace, agent
        self.cache, self.metrics = WatchCache(), Metrics()
        self.asked: list[str] = []
        self.mirrors: dict[str, Mirror] = {}

    def look_after(self, api: Api) -> None:
        settings = OperatorSettings(sidecar_image=IMAGE, resync_s=1.0, gap_s=0.05, operator_namespace=self.namespace,
                                    fleet_timeout_s=20.0)
        self.api = api
        self.services = Services(api, self.cache, settings, self.metrics)

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """The API's counter."""
        self.asked.append(f"{verb} {resource} {code}")

    def hear(self, kind: str) -> Mirror:
        """Feeds the cache, as the operator's watches do."""
        mirror = self.mirrors[kind] = Mirror(self.kube, kind, self.namespace)

        def heard(was: Object | None, now: Object | None) -> None:
            body = now if now is not None else was
            assert body is not None
            if kind in KINDS:
                body = {"kind": kind, **body}
                news = self.cache.on_seen(kind, body) if now is not None else self.cache.on_deleted(kind, body)
                name = body["metadata"]["name"] if kind == OWNER_KIND else label(body, SERVICE)
                if news and name:
                    self.services.wake(self.namespace, name)

        mirror.listeners.append(heard)
        return mirror

    async def apply(self, name: str = "qwen", prefill: Any = 1, decode: Any = 2, **spec: Any) -> Object:
        sections = {role: {"replicas": each} if isinstance(each, int) else each
                    for role, each in (("prefill", prefill), ("decode", decode))}
        base: Object = {"model": {"source": "org/tiny"}, "engine": {"image": "engine:1"}, "drain": {"timeout": "10s"}}
        document = {"apiVersion": "xpyd.dev/v1beta1", "kind": OWNER_KIND, "metadata": {"name": name}}
        return await self.kube.apply(OWNER_KIND, self.namespace, document | {"spec": base | sections | spec})

    def ready(self, role: str = "") -> list[str]:
        return sorted(name for name, pod in self.of("Pod").items() if role in ("", label(pod, ROLE)) and label(pod, ROLE)
                      and is_ready(pod))

    def condition(self, kind: str, name: str = "qwen") -> Object:
        status = self.of(OWNER_KIND).get(name, {}).get("status") or {}
        return next((each for each in status.get("conditions", ()) if each["type"] == kind), {})

    def settled(self, shape: str) -> bool:
        service = self.of(OWNER_KIND).get("qwen") or {}
        status = service.get("status") or {}
        current = status.get("observedGeneration") == (service.get("metadata") or {}).get("generation")
        pods = f"{len(self.ready('prefill'))}P{len(self.ready('decode'))}D"
        return (current and status.get("ready") == shape == pods and self.condition("Ready").get("status") == "True"
                and self.condition("Progressing").get("status") == "False")

    def describe(self) -> str:
        pods = [(name, pod["metadata"].get("labels"), (pod.get("status") or {}).get("phase"))
                for name, pod in self.of("Pod").items()]
        said = {name: each.get("status") for name, each in self.of(OWNER_KIND).items()}
        return f"{said}\n{pods}\n{self.agent.faults}"

    async def wait_quiet(self, seconds: float, most: int = 0) -> None:
        """Until nothing (or ``most``) was asked for so long, and all is answered. Whoever asks again and again, every
        second as it looks, is never quiet.
        """
        end = time.monotonic() + DEADLINE_S
        while True:
            before = len(self.asked)
            await asyncio.sleep(seconds)
            if len(self.asked) - before <= most and len(self.asked) == self.api.requests:
                return
            assert time.monotonic() < end, f"it still asks: {self.asked[before:]}"

    async def wait_settled(self, shape: str) -> None:
        await self.wait(lambda: self.settled(shape), f"settled as {shape}")


@pytest.fixture
async def place(cluster: LightCluster) -> AsyncIterator[Place]:
    namespace = f"backend-{next(_numbers)}"
    async with contextlib.AsyncExitStack() as stack:
        kube = await stack.enter_async_context(Kube(cluster.kubeconfig))
        await kube.create("Namespace", {"metadata": {"name": namespace}})
        await wait_account(kube, namespace)
        agent = await stack.enter_async_context(NodeAgent(kube, namespace))
        made = Place(kube, namespace, agent)
        login = Login(kubeconfig=str(cluster.kubeconfig))
        made.look_after(await stack.enter_async_context(await login.api(made, width=32, timeout_s=10.0)))
        for kind in (*KINDS, "Secret", "Event"):
            await stack.enter_async_context(made.hear(kind))
        running = asyncio.create_task(made.services.run())
        try:
            yield made
        finally:
            await made.services.close()
            await asyncio.wait_for(running, 120)
            await kube.request("DELETE", f"/api/v1/namespaces/{namespace}")


async def test_a_document_becomes_a_service_and_then_nothing_is_asked(place: Place) -> None:
    await place.apply()
    await place.wait_settled("1P2D")
    service = place.of(OWNER_KIND)["qwen"]
    assert set(place.of("Pod")) == {"qwen-e0", "qwen-e1", "qwen-e2"}
    assert {"qwen", "qwen-members"} <= set(place.of("Service"))
    assert {"qwen", "qwen-clients"} == set(place.of("NetworkPolicy"))
    assert {"qwen-prefill", "qwen-decode"} == set(place.of("PodDisruptionBudget")) == set(place.of("DisaggPool"))
    pods = place.of("Pod")
    await place.wait(lambda: sum(label(pod, ROUTER) == "true" for pod in pods.values()) == 2, "both decode pods route")
    assert service["status"]["url"] == f"http://qwen.{place.namespace}.svc.cluster.local:10001"
    assert len(service["status"]["fingerprints"]) == 1
    owners = [each["metadata"]["ownerReferences"][0] for kind in ("Pod", "Secret", "DisaggPool")
              for each in place.of(kind).values() if label(each, SERVICE)]
    assert not [each for kind in ("Service", "NetworkPolicy") for each in place.of(kind).values()
                if each["metadata"].get("ownerReferences")], "these outlive the last pod"
    assert {(owner["uid"], owner["controller"], owner.get("blockOwnerDeletion", False)) for owner in owners} == {
        (service["metadata"]["uid"], True, False)}
    pool = place.of("DisaggPool")
    await place.wait(lambda: (pool["qwen-decode"].get("status") or {}).get("readyReplicas") == 2, "pool status")
    assert pool["qwen-decode"]["spec"] == {"service": "qwen", "role": "decode", "replicas": 2}
    path = f"/apis/xpyd.dev/v1beta1/namespaces/{place.namespace}/disaggpools/qwen-decode/scale"
    scale = await place.kube.request("GET", path)
    assert scale["status"]["replicas"] == 2
    assert scale["status"]["selector"] == "xpyd.dev/role=decode,xpyd.dev/service=qwen"

    await place.wait_quiet(3.5)
    assert place.condition("Degraded")["status"] == "False"
    assert place.condition("Valid")["status"] == "True"


async def test_what_is_edited_or_deleted_by_hand_is_put_back(place: Place) -> None:
    await place.apply()
    await place.wait_settled("1P2D")
    uid = place.of("Pod")["qwen-e1"]["metadata"]["uid"]
    wrong = {"spec": {"ports": [{"name": "http", "port": 10001, "targetPort": 9, "protocol": "TCP"}]}}
    await place.kube.merge("Service", place.namespace, "qwen", wrong)
    await place.kube.delete("PodDisruptionBudget", place.namespace, "qwen-decode")
    await place.kube.delete("Pod", place.namespace, "qwen-e1")
    services = place.of("Service")
    await place.wait(lambda: services["qwen"]["spec"]["ports"][0]["targetPort"] == 10001, "the Service is put back")
    await place.wait(lambda: "qwen-decode" in place.of("PodDisruptionBudget"), "the budget is back")
    await place.wait(lambda: len(place.ready()) == 3 and all(
        pod["metadata"]["uid"] != uid for pod in place.of("Pod").values()), "the pod is made again")
    await place.wait_settled("1P2D")


async def test_a_pod_that_loses_our_label_gets_it_back(place: Place) -> None:
    await place.apply()
    await place.wait_settled("1P2D")
    uid = place.of("Pod")["qwen-e2"]["metadata"]["uid"]
    await place.kube.merge("Pod", place.namespace, "qwen-e2", {"metadata": {"labels": {SERVICE: None}}})
    await place.wait(lambda: label(place.of("Pod")["qwen-e2"], SERVICE) == "qwen", "the label is back")
    assert place.of("Pod")["qwen-e2"]["metadata"]["uid"] == uid
    await place.wait_settled("1P2D")


async def test_the_key_stays_the_same_when_its_secret_is_deleted(place: Place) -> None:
    await place.apply()
    await place.wait_settled("1P2D")
    name = key_secret_of(place.of("Pod")["qwen-e0"])
    secret = place.of("Secret")[name]
    assert secret["immutable"] is True
    key = base64.b64decode(secret["data"]["key"]).decode()
    assert len(bytes.fromhex(key)) == 32
    await place.kube.delete("Secret", place.namespace, name)
    await place.wait(lambda: name not in place.of("Secret"), "it is gone")
    await asyncio.sleep(10.5)  # it is looked at at most so often before pods are made
    await place.kube.delete("Pod", place.namespace, "qwen-e1")
    await place.wait(lambda: name in place.of("Secret"), "it is made again")
    assert place.of("Secret")[name]["data"] == secret["data"]
    await place.wait_settled("1P2D")
    said = str([place.of(OWNER_KIND), place.of("Event"), place.of("Pod")])
    assert key not in said


async def test_pools_scale_or_mirror(place: Place) -> None:
    await place.apply(decode={"scaling": {"min": 1, "max": 3}})
    await place.wait_settled("1P1D")
    scale = {"spec": {"replicas": 3}}
    path = f"/apis/xpyd.dev/v1beta1/namespaces/{place.namespace}/disaggpools"
    content = "application/merge-patch+json"
    await place.kube.request("PATCH", f"{path}/qwen-decode/scale", scale, content=content)
    await place.wait_settled("1P3D")
    await place.kube.request("PATCH", f"{path}/qwen-prefill/scale", scale, content=content)
    await place.wait(lambda: place.events("PoolScaledBack"), "an event says that it was put back")
    pools = place.of("DisaggPool")  # of a watch of its own, which may be behind
    await place.wait(lambda: pools["qwen-prefill"]["spec"]["replicas"] == 1, "it was put back")
    assert place.events("PoolScaledBack")[0]["involvedObject"]["name"] == "qwen-prefill"
    await place.kube.request("PATCH", f"{path}/qwen-decode/scale", {"spec": {"replicas": 9}}, content=content)
    await place.wait(lambda: is_true(place.of("DisaggPool")["qwen-decode"], "Limited"), "the bound is said")
    assert len(place.ready("decode")) == 3
    await place.kube.request("PATCH", f"{path}/qwen-decode/scale", {"spec": {"replicas": 1}}, content=content)
    await place.wait_settled("1P1D")
    await place.apply(prefill=2, decode={"scaling": {"min": 1, "max": 3}})
    await place.wait_settled("2P1D")
    await place.wait(lambda: pools["qwen-prefill"]["spec"]["replicas"] == 2, "the pool follows")
    assert len(place.events("PoolScaledBack")) == 1


async def test_names_that_others_have_are_left_alone(place: Place) -> None:
    pod = {"metadata": {"name": "qwen-e1"}, "spec": {"containers": [{"name": "x", "image": "other"}]}}
    service = {"metadata": {"name": "qwen"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "other"}}}
    await place.kube.create("Pod", pod, place.namespace)
    theirs = await place.kube.create("Service", service, place.namespace)
    await place.apply()
    await place.wait(lambda: "Service qwen is" in place.condition("Degraded").get("message", ""), "the condition names it")
    await place.wait(lambda: len(place.ready()) == 3, "engines run under other names")
    assert "qwen-e1" not in place.ready()
    assert place.of("Service")["qwen"]["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert place.of("Service")["qwen"]["spec"]["selector"] == {"app": "other"}
    await place.wait_quiet(2.0, most=2)


async def test_a_template_that_is_refused_changes_nothing(place: Place) -> None:
    await place.apply()
    await place.wait_settled("1P2D")
    pods = {name: pod["metadata"]["uid"] for name, pod in place.of("Pod").items()}
    broken = {"spec": {"containers": [{"name": "extra", "image": ""}]}}
    await place.apply(decode={"replicas": 2, "template": broken})
    await place.wait(lambda: place.condition("Valid").get("reason") == "TemplateRejected", "the fault is said")
    assert "image" in place.condition("Valid")["message"]
    await asyncio.sleep(1.5)
    assert {name: pod["metadata"]["uid"] for name, pod in place.of("Pod").items()} == pods
    await place.apply(decode=1)
    await place.wait_settled("1P1D")
    assert place.condition("Valid")["status"] == "True"


async def test_pod_security_speaks_before_a_pod_is_made(place: Place) -> None:
    enforce = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await place.kube.merge("Namespace", "", place.namespace, enforce)
    loose = {"hostNetwork": True, "containers": [{"name": "c", "image": "i"}]}
    await place.kube.wait_refused(place.namespace, loose, "violates PodSecurity")
    await place.apply(decode={"replicas": 1, "template": {"spec": {"hostNetwork": True}}})
    await place.wait(lambda: place.condition("Valid").get("status") == "False", "the fault is said")
    assert "PodSecurity" in place.condition("Valid")["message"] or "hostNetwork" in place.condition("Valid")["message"]
    assert place.of("Pod") == {}
    await place.apply(decode=1)
    await place.wait_settled("1P1D")


async def test_what_cannot_be_done_is_refused_and_the_last_document_goes_on(place: Place) -> None:
    wrong = {"ports": {"http": 8000}}  # the engine has it
    await place.apply(router=wrong)
    await place.wait(lambda: place.condition("Valid").get("reason") == "Unsupported", "the fault is said")
    assert "spec.router.ports.http" in place.condition("Valid")["message"]
    assert place.condition("Ready")["status"] == "False"
    assert place.of("Pod") == {}
    await place.apply()
    await place.wait_settled("1P2D")
    await place.apply(decode=3, router=wrong)
    await place.wait(lambda: place.condition("Valid").get("reason") == "Unsupported", "the fault is said")
    await asyncio.sleep(1.0)
    assert len(place.ready()) == 3
    assert place.condition("Ready")["status"] == "True"


async def test_routers_of_their_own(place: Place) -> None:
    await place.apply(router={"placement": "deployment", "replicas": 2})
    await place.wait(lambda: "qwen-router" in place.of("Deployment"), "the Deployment")
    await place.wait(lambda: len(place.of("Pod")) == 5, "its pods and the engines")
    await place.wait_settled("1P2D")
    assert not any(label(pod, ROUTER) == "true" for pod in place.of("Pod").values() if label(pod, ROLE))
    assert place.of("PodDisruptionBudget")["qwen-router"]["spec"]["minAvailable"] == 1
    await place.wait_quiet(2.5)
    await place.apply(router={"placement": "sidecar"})
    await place.wait(lambda: "qwen-router" not in place.of("Deployment"), "the Deployment goes")
    await place.wait(lambda: "qwen-router" not in place.of("PodDisruptionBudget"), "its budget goes")
    await place.wait(lambda: sum(label(pod, ROUTER) == "true" for pod in place.of("Pod").values()) == 2, "decode routes")


async def test_crashes_and_their_last_words_are_told(place: Place) -> None:
    place.agent.script = lambda pod: Script(trouble="crash", words="RuntimeError: no luck", restart_s=0.2)
    await place.apply(prefill=0, decode=1)
    await place.wait(lambda: "RuntimeError: no luck" in place.condition("Degraded").get("message", ""), "the cause is said")
    assert place.condition("Ready")["status"] == "False"
    place.agent.script = lambda pod: Script()
    await place.wait_settled("0P1D")


async def test_a_quota_is_waited_for(place: Place) -> None:
    path = f"/api/v1/namespaces/{place.namespace}/resourcequotas"
    await place.kube.request("POST", path, {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"} | NO_NIC}})
    await place.kube.wait_refused(place.namespace, WITH_NIC, "exceeded quota: small")
    await place.apply()
    await place.wait(lambda: "exceeded quota" in str(place.condition("Progressing")), "the wait is said")
    assert len(place.of("Pod")) <= 2
    await place.kube.request("DELETE", f"{path}/small")
    await place.wait_settled("1P2D")


async def test_a_deleted_service_is_left_to_the_garbage_collector(place: Place) -> None:
    await place.apply()
    await place.wait_settled("1P2D")
    await place.kube.delete(OWNER_KIND, place.namespace, "qwen")
    await place.wait(lambda: not place.of("Pod") and set(place.of("Secret")) == {"xpyd-master"}
                     and not place.of("DisaggPool"),
                     "all is gone")
    await place.wait(lambda: place.services._services == {}, "nobody looks after it")
    await place.apply(decode=1)
    await place.wait_settled("1P1D")


async def test_a_service_that_ends_gets_no_writes(place: Place) -> None:
    await place.apply()
    await place.wait_settled("1P2D")
    await place.kube.merge(OWNER_KIND, place.namespace, "qwen", {"metadata": {"finalizers": ["example.com/hold"]}})
    await place.kube.delete(OWNER_KIND, place.namespace, "qwen")
    await place.wait(lambda: place.of(OWNER_KIND)["qwen"]["metadata"].get("deletionTimestamp"), "it ends")
    await place.wait_quiet(0.5)  # what had begun before
    before = len(place.asked)
    await place.kube.delete("Pod", place.namespace, "qwen-e1")
    await asyncio.sleep(2.0)
    assert place.asked[before:] == []
    assert "qwen-e1" not in place.ready()
    await place.kube.merge(OWNER_KIND, place.namespace, "qwen", {"metadata": {"finalizers": []}})


async def test_requests_tell_conflicts_from_absence(place: Place) -> None:
    body: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"},
                    "spec": {"containers": [{"name": "x", "image": "x"}]}}
    await place.api.create("Pod", place.namespace, body)
    with pytest.raises(ApiError) as there:
        await place.api.create("Pod", place.namespace, body)
    assert (there.value.conflict, there.value.reason) == (True, "AlreadyExists")
    with pytest.raises(ApiError) as other:
        await place.api.delete("Pod", place.namespace, "one", "00000000-0000-0000-0000-000000000000")
    assert other.value.conflict
    with pytest.raises(ApiError) as patched:
        await place.api.patch("Pod", place.namespace, "one", {"metadata": {"uid": "other", "labels": {"a": "b"}}})
    assert patched.value.conflict
    with pytest.raises(ApiError) as missing:
        await place.api.get("Pod", place.namespace, "two")
    assert missing.value.missing
    dry = await place.api.create("Pod", place.namespace, body | {"metadata": {"name": "dry"}}, dry_run=True)
    assert dry["metadata"]["name"] == "dry"
    assert set(place.of("Pod")) == {"one"}
