"""Pods of another release that could not begin, and those that an upgrade leaves without anybody to pair with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from kube_documents import UID, pod

from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.podstate.outdated import OLD_S, mark_outdated
from xpyd_operator.kube.routers.observe import RouterAnswers, instances
from xpyd_operator.plan.actions import Create, Drain, Remove
from xpyd_operator.plan.desired import DesiredService, Revision, RoleTarget
from xpyd_operator.plan.observed import OUTDATED, Instance, ObservedService, Phase
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load

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
    (found,) = mark_outdated(instances(ServiceName("qwen"), UID, [entry], RouterAnswers(), NOW), [entry], NEW, NOW)
    return found


@pytest.mark.parametrize(("container", "state"), [
    ("xpyd-install", PULL), ("sidecar", PULL), ("sidecar", LOOPS), ("xpyd-install", {"terminated": {"exitCode": 1}}),
    ("xpyd-install", {"waiting": {"reason": "InvalidImageName"}})])
def test_one_that_cannot_begin_with_the_image_of_another_release_is_made_anew(container: str, state: Body) -> None:
    found = one(made(OLD, state, container=container))
    assert found.phase is Phase.CRASHED
    assert found.absent is not None
    assert found.absent.reason == OUTDATED
    assert OLD in found.absent.message
    assert NEW in found.absent.message
    target = RoleTarget(1, Revision("r1"))
    desired = DesiredService(service=ServiceName("qwen"), prefill=RoleTarget(0, Revision("r1")), decode=target, router=None)
    plan = step(desired, ObservedService((found,)), NOW)
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
    before = instances(ServiceName("qwen"), UID, [entry], RouterAnswers(), NOW)
    assert mark_outdated(before, [entry], NEW, NOW) == before


def serving(ordinal: int, role: str, image: str) -> Entry:
    body = pod(ordinal, role)
    body["spec"]["initContainers"] = [{"name": "xpyd-install", "image": image}]
    return Entry("Pod", body)


def told(**prints: str) -> RouterAnswers:
    """What a router says of the fingerprints of ``e0``, ``e1`` …"""
    return RouterAnswers(Fleet(ServiceName("qwen"), "r", 9.0, settled=True, instances=tuple(
        FleetInstance(InstanceName(f"qwen-{name}"), Role.PREFILL if name == "e0" else Role.DECODE, 1, State.READY,
                      Incarnation("i"), Fingerprint(found), (), (), "m", Load(), drained=False, in_flight=0, beat_age_s=0.1)
        for name, found in prints.items())))


def test_those_that_cannot_pair_with_a_pod_of_the_new_release_count_as_of_another_revision() -> None:
    """Prefill was made anew since the upgrade; decode serves on, is joined by one of its new kind, and goes then."""
    pods = [serving(0, "prefill", NEW), serving(1, "decode", OLD)]
    seen = instances(ServiceName("qwen"), UID, pods, told(e0="new", e1="old"), NOW)
    found = mark_outdated(seen, pods, NEW, NOW)
    assert [each.revision for each in found] == ["r1", "r1-before"]
    target = RoleTarget(1, Revision("r1"))
    wish = DesiredService(service=ServiceName("qwen"), prefill=target, decode=target, router=None, max_sidecars=8)
    plan = step(wish, ObservedService(found, fleet_known=True), NOW)
    kinds = [(type(each).__name__, each.instance) for each in plan.actions
             if isinstance(each, Create | Drain | Remove)]
    assert kinds == [("Create", "qwen-e2")]
    assert mark_outdated(found[:1], pods, NEW, NOW) == found[:1]


@pytest.mark.parametrize(("images", "prints"), [
    ((OLD, OLD), {"e0": "one", "e1": "other"}),
    ((NEW, OLD), {"e0": "same", "e1": "same"}),
    ((NEW, OLD), {"e1": "old"}),
    ((NEW, OLD), {"e0": "new"}),
    ((NEW, NEW), {"e0": "one", "e1": "other"}),
], ids=["nothing is new", "they pair", "the new one is not known", "the old one is not known", "all are new"])
def test_an_upgrade_alone_changes_no_revision(images: tuple[str, str], prints: dict[str, str]) -> None:
    pods = [serving(0, "prefill", images[0]), serving(1, "decode", images[1])]
    seen = instances(ServiceName("qwen"), UID, pods, told(**prints), NOW)
    assert mark_outdated(seen, pods, NEW, NOW) == seen
