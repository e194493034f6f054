"""From the pods of a service, and what a router says, to what the planner sees.

What a pod says by itself is worked out once for each version of it (``facts``); a round only adds what depends on the time
and on the router. Nothing is remembered: all times come from the pod.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from xpyd_operator.kube.cache import Entry
from xpyd_operator.kube.problems import clock, condition, problem, unix
from xpyd_operator.plan.backoff import HEALTHY_S
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.names import ordinal_of
from xpyd_operator.plan.observed import Front, Instance, Phase, Problem
from xpyd_operator.render import labels
from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import FIRST_EPOCH, Assignment
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, InstanceName, Role, ServiceName, State

Body = dict[str, Any]
LOST_S = 60.0
"""A pod that should have ended so long ago ends on a node that does not answer."""


class Facts(msgspec.Struct, frozen=True):
    """What one version of a pod says. Times in unix seconds, 0: not known."""

    name: str
    uid: str
    owner: str
    """uid of the controller."""
    component: str
    role: Role | None
    """The one that it was told last, which its label follows."""
    revision: Revision
    ip: str
    roster: bool
    router: bool
    phase: Phase
    """Without regard to deletion."""
    since: float
    ends_by: float
    """When a pod that is being deleted should be gone at the latest; 0: it is not being deleted."""
    asked_to_end: float
    crashes: int
    running_since: float
    """Since when ``main`` runs."""
    was_ready: bool
    told: Assignment | None = None
    """The role that it was told since it was made."""
    switching: bool = False
    """Its label does not say that role yet."""
    can_switch: bool = False
    """Its agent sees what it is told."""
    key: str = ""
    """The Secret that it has its service's key from."""

    @property
    def usable(self) -> bool:
        """Its processes run and can be asked."""
        return bool(self.ip) and not self.ends_by

    @property
    def ready(self) -> bool:
        """The kubelet calls it ready and nobody deletes it."""
        return self.phase is Phase.READY and not self.ends_by


class Told(msgspec.Struct, frozen=True):
    """What the routers told."""

    fleet: Fleet | None = None
    """From a router that is settled."""
    settled: frozenset[str] = frozenset()
    """Names of the pods whose router answers and is settled."""


def facts(pod: Body) -> Facts:
    """What a pod says by itself."""
    metadata: Body = pod["metadata"]
    status: Body = pod.get("status") or {}
    label: Body = metadata.get("labels") or {}
    main = _main(status)
    phase, since = _phase(metadata, status, main)
    state: Body = main.get("state") or {}
    ended = state.get("terminated") or (main.get("lastState") or {}).get("terminated") or {}
    crashes = int(main.get("restartCount", 0))
    if ended and unix(ended.get("finishedAt")) - unix(ended.get("startedAt")) >= HEALTHY_S:
        crashes = 1
    if phase is Phase.CRASHED:
        crashes = max(1, crashes)
    ends_by = unix(metadata.get("deletionTimestamp"))
    role = Role(label[labels.ROLE]) if label.get(labels.ROLE) in set(Role) else None
    told = _told(metadata) if role is not None else None
    return Facts(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner=controller(metadata),
        component=label.get(labels.COMPONENT, ""),
        role=told.role if told is not None else role,
        revision=Revision(label.get(labels.REVISION, "")),
        ip=status.get("podIP") or "",
        roster=label.get(labels.ROSTER) == labels.YES,
        router=label.get(labels.ROUTER) == labels.YES,
        phase=phase,
        since=since,
        ends_by=ends_by,
        asked_to_end=ends_by - float(metadata.get("deletionGracePeriodSeconds") or 0) if ends_by else 0.0,
        crashes=crashes,
        running_since=unix((state.get("running") or {}).get("startedAt")),
        was_ready=phase is Phase.STARTING and bool(main.get("started")),
        told=told,
        switching=told is not None and told.role is not role,
        can_switch=_volume(pod, "assignment") is not None,
        key=secret_of(pod),
    )


def secret_of(pod: Body) -> str:
    """The Secret that a pod, or the template of one, has its service's key from."""
    return str(((_volume(pod, "key") or {}).get("secret") or {}).get("secretName", ""))


def _volume(pod: Body, name: str) -> Body | None:
    volumes: list[Body] = pod.get("spec", {}).get("volumes") or []
    return next((volume for volume in volumes if volume.get("name") == name), None)


def _told(metadata: Body) -> Assignment | None:
    """What its annotation says. One that is no assignment (a person's) is none."""
    text = (metadata.get("annotations") or {}).get(labels.ASSIGNMENT, "")
    try:
        return assignment.decode(text) if text else None
    except ValueError:
        return None


def controller(metadata: Body) -> str:
    """The uid of an object's controller; empty without one."""
    return next((str(each.get("uid")) for each in metadata.get("ownerReferences") or () if each.get("controller")), "")


def instances(
    service: ServiceName, uid: str, pods: Iterable[Entry], told: Told, now: float, *, taken: Iterable[str] = ()
) -> tuple[Instance, ...]:
    """Engine pods as instances, by ordinal. ``taken``: names that pods of others have, which carry no label of ours.

    A pod of ours in name only is lost to the planner: it keeps its ordinal and counts for nothing.
    """
    heard = {each.instance: each for each in told.fleet.instances} if told.fleet is not None else {}
    found: dict[int, Instance] = {}
    for entry in pods:
        fact = entry.derived(facts)
        ordinal = ordinal_of(service, fact.name)
        if ordinal is None or fact.component == labels.ROUTERS:
            continue
        if fact.owner != uid or fact.role is None:
            found[ordinal] = _foreign(fact.name, ordinal, ours=fact.owner == uid, ending=bool(fact.ends_by))
            continue
        settled = fact.name in told.settled
        found[ordinal] = _instance(entry, fact, ordinal, heard.get(InstanceName(fact.name)), now, settled=settled)
    for name in taken:
        ordinal = ordinal_of(service, name)
        if ordinal is not None and ordinal not in found:
            found[ordinal] = _foreign(name, ordinal, ours=False, ending=False)
    return tuple(found[ordinal] for ordinal in sorted(found))


def front(routers: Iterable[Facts], told: Told, *, prefill: bool, taken: str = "") -> Front:
    """Whether clients are served by the routers that they reach.

    ``prefill``: prefill instances are asked for; ``taken``: the clients' Service, if it is somebody else's.
    """
    if taken:
        return Front(False, "NameTaken", f"{taken} is somebody else's, so that clients reach whatever that one selects")
    reached = [each for each in routers if each.usable]
    if not reached:
        return Front(False, "NoRouter", "no pod routes yet: the first decode instance that runs becomes the router")
    ready = [each for each in reached if each.phase is Phase.READY]
    if not ready:
        return Front(False, "RouterNotReady", f"no router is ready: {', '.join(sorted(each.name for each in reached))}")
    if told.fleet is None or not any(each.name in told.settled for each in ready):
        return Front(False, "RouterNotSettled", "no router answers that has heard from all instances")
    pickable = [each for each in told.fleet.instances if each.state is State.READY and not each.suspended]
    decode = {each.fingerprint for each in pickable if each.role is Role.DECODE}
    if not decode:
        return Front(False, "NoDecode", f"no decode instance can be picked{_why(told.fleet, Role.DECODE)}")
    if prefill:
        prefills = {each.fingerprint for each in pickable if each.role is Role.PREFILL}
        if not prefills:
            return Front(False, "NoPrefill", f"no prefill instance can be picked{_why(told.fleet, Role.PREFILL)}")
        if not prefills & decode:
            return Front(False, "NoPair", "prefill and decode instances compute different KV; they cannot serve together")
    return Front(True, "Serving", f"{len(ready)} router{'s' if len(ready) > 1 else ''} ready")


def _instance(
    entry: Entry, fact: Facts, ordinal: int, heard: FleetInstance | None, now: float, *, settled: bool
) -> Instance:
    phase, since = fact.phase, fact.since
    if fact.ends_by:
        phase, since = (Phase.LOST if now >= fact.ends_by + LOST_S else Phase.STOPPING), fact.asked_to_end
    healthy = fact.running_since and now - fact.running_since >= HEALTHY_S
    load = heard.load if heard is not None else None
    return Instance(
        name=InstanceName(fact.name),
        ordinal=ordinal,
        role=fact.role or Role.DECODE,
        revision=fact.revision,
        phase=phase,
        since=since,
        load=load.running + load.waiting + load.transfers if load is not None else 0,
        was_ready=fact.was_ready,
        platform_crashes=0 if healthy else fact.crashes,
        problem=None if phase in (Phase.READY, Phase.STOPPING) else _problem(entry, fact, phase, now),
        fingerprint=heard.fingerprint if heard is not None else Fingerprint(""),
        roster=fact.roster,
        router=fact.router,
        settled=settled,
        cached=heard.cached if heard is not None else 0,
        epoch=fact.told.epoch if fact.told is not None else FIRST_EPOCH,
        can_switch=fact.can_switch,
        switching=fact.switching,
        assigned=fact.told.at if fact.told is not None else 0.0,
    )


def _problem(entry: Entry, fact: Facts, phase: Phase, now: float) -> Problem | None:
    if phase is Phase.LOST:
        words = f"pod {fact.name} should have ended by {clock(fact.ends_by)}; its node does not answer (kubectl get nodes)"
        return Problem("Lost", f"{words}; once the node is surely off: kubectl delete pod {fact.name} --force")
    return problem(entry.body, now)


def _foreign(name: str, ordinal: int, *, ours: bool, ending: bool) -> Instance:
    found = None
    if ours:
        found = Problem("Unrecognized", f"pod {name} has lost the label {labels.ROLE}; delete the pod, and it is made anew")
    elif not ending:
        found = Problem("NameTaken", f"pod {name} belongs to somebody else; rename or delete it to free the name")
    return Instance(InstanceName(name), ordinal, Role.DECODE, Revision(""), Phase.LOST, problem=found)


def _main(status: Body) -> Body:
    """Status of the container that counts: the engine, or the only one of a router's pod."""
    containers: list[Body] = status.get("containerStatuses") or []
    return next((each for each in containers if each["name"] == labels.MAIN), containers[0] if containers else {})


def _phase(metadata: Body, status: Body, main: Body) -> tuple[Phase, float]:
    """What the pod is doing, and since when."""
    created = unix(metadata.get("creationTimestamp"))
    state: Body = main.get("state") or {}
    ended = state.get("terminated") or (main.get("lastState") or {}).get("terminated") or {}
    ready = condition(status, "Ready") or {}
    changed = unix(ready.get("lastTransitionTime"))
    if status.get("phase") in ("Failed", "Succeeded"):
        return Phase.CRASHED, max(created, unix(ended.get("finishedAt")), changed)
    looping = (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff"
    if looping or "terminated" in state:
        return Phase.CRASHED, unix(ended.get("finishedAt")) or max(created, changed)
    if ready.get("status") == "True":
        return Phase.READY, changed or created
    return Phase.STARTING, max(created, changed, unix((state.get("running") or {}).get("startedAt")))


def _why(fleet: Fleet, role: Role) -> str:
    mine = [each for each in fleet.instances if each.role is role]
    suspended = [f"{each.instance} ({each.suspended})" for each in mine if each.suspended]
    if suspended:
        return f": {', '.join(suspended)}"
    return ": none is known to the router" if not mine else ": none is ready"
