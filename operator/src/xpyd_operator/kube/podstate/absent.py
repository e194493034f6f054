"""Why a pod is not ready, from what its status says: one value of ``plan.absent``, with what a person can do about it.

Pure: the body of a pod and the time in, a ``Waiting`` or a ``Breakage`` out, and None for a pod that is ready alone. The
first cause in the pod's way up is told, since what comes after it only follows from it:

    ended │ gate → node ▶ init containers → images, configuration → main, sidecar and the others → gates of readiness

Laws
    1. A pod that is not ready always has one.
    2. Once it has a node that answers, and some container is not up, it names one that is not (``containers``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from xpyd_operator.kube.podstate.containers import UNREADY_S, containers, why_not
from xpyd_operator.kube.podstate.podstatus import clock, condition, has_ended, last_line, node_lost, unix
from xpyd_operator.kube.podstate.podwords import words_of
from xpyd_operator.plan.absent import QUEUED, UNPLACED, Absence, Breakage, waits
from xpyd_operator.plan.desired import STARTUP_S
from xpyd_operator.render.labels import INSTANCE_OF

Body = dict[str, Any]
_QUEUE = "kueue.x-k8s.io/queue-name"
_USUAL = {"Ready", "ContainersReady", "Initialized", "PodScheduled", "DisruptionTarget", "PodReadyToStartContainers"}
_MISSING = re.compile(r'(?:persistentvolumeclaim|resourceclaim)\S* "[^"]+" not found', re.IGNORECASE)
"""What the scheduler says where no node, however many come, would do."""


def absent(pod: Body, now: float, limit_s: float = STARTUP_S) -> Absence | None:
    """Why a pod is not ready at ``now`` (unix seconds), where a start has ``limit_s`` seconds; None: it is ready."""
    name = pod["metadata"]["name"]
    status: Body = pod.get("status") or {}
    if has_ended(status):
        return _over(name, status)
    if (condition(status, "Ready") or {}).get("status") == "True":
        return None
    created = unix(pod["metadata"].get("creationTimestamp"))
    gates = (pod.get("spec") or {}).get("schedulingGates") or ()
    if gates:
        return _queued(name, gates, pod["metadata"].get("labels") or {}, now, created)
    placing = condition(status, "PodScheduled")
    if placing is not None and placing.get("status") == "False" and placing.get("reason") != "SchedulingGated":
        return _not_placed(name, placing, pod, now, limit_s)
    if node_lost(status):
        return Breakage("NodeLost", f"the node of pod {name} does not answer", "see kubectl get nodes")
    placed = placing is not None and placing.get("status") == "True"
    found = [each for one in containers(pod, now, limit_s) if (each := why_not(one)) is not None]
    told = bool(status.get("containerStatuses") or status.get("initContainerStatuses"))
    if not placed and not told:
        return waits("Scheduling", f"pod {name} of {clock(created)} waits for the scheduler to look at it", now,
                     since=created, limit_s=limit_s)
    if found:
        return min(found, key=lambda each: each.rank).why
    return _gated(name, status, created, now)


def _over(name: str, status: Body) -> Breakage:
    """``Evicted`` or ``Failed``, by which the planner knows that the pod never runs again."""
    said = status.get("reason") or status.get("phase") or ""
    words = last_line(status.get("message"))
    why = f"{said}: {words}" if words else said
    reason = "Evicted" if said == "Evicted" else "Failed"
    return Breakage(reason, f"pod {name} has ended ({why}) and will be replaced", replaced=True)


def _queued(name: str, gates: Sequence[Body], labels: Body, now: float, created: float) -> Absence:
    """Nobody looks for a node before the gates are gone. Kueue's label names the queue."""
    queue = f", queue {labels[_QUEUE]}" if labels.get(_QUEUE) else ""
    which = ", ".join(gate["name"] for gate in gates)
    advice = "it goes on when whoever set the gate takes it away"
    words = f"pod {name} waits to be admitted (gate {which}{queue}); {advice}"
    return waits(QUEUED, words, now, since=created, limit_s=0.0, place=True)


def _not_placed(name: str, placing: Body, pod: Body, now: float, limit_s: float) -> Absence:
    since, words = unix(placing.get("lastTransitionTime")), last_line(placing.get("message"))
    if _MISSING.search(words):
        return Breakage("VolumeMissing", f"no node can take pod {name}: {words}", "create it, or correct its name")
    if "affinity" in words and (key := _topology(pod)):
        words += f"; engine.topology is {key}: kubectl get nodes -L {key} shows which nodes have that label"
    message = f"no node takes pod {name}: {words}; {words_of(pod).room}"
    return waits(UNPLACED, message, now, since=since, limit_s=limit_s, place=True)


def _topology(pod: Body) -> str:
    """The label of nodes by which the pods of one instance are to be together; empty: none."""
    near = ((pod.get("spec") or {}).get("affinity") or {}).get("podAffinity") or {}
    terms: list[Body] = near.get("requiredDuringSchedulingIgnoredDuringExecution") or []
    ours = [each for each in terms if INSTANCE_OF in str(each.get("labelSelector"))]
    return str(ours[0].get("topologyKey", "")) if ours else ""


def _gated(name: str, status: Body, created: float, now: float) -> Absence:
    """All its containers are up, and it is not called ready: by a gate of somebody else's, or for a moment."""
    ready = condition(status, "Ready") or {}
    since = unix(ready.get("lastTransitionTime")) or created
    gates = [each["type"] for each in status.get("conditions") or ()
             if each.get("status") != "True" and each["type"] not in _USUAL]
    if gates:
        return waits("GateNotReady", f"pod {name} waits for {', '.join(gates)}", now, since=since, limit_s=UNREADY_S)
    words = f"the containers of pod {name} are up, and its node has not called it ready since {clock(since)}"
    return waits("PodNotReady", f"{words}; see kubectl describe pod {name}", now, since=since, limit_s=UNREADY_S)
