"""What needs what: the table itself, and the objects that a rendered one needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kube_documents import service

from xpyd_operator.kube.client.cache import KINDS, OWNER_KIND, POLLED
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.dependencies import TABLE, keepers, stage, stages
from xpyd_operator.render.gang import VERSIONS, Gang, InstanceGroups, add_groups
from xpyd_operator.render.keys import unknown
from xpyd_operator.render.needs import Need, lacking, needs
from xpyd_operator.render.objects import policies, router_deployment
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role

SETTINGS = KubeSettings(sidecar_image="sidecar:1")
WIDE = {"decode": {"replicas": 1, "parallelism": {"tensor": 3, "pods": 3, "device": "none"}}}
POLICIES = {"qwen", "qwen-clients"}
FENCED = {Need("Secret", "qwen-key"), Need("NetworkPolicy", "qwen"), Need("NetworkPolicy", "qwen-clients")}


def pods(gang: Gang | None = None, **spec: Any) -> list[dict[str, Any]]:
    made = engine_pods(service(**spec), Role.DECODE, InstanceName("qwen-e1"), Revision("r1"), SETTINGS)
    return list(add_groups(made, InstanceGroups(gang)))


def test_the_table_has_every_kind_and_no_circle() -> None:
    assert set(TABLE) == {*KINDS, *POLLED, "Secret", "PodGroup"} - {OWNER_KIND}
    for kind, row in TABLE.items():
        assert {*row.needs, *row.uses} <= set(TABLE)
        assert stage(kind) > max((stage(each) for each in row.needs if each != kind), default=-1)
    first, *rest = stages(TABLE)
    assert first >= {"Secret", "NetworkPolicy", "Service", "PodGroup"}
    assert [set(each) for each in rest] == [{"Deployment", "Pod", "HTTPRoute"}]


@pytest.mark.parametrize("kind", sorted(kind for kind, row in TABLE.items() if row.lasts))
def test_what_has_no_owner_stays_for_pods_and_for_what_makes_pods(kind: str) -> None:
    assert keepers(kind) - {"HTTPRoute"} == {"Pod", "Deployment"}


def test_policies_have_no_owner_that_the_collector_could_miss() -> None:
    assert TABLE["NetworkPolicy"].lasts
    assert TABLE["Service"].lasts
    assert not TABLE["Pod"].lasts, "else nobody would end them while no operator runs"


def test_a_pod_needs_its_secret_and_all_policies() -> None:
    (pod,) = pods()
    assert set(needs(pod, POLICIES)) == FENCED
    assert needs(pod, ()) == (Need("Secret", "qwen-key"),), "where the document wants no policies"


@pytest.mark.parametrize("kind", list(VERSIONS))
def test_members_need_their_group_and_the_leader_all_others(kind: Any) -> None:
    leader, *others = pods(Gang(kind, VERSIONS[kind][0]), **WIDE)
    for pod in others:
        assert set(needs(pod, POLICIES)) == FENCED | {Need("PodGroup", "qwen-e1", kind)}
    assert set(needs(leader, POLICIES)) == {
        *FENCED, Need("PodGroup", "qwen-e1", kind), Need("Pod", "qwen-e1-1"), Need("Pod", "qwen-e1-2")}


def test_without_a_gang_no_group_is_needed() -> None:
    assert not {need.kind for pod in pods(**WIDE) for need in needs(pod, POLICIES)} & {"PodGroup"}


def test_a_deployment_needs_what_its_pods_need() -> None:
    apart = service(router={"placement": "deployment"})
    deployment = router_deployment(apart, SETTINGS, unknown("qwen"))
    assert set(needs(deployment, POLICIES)) == FENCED


def test_what_lacks_is_named() -> None:
    why: dict[str, str] = {"qwen-clients": "is somebody else's"}
    ask: Callable[[Need], str] = lambda need: why.get(need.name, "")  # noqa: E731
    (pod,) = pods()
    assert lacking(pod, POLICIES, ask) == "NetworkPolicy qwen-clients is somebody else's"
    why.clear()
    assert lacking(pod, POLICIES, ask) == ""


def test_policies_are_those_of_the_document() -> None:
    assert {each["metadata"]["name"] for each in policies(service(), SETTINGS)} == POLICIES
    assert policies(service(networkPolicy={"enabled": False}), SETTINGS) == ()
