"""Pods that could not begin with the image of another release are made anew."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from kube_documents import UID, pod

from xpyd_operator.kube.cache import Entry
from xpyd_operator.kube.observe import Told, instances
from xpyd_operator.kube.outdated import OLD_S, outdated
from xpyd_operator.plan.actions import Remove
from xpyd_operator.plan.desired import Desired, Revision, RoleTarget
from xpyd_operator.plan.observed import OUTDATED, Instance, Observed, Phase
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.ids import ServiceName

NOW = 1_800_000_000.0
OLD, NEW = "registry/xpyd-sidecar:0.1", "registry/xpyd-sidecar:0.2"
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
LOOPS = {"waiting": {"reason": "CrashLoopBackOff"}}
WAITS = {"waiting": {"reason": "PodInitializing"}}
Body = dict[str, Any]


def text(ago_s: float) -> str:
    return datetime.fromtimestamp(NOW - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def made(image: str, state: Body, *, age_s: float = OLD_S + 1, container: str = "xpyd-install", main: Body = WAITS,
         last: Body | None = None) -> Entry:
    """A pod whose containers of ours have ``image``."""
    body = pod(3, creationTimestamp=text(age_s), status={
        "phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}],
        "initContainerStatuses": [{"name": container, "image": image, "state": state, "restartCount": 2,
                                   "lastState": {"terminated": {"exitCode": 1}} if state == LOOPS else {}}],
        "containerStatuses": [{"name": "main", "state": main, "lastState": last or {}, "restartCount": 0}]})
    body["spec"]["initContainers"] = [{"name": container, "image": image}]
    return Entry("Pod", body)


def one(entry: Entry) -> Instance:
    (found,) = outdated(instances(ServiceName("qwen"), UID, [entry], Told(), NOW), [entry], NEW, NOW)
    return found


@pytest.mark.parametrize(("container", "state"), [
    ("xpyd-install", PULL), ("sidecar", PULL), ("sidecar", LOOPS), ("xpyd-install", {"terminated": {"exitCode": 1}}),
    ("xpyd-install", {"waiting": {"reason": "InvalidImageName"}})])
def test_one_that_cannot_begin_with_the_image_of_another_release_is_made_anew(container: str, state: Body) -> None:
    found = one(made(OLD, state, container=container))
    assert found.phase is Phase.CRASHED
    assert found.problem is not None
    assert found.problem.reason == OUTDATED
    assert OLD in found.problem.message
    assert NEW in found.problem.message
    target = RoleTarget(1, Revision("r1"))
    desired = Desired(service=ServiceName("qwen"), prefill=RoleTarget(0, Revision("r1")), decode=target, router=None)
    plan = step(desired, Observed((found,)), NOW)
    assert [each for each in plan.actions if isinstance(each, Remove)] == [
        Remove(found.name, f"it will never run again: {OUTDATED}")]


@pytest.mark.parametrize("entry", [
    made(NEW, PULL),
    made(OLD, WAITS),
    made(OLD, {"running": {"startedAt": text(20)}}, container="sidecar"),
    made(OLD, PULL, age_s=OLD_S - 1),
    made(OLD, PULL, container="copy"),
    made(OLD, LOOPS, container="sidecar", main={"running": {"startedAt": text(20)}}),
    made(OLD, LOOPS, container="sidecar", last={"terminated": {"exitCode": 1}}),
], ids=["the image of now", "nothing is wrong", "it runs", "young", "a container of the user", "its engine runs", "it ran"])
def test_all_others_are_left_alone(entry: Entry) -> None:
    before = instances(ServiceName("qwen"), UID, [entry], Told(), NOW)
    assert outdated(before, [entry], NEW, NOW) == before
