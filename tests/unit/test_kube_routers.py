"""Routers in pods of their own: what keeps them away is told as it is of engines, in words that fit where they are."""

from __future__ import annotations

from typing import Any

import pytest

from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.routers.observe import RouterAnswers, front
from xpyd_operator.kube.routers.routers import absent_routers, first_words
from xpyd_operator.plan.absent import Absence

NAME = "qwen-router"
NOW = 1_800_000_000.0
Body = dict[str, Any]
DENIED = "pull access denied"
QUOTA = 'pods "qwen-router-7f-x" is forbidden: failed quota: small: must specify limits.cpu for: router'


def pod(name: str = "a", state: Body | None = None, *, ip: str = "10.0.0.1", ready: str = "False", **metadata: Any) -> Body:
    labels = {"xpyd.dev/service": "qwen", "xpyd.dev/router": "true", "app.kubernetes.io/component": "router"}
    container = {"name": "router", "image": "x:1", "state": state or {"running": {}}, "ready": ready == "True",
                 "started": True, "restartCount": 0}
    return {
        "metadata": {"name": f"{NAME}-{name}", "uid": name, "labels": labels} | metadata,
        "status": {"phase": "Running", "podIP": ip, "containerStatuses": [container],
                   "conditions": [{"type": "Ready", "status": ready}]},
    }


NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff", "message": DENIED}}


def deployment(failure: str = "") -> Body:
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": failure}
    return {"metadata": {"name": NAME}, "status": {"conditions": [condition] if failure else []}}


def seen(*pods: Body, made: Body | None = None) -> tuple[Absence, ...]:
    return absent_routers(NAME, made, [Entry("Pod", each) for each in pods], NOW)


def told(*pods: Body, away: tuple[Absence, ...] | None) -> tuple[str, str]:
    routers: list[Facts] = [facts(each) for each in pods]
    found = front(routers, RouterAnswers(), prefill=True, away=away)
    assert found is not None
    return found.reason, found.message


def test_an_image_that_cannot_be_pulled_is_named() -> None:
    pods = [pod("a", NO_IMAGE), pod("b", NO_IMAGE)]
    away = seen(*pods, made=deployment())
    assert [(each.reason, each.person) for each in away] == [("ImagePull", True)] * 2
    reason, words = told(*pods, away=away)
    assert reason == "RouterNotReady"
    assert words.startswith(f"no router is ready: {NAME}-a, {NAME}-b: x:1 for container router of pod {NAME}-a cannot be")
    assert DENIED in words
    assert "spec.router.template.spec.imagePullSecrets" in words


def test_what_keeps_pods_from_being_made_is_named() -> None:
    away = seen(made=deployment(QUOTA))
    ((reason, message),) = [(each.reason, each.message) for each in away]
    assert reason == "RouterPodsRefused"
    assert QUOTA in message
    assert told(away=away) == ("NoRouter", f"no router runs: {message}")


@pytest.mark.parametrize("made", [None, {"metadata": {"name": NAME}}, deployment()])
def test_while_nothing_is_known_the_words_fit_the_placement(made: Body | None) -> None:
    reason, words = told(away=seen(made=made))
    assert (reason, words) == ("NoRouter", f"no router runs: Deployment {NAME} has made no pod that runs yet")
    assert told(away=None)[1] == "no pod routes yet: the first decode instance that runs becomes the router"


def test_a_pod_that_goes_is_nobodys_trouble() -> None:
    going = pod("a", NO_IMAGE, deletionTimestamp="2026-01-01T00:00:00Z")
    assert [each.reason for each in seen(going, made=deployment())] == ["NoRouter"]


def test_a_pod_that_has_ended_for_good_is_nobodys_trouble() -> None:
    evicted = pod("a")
    evicted["status"] |= {"phase": "Failed", "reason": "Evicted"}
    assert [each.reason for each in seen(evicted, made=deployment())] == ["NoRouter"]


def test_a_router_that_is_up_and_waits_for_engines_is_no_trouble() -> None:
    away = seen(pod("a"), made=deployment())
    assert [(each.reason, each.person, each.ends_soon) for each in away] == [("RouterNotReady", False, True)]
    reason, words = told(pod("a"), away=away)
    assert reason == "RouterNotReady"
    assert words.startswith(f"no router is ready: {NAME}-a: container router of pod {NAME}-a is up, and is ready once")


def test_what_is_said_is_bounded_and_said_once() -> None:
    away = seen(*[pod(f"{number}", NO_IMAGE) for number in range(64)], made=deployment(QUOTA))
    assert first_words(away).count("; check the image") == 1
    assert len(away) == 65
