"""Why one container of a pod is not up, from what its status says. Pure, and total: None only for one that is up.

    init      up when it has ended well
    sidecar   an init container that goes on (``restartPolicy: Always``): up when it is ready
    main      the engine, or the router of a pod of its own: up when it is ready
    extra     one that the document's template adds: up when it is ready

``Weight`` says which of several tells most: what is broken before what only follows from it.
"""

from __future__ import annotations

import re
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from xpyd_operator.kube.podstate.podstatus import clock, condition, last_line, unix
from xpyd_operator.kube.podstate.podwords import ROUTER, more_memory, words_of
from xpyd_operator.plan.absent import Absence, Breakage, Waiting, waits
from xpyd_operator.plan.backoff import HEALTHY_S, LOOPING
from xpyd_operator.plan.cause import cause
from xpyd_operator.plan.names import member_of
from xpyd_operator.render.labels import MAIN, SIDECAR

Body = dict[str, Any]
UNREADY_S = 60.0
"""What was up and is not any more, or could not get its image, has so long before a person should look."""
PULLED = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError"})
_NEVER_PULL = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_CREATE = frozenset({"CreateContainerError", "RunContainerError", "PostStartHookError"})
_SECRET = re.compile(r'secret "[^"]+" not found|couldn\'t find key \S+ in Secret', re.IGNORECASE)


class Kind(StrEnum):
    """What a container is to its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"
    EXTRA = "extra"


class Weight(IntEnum):
    """The lower, the more it tells."""

    BROKEN = 0
    ENDED = 1
    BLOCKED = 2
    """The containers after it wait for it."""
    STARTING = 3
    UNREADY = 4
    ROSTER = 5
    """A router is not ready as long as its engine is not."""


class NotUp(NamedTuple):
    """Why one container is not up."""

    rank: Weight
    why: Absence


class Container(NamedTuple):
    """One container of a pod."""

    pod: Body
    kind: Kind
    status: Body
    """Empty where the kubelet says nothing of it yet."""
    name: str
    now: float
    limit_s: float
    """Seconds that the document gives a start."""

    @property
    def description(self) -> str:
        """Which container of which pod, in words."""
        which = "init container" if self.kind is Kind.INIT else "container"
        return f"{which} {self.name} of pod {self.pod['metadata']['name']}"

    @property
    def state(self) -> Body:
        """``waiting``, ``running`` or ``terminated``."""
        return self.status.get("state") or {}

    @property
    def placed_since(self) -> float:
        """Since when its pod has a node, unix seconds."""
        placing = condition(self.pod.get("status") or {}, "PodScheduled") or {}
        return unix(placing.get("lastTransitionTime")) or unix(self.pod["metadata"].get("creationTimestamp"))


def containers(pod: Body, now: float, limit_s: float) -> list[Container]:
    """All of a pod in the order in which they come up; of a pod without a spec those that its status names."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    found = []
    for field, told in (("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")):
        statuses = {each["name"]: each for each in status.get(told) or ()}
        specs = {each["name"]: each for each in spec.get(field) or ()}
        names = list(dict.fromkeys((*specs, *statuses)))
        main = MAIN if MAIN in names else next(iter(names), "")
        for name in names:
            if field == "initContainers":
                again = name == SIDECAR or specs.get(name, {}).get("restartPolicy") == "Always"
                kind = Kind.SIDECAR if again else Kind.INIT
            else:
                kind = Kind.MAIN if name == main else Kind.EXTRA
            found.append(Container(pod, kind, statuses.get(name, {}), name, now, limit_s))
    return found


def why_not(one: Container) -> NotUp | None:
    """Why it is not up; None: it is."""
    if one.kind is Kind.INIT and "terminated" in one.state and not one.state["terminated"].get("exitCode"):
        return None
    if one.kind is not Kind.INIT and "running" in one.state and one.status.get("ready"):
        return None
    found = _refused(one) or _ended(one)
    if found is not None:
        return NotUp(Weight.BROKEN if isinstance(found, Breakage) else Weight.ENDED, found)
    if "running" in one.state:
        return _running(one)
    since = one.placed_since
    words = (f"{one.description} is being made since {clock(since)}: its image is pulled, or a volume is mounted; "
             f"kubectl describe pod {one.pod['metadata']['name']} says which")
    return NotUp(Weight.BLOCKED, _wait(one, "Creating", words, since))


def _wait(one: Container, reason: str, message: str, since: float, limit_s: float | None = None) -> Waiting:
    limit_s = one.limit_s if limit_s is None else limit_s
    return waits(reason, message, one.now, since=since, limit_s=limit_s, of=one.name)


def _refused(one: Container) -> Absence | None:
    """The kubelet cannot make it."""
    waiting = one.state.get("waiting") or {}
    reason, words = waiting.get("reason") or "", last_line(waiting.get("message"))
    image, name = one.status.get("image"), one.pod["metadata"]["name"]
    if reason in PULLED:
        what = f"{image} for {one.description} cannot be pulled: {words or reason}"
        do = f"check the image's name, its registry and {words_of(one.pod).pull}"
        if reason == "ErrImagePull" and one.now - one.placed_since < UNREADY_S:
            return _wait(one, "ImagePull", f"{what}; {do}", one.placed_since, UNREADY_S)
        return Breakage("ImagePull", what, do, of=one.name)
    if reason in _NEVER_PULL:
        what = f"{image} for {one.description} cannot be used: {words or reason}"
        return Breakage("ImagePull", what, "correct the image", one.name)
    if reason == "CreateContainerConfigError":
        kind = "SecretMissing" if _SECRET.search(words) else "ConfigError"
        do = "create what is missing in the pod's namespace"
        return Breakage(kind, f"{one.description} cannot be configured: {words or reason}", do, one.name)
    if reason in _CREATE:
        do = f"see kubectl describe pod {name}"
        return Breakage("ContainerError", f"{one.description} cannot be started: {words or reason}", do, one.name)
    return None


def _ended(one: Container) -> Absence | None:
    """It ended by itself, and is to begin again."""
    last = one.state.get("terminated") or (one.status.get("lastState") or {}).get("terminated")
    if last is None or (one.kind is Kind.INIT and "running" in one.state):
        return None
    name = one.pod["metadata"]["name"]
    ran_s, when = unix(last.get("finishedAt")) - unix(last.get("startedAt")), unix(last.get("finishedAt"))
    times = max(1, one.status.get("restartCount", 0))
    if one.kind is Kind.INIT:
        words = f"{one.description} {_how(last)}"
        found = Breakage("InitFailed", words, f"see kubectl logs {name} -c {one.name}", one.name)
        return _again(one, found, times, when)
    often = "once" if times == 1 else f"{times} times"
    if last.get("reason") == "OOMKilled":
        do = more_memory(one.pod, one.name)
        found = Breakage("OutOfMemory", f"{one.description} was killed for memory {often}", do, one.name)
        return _again(one, found, times, when)
    limit_s = _startup_limit_s(one)
    if limit_s and ran_s >= limit_s and last.get("exitCode") in (137, 143):
        said = words_of(one.pod)
        what = f"the {said.what} of pod {name}" if one.kind is Kind.MAIN else one.description
        return Breakage("StartupTimeout", f"{what} was not up within {limit_s:.0f} s ({often})",
                        f"{said.start}: kubectl logs {name} -c {one.name} --previous", one.name)
    if ran_s >= HEALTHY_S:
        times, often = 1, "once"  # it ran well before
    reason = "SidecarCrash" if one.name == SIDECAR else "CrashLoop"
    what = f"{one.description} ended {often}, last {_how(last)}"
    return _again(one, Breakage(reason, what, f"see kubectl logs {name} -c {one.name} --previous", one.name), times, when)


def _again(one: Container, found: Breakage, times: int, when: float) -> Absence:
    """From ``LOOPING`` times on nobody waits for it any more."""
    return found if times >= LOOPING else _wait(one, found.reason, found.message, when)


def _how(last: Body) -> str:
    message = last.get("message") or ""
    words = cause(message.splitlines(), cut=True) or last_line(message)
    reason = last.get("reason") or ""
    why = f" ({reason})" if reason and reason not in ("Error", "Completed") else ""
    how = f"with signal {last['signal']}" if last.get("signal") else f"with exit code {last.get('exitCode')}"
    return f"{how}{why}{f': {words}' if words else ''}"


def _startup_limit_s(one: Container) -> float:
    """Seconds that it has for its start, by its startup probe; 0 without one."""
    spec: Body = one.pod.get("spec") or {}
    for each in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        probe = each.get("startupProbe")
        if each["name"] == one.name and probe:
            return float(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))
    return 0.0


def _running(one: Container) -> NotUp:
    """It runs, and is not ready."""
    name = one.pod["metadata"]["name"]
    began = unix((one.state.get("running") or {}).get("startedAt"))
    logs = f"see kubectl logs {name} -c {one.name}"
    if one.kind is Kind.INIT:
        words = f"{one.description} runs since {clock(began)}, and the others wait for it; {logs}"
        return NotUp(Weight.BLOCKED, _wait(one, "Initializing", words, began))
    if not one.status.get("started") and one.kind is not Kind.EXTRA:
        limit_s = _startup_limit_s(one) or one.limit_s
        words = f"{one.description} starts since {clock(began)}, and has {limit_s:.0f} s for it; {logs}"
        rank = Weight.BLOCKED if one.kind is Kind.SIDECAR else Weight.STARTING
        return NotUp(rank, _wait(one, "Starting", words, began, limit_s + UNREADY_S))  # the kubelet ends it first
    ready = condition(one.pod.get("status") or {}, "Ready") or {}
    since = unix(ready.get("lastTransitionTime"))
    served = since > began
    since, limit_s = (since, UNREADY_S) if served else (began, one.limit_s)
    if one.name == SIDECAR:
        words = f"the engine of pod {name} is up, and its router (container {SIDECAR}) does not know the roster"
        return NotUp(Weight.ROSTER, _wait(one, "SidecarNotReady", f"{words} since {clock(since)}; {logs}", since, limit_s))
    if one.kind is not Kind.MAIN:
        words = f"{one.description} runs and is not ready since {clock(since)}; {logs}"
        return NotUp(Weight.UNREADY, _wait(one, "ContainerNotReady", words, since, limit_s))
    if words_of(one.pod) is ROUTER:  # not while nobody decodes, and the kubelet ends one that hangs
        words = f"{one.description} is up, and is ready once it knows the roster and an instance that decodes; {logs}"
        return NotUp(Weight.UNREADY, _wait(one, "RouterNotReady", words, since, 0.0))
    if member_of(name)[1] is not None:
        what = "served with the others of its instance and does not" if served else "does not serve with the others yet,"
        words = f"pod {name} {what} since {clock(since)} (container {one.name}); see kubectl logs {name} -c {SIDECAR}"
    else:
        what = "was up and does not answer its health check" if served else "does not answer its health check yet,"
        words = f"the engine of pod {name} {what} since {clock(since)} (container {one.name}); {logs}"
    return NotUp(Weight.UNREADY, _wait(one, "EngineNotReady", words, since, limit_s))
