"""What a kubelet would write into the status of a pod, from a few facts about its containers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from kube_client import Object

MAIN, ROUTER, INSTALL = "main", "router", "xpyd-install"
Stage = Literal["pending", "pulling", "running", "ready", "crashed"]


@dataclass(frozen=True)
class Exit:
    """How the container ``main`` ended last."""

    code: int
    reason: str
    message: str
    at: str


@dataclass
class Facts:
    """Of one pod."""

    stage: Stage = "pending"
    unschedulable: str = ""
    ago_s: float = 0.0
    """So long ago the scheduler began to say so."""
    pull_error: str = ""
    pulls: str = MAIN
    """The container of an engine's pod that ``pull_error`` is about."""
    restarts: int = 0
    exit: Exit | None = None
    started: str = ""
    sidecar_ready: bool = True
    ip: str = ""
    away: bool = False
    """Its node does not answer."""
    began: bool = False
    """Its engine was ready since the container was started."""


def now_text(ago_s: float = 0.0) -> str:
    """The time as Kubernetes writes it."""
    return (datetime.now(UTC) - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def status_of(pod: Object, facts: Facts, before: Object | None) -> Object:
    """The whole status; ``before`` is the one written last, whose times of transition stay where nothing changed."""
    if facts.away and before is not None:
        return _of_lost_node(before)
    spec = pod["spec"]
    bound = not facts.unschedulable and bool(facts.ip)
    alive = facts.stage in ("running", "ready", "crashed")
    engine_ready = facts.stage == "ready"
    everything_ready = engine_ready and facts.sidecar_ready
    reason = "" if everything_ready else "ContainersNotReady"
    if facts.unschedulable:
        conditions = [_condition("PodScheduled", False, "Unschedulable", facts.unschedulable)]
    else:
        conditions = [
            _condition("PodScheduled", bound),
            _condition("Initialized", alive, "" if alive else "ContainersNotInitialized"),
            _condition("ContainersReady", everything_ready, reason),
            _condition("Ready", everything_ready, reason),
        ]
    for each in conditions:
        old = next((o for o in (before or {}).get("conditions", ()) if o["type"] == each["type"]), None)
        same = old is not None and old["status"] == each["status"]
        each["lastTransitionTime"] = old["lastTransitionTime"] if same and old is not None else now_text(facts.ago_s)
    status: Object = {"phase": "Running" if alive else "Pending", "conditions": conditions}
    if not bound:
        return status
    status |= {"hostIP": "127.0.0.1", "hostIPs": [{"ip": "127.0.0.1"}], "startTime": facts.started}
    if alive:
        status |= {"podIP": facts.ip, "podIPs": [{"ip": facts.ip}]}
    status["initContainerStatuses"] = [_beside(container, alive, facts) for container in spec.get("initContainers", ())]
    status["containerStatuses"] = [
        _main(each, facts) if each["name"] == MAIN else _beside(each | {"restartPolicy": "Always"}, alive, facts)
        for each in spec["containers"]
    ]
    return status


def _of_lost_node(before: Object) -> Object:
    """What Kubernetes makes of a status when the kubelet says nothing more: a pod that was ready is not."""
    conditions = [each | {"status": "False", "lastTransitionTime": now_text()}
                  if each["type"] == "Ready" and each["status"] == "True" else each for each in before["conditions"]]
    return before | {"conditions": conditions}


def _condition(kind: str, holds: bool, reason: str = "", message: str = "") -> Object:
    words = {key: value for key, value in (("reason", reason), ("message", message)) if value}
    return {"type": kind, "status": "True" if holds else "False", **words}


def _container(container: Object, *, ready: bool, started: bool, restarts: int, state: Object) -> Object:
    return {"name": container["name"], "image": container.get("image", ""), "imageID": "", "ready": ready,
            "started": started, "restartCount": restarts, "state": state, "lastState": {}}


def _beside(container: Object, alive: bool, facts: Facts) -> Object:
    """An init container, a native sidecar, or the router of a pod without an engine."""
    if not alive:
        state: Object = {"waiting": {"reason": "PodInitializing"}}
        if facts.pull_error and container["name"] in (ROUTER, facts.pulls):
            state = {"waiting": {"reason": "ImagePullBackOff", "message": facts.pull_error}}
        return _container(container, ready=False, started=False, restarts=0, state=state)
    if container.get("restartPolicy") == "Always":
        state = {"running": {"startedAt": facts.started}}
        return _container(container, ready=facts.sidecar_ready, started=True, restarts=0, state=state)
    done = {"exitCode": 0, "reason": "Completed", "startedAt": facts.started, "finishedAt": facts.started}
    return _container(container, ready=True, started=False, restarts=0, state={"terminated": done})


def _main(container: Object, facts: Facts) -> Object:
    if facts.stage == "pulling":
        failed = facts.pull_error if facts.pulls == MAIN else ""
        begins = "PodInitializing" if facts.pull_error else "ContainerCreating"
        waiting = {"reason": "ImagePullBackOff", "message": failed} if failed else {"reason": begins}
        state: Object = {"waiting": waiting}
    elif facts.stage == "crashed":
        words = f"back-off 5m0s restarting failed container={MAIN}"
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": words}}
    elif facts.stage == "pending":
        state = {"waiting": {"reason": "PodInitializing"}}
    else:
        state = {"running": {"startedAt": facts.started}}
    ready = facts.stage == "ready"
    result = _container(container, ready=ready, started=ready or facts.began, restarts=facts.restarts, state=state)
    if facts.exit is not None:
        ended: dict[str, Any] = {"exitCode": facts.exit.code, "reason": facts.exit.reason, "message": facts.exit.message,
                                 "startedAt": facts.started, "finishedAt": facts.exit.at}
        result["lastState"] = {"terminated": ended}
    return result
