"""Why a pod does not serve, from what its status says: one word for programs, and a sentence with what to do for people.

Pure: the body of a pod and the time in, a ``Problem`` or None out. The first cause in the pod's way up is told, since what
comes after it only follows from it: placed on a node → init containers → images → configuration → main → sidecar. What a
person can do about it depends on what the pod is (``PodWords``): an engine and its sidecar, or a router in its own pod.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from xpyd_operator.plan.backoff import LOOPING
from xpyd_operator.plan.cause import cause
from xpyd_operator.plan.names import member_of
from xpyd_operator.plan.observed import QUEUED, Problem
from xpyd_operator.render.labels import COMPONENT, INSTANCE_OF, MAIN, ROUTERS, SIDECAR

Body = dict[str, Any]
PLACING_S = 60.0
"""A pod without a node is the usual way up for so long (a node may be on its way)."""
UNREADY_S = 60.0
CREATING_S = 300.0
"""Large images take minutes; later than this it is worth looking."""
STUCK_CREATING_S = 900.0
"""And later than this a person must look: kubelet says only in Events that a volume or Secret is missing."""
WORDS_MAX = 500

_QUEUE = "kueue.x-k8s.io/queue-name"


class PodWords(msgspec.Struct, frozen=True):
    """What is said of one kind of pod."""

    what: str
    pull: str
    """Where its pull secrets are written."""
    room: str
    """How it asks for less of a node."""
    memory: str
    """How it gets more memory."""
    start: str
    """What gives it more time to start."""


_ROUTER_MEMORY = "give it more memory (spec.router.resources.limits.memory), or a smaller spec.router.bodyBudget"
_AGENT_MEMORY = "give it more memory (template.spec.initContainers, sidecar: resources.limits.memory)"
ENGINE = PodWords(
    what="engine",
    pull="template.spec.imagePullSecrets of its role",
    room="add nodes or devices, or ask for fewer (resources, replicas)",
    memory="give it more memory (resources.limits.memory), or let it take less",
    start="raise spec.engine.startupTimeout or see why it is slow",
)
ROUTER = PodWords(
    what="router",
    pull="spec.router.template.spec.imagePullSecrets",
    room="add nodes, let it run on more of them (spec.router.template) or ask for less (spec.router.resources)",
    memory=_ROUTER_MEMORY,
    start="see why it is slow",
)
_PULL = {"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError"}
_NEVER_PULL = {"InvalidImageName", "ErrImageNeverPull"}
_CREATE = {"CreateContainerError", "RunContainerError", "PostStartHookError"}
_USUAL = {"Ready", "ContainersReady", "Initialized", "PodScheduled", "DisruptionTarget"}
_SECRET = re.compile(r'secret "[^"]+" not found|couldn\'t find key \S+ in Secret', re.IGNORECASE)


def problem(pod: Body, now: float) -> Problem | None:
    """What is wrong with a pod at ``now`` (unix seconds); None: nothing, or nothing yet."""
    name, said = pod["metadata"]["name"], _words(pod)
    status: Body = pod.get("status") or {}
    if status.get("phase") in ("Failed", "Succeeded"):
        return _over(name, status)
    gates = (pod.get("spec") or {}).get("schedulingGates") or ()
    if gates:
        return _queued(name, gates, pod["metadata"].get("labels") or {})
    placing = condition(status, "PodScheduled")
    if placing is not None and placing.get("reason") == "SchedulingGated":
        return None  # its gates have just gone: the scheduler has not looked yet
    if placing is not None and placing.get("status") == "False":
        return _not_placed(name, placing, said, now, pod)
    for each in status.get("initContainerStatuses") or ():
        if each["name"] != SIDECAR and (found := _init(name, each, said)):
            return found
    containers = {each["name"]: each for each in status.get("containerStatuses") or ()}
    sidecar = next((each for each in status.get("initContainerStatuses") or () if each["name"] == SIDECAR), None)
    for each in (sidecar, *containers.values()):
        if each is not None and (found := _waiting(name, each, said)):
            return found
    if sidecar is not None and (found := _crash(name, sidecar, pod, "SidecarCrash")):
        return found
    main = containers.get(MAIN) or next(iter(containers.values()), None)
    if main is not None and (found := _crash(name, main, pod, "CrashLoop")):
        return found
    return _not_ready(name, said, status, (main, sidecar), now, created=unix(pod["metadata"].get("creationTimestamp")))


def _words(pod: Body) -> PodWords:
    return ROUTER if (pod["metadata"].get("labels") or {}).get(COMPONENT) == ROUTERS else ENGINE


def _memory(pod: Body, container: str) -> str:
    """How a container gets more memory. The sidecar of an engine is also a router where it has ports for clients."""
    if container != SIDECAR:
        return _words(pod).memory
    sidecars = [each for each in (pod.get("spec") or {}).get("initContainers") or () if each["name"] == SIDECAR]
    return _ROUTER_MEMORY if any(each.get("ports") for each in sidecars) else _AGENT_MEMORY


def condition(status: Body, kind: str) -> Body | None:
    """One of the pod's conditions."""
    return next((each for each in status.get("conditions") or () if each.get("type") == kind), None)


def node_lost(status: Body) -> bool:
    """The pod's node does not answer. Kubernetes then calls a pod that was ready not ready, and leaves what the kubelet
    said of its containers; a kubelet says both alike, or names the gate that is not. A pod that was not ready is not
    marked: it is deleted after five minutes.
    """
    ready, containers = (condition(status, kind) or {} for kind in ("Ready", "ContainersReady"))
    marked = ready.get("status") == "False" and containers.get("status") == "True" and not ready.get("reason")
    return marked or status.get("reason") == "NodeLost"


def unix(text: str | None) -> float:
    """A time as Kubernetes writes it, in unix seconds; 0 where there is none."""
    if not text:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def clock(when: float) -> str:
    """A time in words that stay the same from round to round."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def last_line(text: str | None) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:WORDS_MAX] if lines else ""


def _over(name: str, status: Body) -> Problem:
    """``Evicted`` or ``Failed``, by which the planner knows that the pod never runs again."""
    said = status.get("reason") or status.get("phase") or ""
    words = last_line(status.get("message"))
    why = f"{said}: {words}" if words else said
    return Problem("Evicted" if said == "Evicted" else "Failed", f"pod {name} has ended ({why}) and will be replaced")


def _queued(name: str, gates: Sequence[Body], labels: Body) -> Problem:
    """Nobody looks for a node before the gates are gone. Kueue's label names the queue."""
    queue = f", queue {labels[_QUEUE]}" if labels.get(_QUEUE) else ""
    which = ", ".join(gate["name"] for gate in gates)
    advice = "it goes on when whoever set the gate takes it away"
    return Problem(QUEUED, f"pod {name} waits to be admitted (gate {which}{queue}); {advice}", lasting=False)


def _not_placed(name: str, placing: Body, said: PodWords, now: float, pod: Body) -> Problem:
    since = unix(placing.get("lastTransitionTime"))
    words = last_line(placing.get("message"))
    if "affinity" in words and (key := _topology(pod)):
        words += f"; placement.topology is {key}: kubectl get nodes -L {key} shows which nodes have that label"
    return Problem("Unschedulable", f"no node takes pod {name}: {words}; {said.room}", lasting=now - since >= PLACING_S)


def _topology(pod: Body) -> str:
    """The label of nodes by which the pods of one instance are to be together; empty: none."""
    near = ((pod.get("spec") or {}).get("affinity") or {}).get("podAffinity") or {}
    terms: list[Body] = near.get("requiredDuringSchedulingIgnoredDuringExecution") or []
    ours = [each for each in terms if INSTANCE_OF in str(each.get("labelSelector"))]
    return str(ours[0].get("topologyKey", "")) if ours else ""


def _init(name: str, container: Body, said: PodWords) -> Problem | None:
    state: Body = container.get("state") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if found := _waiting(name, container, said):
        return found
    if ended is None or not ended.get("exitCode") or (state.get("terminated") or {}).get("exitCode") == 0:
        return None
    if "running" in state:
        return None
    which = container["name"]
    words = _ended(ended)
    advice = f"see kubectl logs {name} -c {which}"
    lasting = container.get("restartCount", 0) >= LOOPING
    return Problem("InitFailed", f"init container {which} of pod {name} {words}; {advice}", lasting=lasting)


def _waiting(name: str, container: Body, said: PodWords) -> Problem | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, words = waiting.get("reason") or "", last_line(waiting.get("message"))
    which = f"container {container['name']} of pod {name}"
    if reason in _PULL:
        advice = f"check the image's name, its registry and {said.pull}"
        return Problem("ImagePull", f"{container.get('image')} for {which} cannot be pulled: {words or reason}; {advice}",
                       lasting=reason != "ErrImagePull")
    if reason in _NEVER_PULL:
        image = container.get("image")
        return Problem("ImagePull", f"{image} for {which} cannot be used: {words or reason}; correct the image")
    if reason == "CreateContainerConfigError":
        kind = "SecretMissing" if _SECRET.search(words) else "ConfigError"
        advice = "create what is missing in the pod's namespace"
        return Problem(kind, f"{which} cannot be configured: {words or reason}; {advice}")
    if reason in _CREATE:
        return Problem("ContainerError", f"{which} cannot be started: {words or reason}; see kubectl describe pod {name}")
    return None


def _crash(name: str, container: Body, pod: Body, loop: str) -> Problem | None:
    state: Body = container.get("state") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    restarts = container.get("restartCount", 0)
    if ended is None or (("running" in state) and container.get("ready")):
        return None
    which = container["name"]
    times = max(1, restarts)
    how_often = "once" if times == 1 else f"{times} times"
    lasting = times >= LOOPING
    if ended.get("reason") == "OOMKilled":
        words = f"container {which} of pod {name} was killed for memory {how_often}; {_memory(pod, which)}"
        return Problem("OutOfMemory", words, lasting=lasting)
    limit_s = _startup_limit_s(pod, which)
    ran_s = unix(ended.get("finishedAt")) - unix(ended.get("startedAt"))
    if limit_s and ran_s >= limit_s and ended.get("exitCode") in (137, 143):
        said = _words(pod)
        return Problem("StartupTimeout", f"the {said.what} of pod {name} was not up within {limit_s:.0f} s ({how_often}); "
                       f"{said.start}: kubectl logs {name} -c {which} --previous")
    advice = f"see kubectl logs {name} -c {which} --previous"
    words = f"container {which} of pod {name} ended {how_often}, last {_ended(ended)}; {advice}"
    return Problem(loop, words, lasting=lasting)


def _ended(ended: Body) -> str:
    message = ended.get("message") or ""
    words = cause(message.splitlines(), cut=True) or last_line(message)
    reason = ended.get("reason") or ""
    why = f" ({reason})" if reason and reason not in ("Error", "Completed") else ""
    how = f"with signal {ended['signal']}" if ended.get("signal") else f"with exit code {ended.get('exitCode')}"
    return f"{how}{why}{f': {words}' if words else ''}"


def _startup_limit_s(pod: Body, container: str) -> float:
    """Seconds that a container has for its start, by its startup probe; 0 without one."""
    for each in (pod.get("spec") or {}).get("containers") or ():
        probe = each.get("startupProbe")
        if each["name"] == container and probe:
            return float(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))
    return 0.0


def _not_ready(
    name: str, said: PodWords, status: Body, containers: tuple[Body | None, Body | None], now: float, *, created: float
) -> Problem | None:
    main, sidecar = containers
    ready = condition(status, "Ready")
    if ready is not None and ready.get("status") == "True":
        return None
    if node_lost(status):
        return Problem("NodeLost", f"the node of pod {name} does not answer; see kubectl get nodes")
    since = unix(ready.get("lastTransitionTime")) if ready is not None else created
    late = now - since >= UNREADY_S
    state: Body = (main.get("state") or {}) if main is not None else {}
    if main is not None and "running" in state:
        if not main.get("ready"):
            if not main.get("started"):
                return None  # the startup probe sets the limit
            if said is ROUTER:
                return None  # it is not ready either while nobody decodes, and the kubelet ends one that hangs
            if member_of(name)[1] is not None:
                words = f"pod {name} served with the others of its instance and does not since {clock(since)}"
                return Problem("EngineNotReady", f"{words}; see kubectl logs {name} -c {SIDECAR}", lasting=late)
            words = f"the engine of pod {name} was up and does not answer its health check since {clock(since)}"
            return Problem("EngineNotReady", f"{words}; see kubectl logs {name} -c {MAIN}", lasting=late)
        if sidecar is not None and not sidecar.get("ready"):
            words = f"the engine of pod {name} is up, and its router does not know the roster since {clock(since)}"
            return Problem("SidecarNotReady", f"{words}; see kubectl logs {name} -c {SIDECAR}", lasting=late)
        gates = [each["type"] for each in status.get("conditions") or ()
                 if each.get("status") == "False" and each["type"] not in _USUAL]
        return Problem("GateNotReady", f"pod {name} waits for {', '.join(gates)}", lasting=late) if gates else None
    if now - created >= CREATING_S and "waiting" in state:
        words = f"pod {name} of {clock(created)} has a node and no running container yet: a large image, or a volume"
        long = now - created >= STUCK_CREATING_S
        return Problem("NotStarted", f"{words}; see kubectl describe pod {name}", lasting=long)
    return None
