"""What a pod says by itself, whatever the time and whatever others say. Times in unix seconds, 0: not known."""

from __future__ import annotations

from typing import Any

import msgspec

from xpyd_operator.kube.podstate.podstatus import condition, has_ended, node_lost, unix
from xpyd_operator.plan.backoff import HEALTHY_S
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.names import member_of
from xpyd_operator.plan.observed import Phase
from xpyd_operator.render import labels
from xpyd_operator.render.gang import Kind, joined_by, queued_as
from xpyd_operator.render.keys import secret_of
from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.group import MOST_MEMBERS
from xpyd_sidecar.contract.ids import InstanceName, Role

Body = dict[str, Any]


class Facts(msgspec.Struct, frozen=True):
    """What one version of a pod says."""

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
    admin_port: int
    """Where its router answers the operator, as its container says: a router of the release before answers where clients
    come. 0: it has none."""
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
    key: str = ""
    """The Secret that it has its service's key from."""
    instance: InstanceName = InstanceName("")
    """What it is, or is a member of."""
    member: int | None = None
    """Which member of an instance of several pods, 0: the leader; None: it is all of its instance."""
    layout: str = ""
    """What it says of the whole of such an instance: how many members, and a hash of what they are made of."""
    size: int = 1
    """Members of its instance, ``MOST_MEMBERS`` at most; 0: it does not say so any more."""
    created: float = 0.0
    placed: float = 0.0
    """Since when it has a node; 0: it has none, or is not known to."""
    unplaced: float = 0.0
    """Since when no node takes it; 0: it has one, or was not looked at yet."""
    away: bool = False
    """Its node does not answer."""
    over: bool = False
    """It has ended, and never runs again."""
    began: bool = False
    """Its engine was ready once since it was started."""
    gang: Kind | None = None
    """How it is in the group of its instance; None: it is in none."""
    queued_as: str = ""
    """In which group Kueue admits it; empty: none."""

    @property
    def leads(self) -> bool:
        """Who speaks for its instance."""
        return not self.member

    @property
    def usable(self) -> bool:
        """Its processes run and can be asked."""
        return bool(self.ip) and not self.ends_by

    @property
    def ready(self) -> bool:
        """The kubelet calls it ready and nobody deletes it."""
        return self.phase is Phase.READY and not self.ends_by


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
    instance, member = member_of(metadata["name"])
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
        admin_port=_admin_port(pod),
        phase=phase,
        since=since,
        ends_by=ends_by,
        asked_to_end=ends_by - float(metadata.get("deletionGracePeriodSeconds") or 0) if ends_by else 0.0,
        crashes=crashes,
        running_since=unix((state.get("running") or {}).get("startedAt")),
        was_ready=phase is Phase.STARTING and bool(main.get("started")),
        told=told,
        switching=told is not None and told.role is not role,
        key=secret_of(pod),
        instance=instance,
        member=member,
        layout=str((metadata.get("annotations") or {}).get(labels.LAYOUT, "")),
        size=1 if member is None else _size(metadata),
        created=unix(metadata.get("creationTimestamp")),
        placed=_since(status, "True"),
        unplaced=_since(status, "False"),
        away=node_lost(status),
        over=has_ended(status),
        began=bool(main.get("started")),
        gang=joined_by(pod) if member is not None else None,
        queued_as=queued_as(pod) if member is not None else "",
    )


def _admin_port(pod: Body) -> int:
    spec: Body = pod.get("spec") or {}
    ports = {
        port.get("name"): port.get("containerPort")
        for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
        if container.get("name") in (labels.SIDECAR, labels.ROUTERS)
        for port in container.get("ports") or ()
    }
    return int(ports.get(labels.ADMIN) or ports.get(labels.CLIENTS) or 0)


def _size(metadata: Body) -> int:
    """Members of its instance, as its annotation says; 0 where that is no number of members (a person wrote it)."""
    text = str((metadata.get("annotations") or {}).get(labels.MEMBERS, ""))
    size = int(text) if len(text) <= len(str(MOST_MEMBERS)) and text.isdecimal() else 0
    return size if size <= MOST_MEMBERS else 0


def _since(status: Body, scheduled: str) -> float:
    """Since when the scheduler says this of it; it says nothing of one that a gate holds."""
    placing = condition(status, "PodScheduled") or {}
    said = placing.get("status") == scheduled and placing.get("reason") != "SchedulingGated"
    return unix(placing.get("lastTransitionTime")) if said else 0.0


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
