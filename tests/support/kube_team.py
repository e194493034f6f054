"""A namespace of its own for a test: what a person does there, what a watch shows of it, and an operator.

    await team.apply(team.document(decode=3))
    await team.wait_condition("Ready")
    assert team.shape() == "1P3D"
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kube_client import Kube, Mirror, Object
from kube_cluster import Request, requests
from kube_operator import OperatorProcess
from kube_watched import DEADLINE_S, POLL_S, Watched, is_ready, label, wait_account
from node_agent import REVISION, ROLE, ROSTER, ROUTER, SERVICE, NodeAgent
from testcluster.light import LightCluster

OPERATOR_NAMESPACE = "xpyd-system"
OPERATOR = "xpyd-operator"
USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{OPERATOR}"
ROUNDS = "xpyd_operator_reconcile_seconds_count"
"""How often an operator has looked at a service."""
CHILDREN = ("Service", "Secret", "NetworkPolicy", "PodDisruptionBudget", "DisaggPool", "Deployment")
LASTING = ("Service", "NetworkPolicy")
"""What has no owner, and goes after the last pod."""
WATCHED = ("DisaggService", "DisaggPool", "Pod", "DaemonSet", "Job", *(kind for kind in CHILDREN if kind != "DisaggPool"))


@dataclass
class Team(Watched):
    """See the module."""

    cluster: LightCluster
    kube: Kube
    namespace: str
    agent: NodeAgent
    mirrors: dict[str, Mirror]
    operator: OperatorProcess

    # What a person does

    def document(self, name: str = "qwen", prefill: int | Object = 1, decode: int | Object = 1, **spec: Any) -> Object:
        """A DisaggService. ``prefill`` and ``decode``: a count, or the section."""
        sections = {role: {"replicas": each} if isinstance(each, int) else each
                    for role, each in (("prefill", prefill), ("decode", decode))}
        base: Object = {"model": {"source": "org/tiny"}, "engine": {"image": "engine:1"}, "drain": {"timeout": "10s"}}
        # Pods come and go by what a test asks for; switches of roles are for those that mean them.
        spec["rollout"] = {"switchWindow": "0s"} | spec.get("rollout", {})
        return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": name},
                "spec": base | sections | spec}

    async def apply(self, document: Object) -> Object:
        """As ``kubectl apply --server-side``."""
        return await self.kube.apply("DisaggService", self.namespace, document)

    async def delete(self, name: str = "qwen", propagation: str = "Background") -> None:
        """As ``kubectl delete``, without waiting; ``propagation``: Background, Foreground or Orphan."""
        await self.kube.delete("DisaggService", self.namespace, name, propagation=propagation)

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """kubectl in this namespace."""
        return await asyncio.to_thread(self.cluster.kubectl, "-n", self.namespace, *arguments, stdin=stdin)

    # What is seen

    def pods(self, name: str = "qwen", role: str = "", revision: str = "") -> list[Object]:
        """Engine pods of a service, by name; also those that end."""
        found = [pod for pod in self.of("Pod").values() if label(pod, SERVICE) == name and label(pod, ROLE)
                 and role in ("", label(pod, ROLE)) and revision in ("", label(pod, REVISION))]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def ready(self, name: str = "qwen", role: str = "", revision: str = "") -> list[str]:
        """Names of engine pods that are ready and do not end."""
        return [pod["metadata"]["name"] for pod in self.pods(name, role, revision) if is_ready(pod)]

    def shape(self, name: str = "qwen") -> str:
        """What is ready, as the pods say: ``1P3D``."""
        return f"{len(self.ready(name, 'prefill'))}P{len(self.ready(name, 'decode'))}D"

    def routers(self, name: str = "qwen") -> list[str]:
        """Names of the pods that clients reach."""
        return sorted(pod["metadata"]["name"] for pod in self.of("Pod").values()
                      if label(pod, SERVICE) == name and label(pod, ROUTER) == "true")

    def status(self, name: str = "qwen") -> Object:
        return self.of("DisaggService").get(name, {}).get("status") or {}

    def condition(self, kind: str, name: str = "qwen") -> Object:
        """A condition; its fields are empty where nobody said it yet."""
        found = next((each for each in self.status(name).get("conditions", ()) if each["type"] == kind), None)
        return found or {"type": kind, "status": "", "reason": "", "message": ""}

    def current(self, name: str = "qwen") -> bool:
        """The status is about the spec as it is."""
        service = self.of("DisaggService").get(name)
        return service is not None and self.status(name).get("observedGeneration") == service["metadata"]["generation"]

    def settled(self, shape: str, name: str = "qwen") -> bool:
        """The operator says that everything is as asked for, of the present spec, and the pods agree."""
        said = [self.condition(kind, name)["status"] for kind in ("Ready", "Progressing", "Degraded")]
        return (self.current(name) and said == ["True", "False", "False"] and self.shape(name) == shape
                and len(self.pods(name)) == len(self.ready(name)))

    def left(self) -> list[str]:
        """Everything that was made for services, in words."""
        found = [f"{kind}/{name}" for kind in WATCHED for name, each in self.of(kind).items()
                 if kind == "DisaggService" or label(each, SERVICE)]
        return sorted(found)

    def requests(self) -> list[Request]:
        """What operators asked the API server for in this namespace so far."""
        return [each for each in requests(self.cluster, USER) if each.object.namespace == self.namespace]

    # Waiting

    async def wait_settled(self, shape: str, name: str = "qwen", deadline_s: float = DEADLINE_S) -> None:
        await self.wait(lambda: self.settled(shape, name), f"{name} settled as {shape}", deadline_s)

    async def wait_condition(self, kind: str, status: str = "True", name: str = "qwen", *, words: tuple[str, ...] = (),
                             deadline_s: float = DEADLINE_S) -> Object:
        """A condition of the present spec that says all ``words`` in reason or message."""
        there: Object = {}

        def said() -> bool:
            there.update(self.condition(kind, name))
            text = f"{there['reason']}: {there['message']}"
            return self.current(name) and there["status"] == status and all(each in text for each in words)
        await self.wait(said, f"{kind}={status} {' '.join(words)}", deadline_s)
        return there

    async def wait_looked(self, times: int = 2) -> None:
        """Until an operator that was just started has looked so often: what was settled before is no news of it."""
        end = time.monotonic() + DEADLINE_S
        while await self.operator.metric(ROUNDS) < times:
            assert time.monotonic() < end, f"the operator has not looked {times} times\n{self.describe()}"
            await asyncio.sleep(POLL_S)

    async def wait_nothing_left(self, deadline_s: float = DEADLINE_S) -> None:
        await self.wait(lambda: not self.left(), "nothing is left", deadline_s)

    def describe(self) -> str:
        """For a failed test."""
        lines = [f"namespace {self.namespace}"]
        lines += [yaml.safe_dump({"spec": service["spec"], "status": service.get("status")}, sort_keys=False)
                  for service in self.of("DisaggService").values()]
        for name, pod in self.of("Pod").items():
            life = self.agent.lives.get(name)
            ending = " ending" if pod["metadata"].get("deletionTimestamp") else ""
            labels = {key: label(pod, key) for key in (ROLE, REVISION, ROSTER, ROUTER)}
            lines.append(f"pod {name} ready={is_ready(pod)}{ending} {labels} {life.facts if life else ''}")
        lines += [f"{kind}: {', '.join(self.of(kind))}" for kind in CHILDREN]
        lines += [f"event {each['type']} {each['reason']}: {each['message']}" for each in self.of("Event").values()
                  if each.get("reportingComponent") == OPERATOR]
        lines += [f"agent: {each}" for each in self.agent.faults]
        return "\n".join([*lines, "operator's log:", self.operator.tail()])


@contextlib.asynccontextmanager
async def make_team(cluster: LightCluster, namespace: str, operator: OperatorProcess, *,
                    devices: int | None = None) -> AsyncIterator[Team]:
    """A team in a new namespace; everything of it is gone afterwards, or on its way out."""
    async with Kube(cluster.kubeconfig) as kube, contextlib.AsyncExitStack() as stack:
        await kube.create("Namespace", {"metadata": {"name": namespace}})
        try:
            await wait_account(kube, namespace)
            agent = await stack.enter_async_context(NodeAgent(kube, namespace, devices=devices))
            mirrors = {kind: await stack.enter_async_context(Mirror(kube, kind, namespace)) for kind in (*WATCHED, "Event")}
            yield Team(cluster, kube, namespace, agent, mirrors, operator)
        finally:
            await _clear(kube, namespace)


async def _clear(kube: Kube, namespace: str) -> None:
    """Nobody ends these pods any more."""
    for kind in ("DisaggService", "Deployment"):
        for item in await kube.items(kind, namespace):
            await kube.delete(kind, namespace, item["metadata"]["name"])
    for pod in await kube.items("Pod", namespace):
        await kube.delete("Pod", namespace, pod["metadata"]["name"], grace_s=0)
    await kube.delete("Namespace", "", namespace)


def operator_login(cluster: LightCluster) -> Path:
    """Make the operator's user, once; its kubeconfig."""
    if OPERATOR_NAMESPACE not in cluster.kubectl("get", "namespaces", "-o", "name"):
        cluster.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        cluster.kubectl("create", "serviceaccount", OPERATOR, "-n", OPERATOR_NAMESPACE)
        cluster.kubectl("create", "clusterrolebinding", OPERATOR, "--clusterrole=cluster-admin",
                        f"--serviceaccount={OPERATOR_NAMESPACE}:{OPERATOR}")
    return cluster.kubeconfig_for(OPERATOR, OPERATOR_NAMESPACE)
