"""What schedulers, and Kueue, are told of the pods that are one instance."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from render_service import service

from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render import labels
from xpyd_operator.render.gang import VERSIONS, Gang, InstanceGroups, add_groups, joined_by, pod_group, queued_as
from xpyd_operator.render.pod import engine_pods, pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role

NAME = InstanceName("qwen-e3")
SETTINGS = KubeSettings(sidecar_image="xpyd-sidecar:1")
QUEUE = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}}
GANGS = [Gang(kind, versions[0]) for kind, versions in VERSIONS.items()]
Body = dict[str, Any]


def make(count: int = 2, **role: Any) -> DisaggService:
    made = service(Target.KUBERNETES, decode={"parallelism": {"tensor": 2 * count, "pods": count}} | role)
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, namespace="models", uid="u-1"))


def plain(count: int = 2, **role: Any) -> tuple[Body, ...]:
    return engine_pods(make(count, **role), Role.DECODE, NAME, Revision("abc"), SETTINGS)


def said(before: Body, after: Body) -> Body:
    """What one pod says and the other does not, by its path."""
    found: Body = {}
    for part, more in (("labels", after["metadata"]["labels"]), ("annotations", after["metadata"]["annotations"]),
                       ("spec", after["spec"])):
        old = before["spec"] if part == "spec" else before["metadata"][part]
        found |= {f"{part}.{key}": value for key, value in more.items() if old.get(key) != value}
        assert not old.keys() - more.keys()
    return found


@pytest.mark.parametrize(("gang", "spec", "pod"), [
    (Gang("kubernetes", "scheduling.k8s.io/v1beta1"),
     {"schedulingPolicy": {"gang": {"minCount": 3}}, "disruptionMode": {"all": {}}},
     {"spec.schedulingGroup": {"podGroupName": NAME}}),
    (Gang("kubernetes", "scheduling.k8s.io/v1alpha3"),
     {"schedulingPolicy": {"gang": {"minCount": 3}}, "disruptionMode": {"all": {}}},
     {"spec.schedulingGroup": {"podGroupName": NAME}}),
    (Gang("kubernetes", "scheduling.k8s.io/v1alpha2"),  # 1.36 has no disruptionMode of this form
     {"schedulingPolicy": {"gang": {"minCount": 3}}},
     {"spec.schedulingGroup": {"podGroupName": NAME}}),
    (Gang("volcano", "scheduling.volcano.sh/v1beta1"),
     {"minMember": 3},
     {"annotations.scheduling.k8s.io/group-name": NAME, "spec.schedulerName": "volcano"}),
    (Gang("coscheduling", "scheduling.x-k8s.io/v1alpha1"),
     {"minMember": 3, "scheduleTimeoutSeconds": 60},
     {"labels.scheduling.x-k8s.io/pod-group": NAME}),
], ids=lambda each: each.version if isinstance(each, Gang) else "")
def test_each_scheduler_is_told_in_its_own_words(gang: Gang, spec: Body, pod: Body) -> None:
    before = plain(3)
    after = add_groups(before, InstanceGroups(gang, "unused"))
    assert [said(*pair) for pair in zip(before, after, strict=True)] == [pod, pod, pod]
    assert {joined_by(each) for each in after} == {gang.kind}
    made = pod_group(gang, make(3), NAME, 3)
    assert made["spec"] == spec
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == (gang.version, "PodGroup", NAME)
    assert made["metadata"]["namespace"] == "models"
    assert made["metadata"]["labels"][labels.SERVICE] == make().name
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("DisaggService", "u-1", True)


@pytest.mark.parametrize("gang", GANGS, ids=lambda gang: gang.kind)
def test_an_instance_that_is_one_pod_needs_none(gang: Gang) -> None:
    pods = plain(1, template=QUEUE)
    assert add_groups(pods, InstanceGroups(gang, "qwen-e3-f00")) == pods
    assert (joined_by(pods[0]), queued_as(pods[0])) == (None, "")


@pytest.mark.parametrize("gang", GANGS, ids=lambda gang: gang.kind)
@pytest.mark.parametrize("template", [
    {"spec": {"schedulingGroup": {"podGroupName": "mine"}}},
    {"metadata": {"annotations": {"scheduling.k8s.io/group-name": "mine"}}},
    {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "mine"}}},
], ids=["kubernetes", "volcano", "coscheduling"])
def test_what_a_template_says_of_groups_stays(gang: Gang, template: Body) -> None:
    pods = plain(template=template)
    assert add_groups(pods, InstanceGroups(gang)) == pods
    assert {joined_by(each) for each in pods} == {None}


def test_the_scheduler_that_a_template_names_stays() -> None:
    pods = add_groups(plain(template={"spec": {"schedulerName": "mine"}}), InstanceGroups(GANGS[1]))
    assert {each["spec"]["schedulerName"] for each in pods} == {"mine"}
    assert {joined_by(each) for each in pods} == {"volcano"}


def test_kueue_admits_the_pods_of_an_instance_together_and_lets_them_go_together() -> None:
    before = plain(template=QUEUE)
    after = add_groups(before, InstanceGroups(queued="qwen-e3-f00"))
    assert [said(*pair) for pair in zip(before, after, strict=True)] == 2 * [{
        "labels.kueue.x-k8s.io/pod-group-name": "qwen-e3-f00",
        "annotations.kueue.x-k8s.io/pod-group-total-count": "2",
        "annotations.kueue.x-k8s.io/retriable-in-group": "false",
    }]
    assert {queued_as(each) for each in after} == {"qwen-e3-f00"}


def test_without_a_queue_and_in_a_group_of_the_templates_own_nothing_is_said_to_kueue() -> None:
    mine = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "a", "kueue.x-k8s.io/pod-group-name": "mine"}}}
    for template in ({}, mine):
        pods = plain(template=template)
        assert add_groups(pods, InstanceGroups(queued="qwen-e3-f00")) == pods


def test_nothing_of_it_is_in_a_revision_so_that_another_scheduler_replaces_no_pod() -> None:
    """It is made from the document, in which nothing of this stands."""
    revision = pod_revision(make(), Role.DECODE, "")
    marks = {each["metadata"]["labels"][labels.REVISION]
             for gang in GANGS for each in add_groups(plain(), InstanceGroups(gang))}
    assert marks == {"abc"}
    assert revision == pod_revision(make(), Role.DECODE, "")
