"""Makes what the planner sees of a service's instances and routers, from its pods and a router's answer.

What a pod says by itself is worked out once for each version of it (``podstate.facts``); a round of reconciliation adds
what depends on the time and on the router. Nothing is remembered between rounds: all times come from the pods. How several
pods make one instance is decided in ``gangs.groups``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Final

import msgspec

from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.gangs import groups
from xpyd_operator.kube.podstate.absent import absent
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.podstate.podstatus import clock
from xpyd_operator.kube.routers.routers import first_words
from xpyd_operator.plan.absent import Absence, Breakage, Waiting
from xpyd_operator.plan.backoff import HEALTHY_S
from xpyd_operator.plan.desired import STARTUP_S, Revision
from xpyd_operator.plan.names import member_of, ordinal_of
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.render import labels
from xpyd_sidecar.contract.assignment import FIRST_EPOCH
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance, words_of_ejection
from xpyd_sidecar.contract.ids import Fingerprint, InstanceName, Role, ServiceName, State

Body = dict[str, Any]
LOST_S: Final = 60.0
"""A pod that should have ended so long ago ends on a node that does not answer."""


class RouterAnswers(msgspec.Struct, frozen=True):
    """What the routers of one service have answered to ``GET /fleet``."""

    fleet: Fleet | None = None
    """From a router that is settled."""
    settled: frozenset[str] = frozenset()
    """Names of the pods whose router answers and is settled."""


def instances(
    service: ServiceName, uid: str, pods: Iterable[Entry], told: RouterAnswers, now: float, *, taken: Iterable[str] = (),
    current: Collection[Revision] | None = None, limit_s: float = STARTUP_S,
) -> tuple[Instance, ...]:
    """The instances of a service, one per ordinal and sorted by it; pods of routers are left out.

    A pod with an instance's name that belongs to others, or that is a whole instance and has lost its role label, makes an
    instance in phase ``LOST``: its ordinal is not free, and it counts for nothing else.

    Args:
        service: name of the service.
        uid: Kubernetes uid of the service.
        pods: pods with the label of the service.
        told: what the routers have answered.
        now: unix seconds.
        taken: names of pods without the label of the service, which belong to others.
        current: revisions that the document asks for now; None: not known.
        limit_s: seconds that the document gives an instance to start.
    """
    heard = {each.instance: each for each in told.fleet.instances} if told.fleet is not None else {}
    several: dict[int, list[tuple[Facts, Entry]]] = {}
    others: dict[int, dict[str, Instance]] = {}
    for entry in pods:
        fact = entry.derive(facts)
        ordinal = ordinal_of(service, fact.instance)
        if ordinal is None or fact.component == labels.ROUTERS:
            continue
        if fact.owner == uid and (fact.role is not None or fact.member is not None):
            several.setdefault(ordinal, []).append((fact, entry))
        else:
            others.setdefault(ordinal, {})[fact.name] = _foreign(
                fact.name, ordinal, ours=fact.owner == uid, ending=bool(fact.ends_by))
    for name in taken:
        if (ordinal := ordinal_of(service, member_of(name)[0])) is not None:
            others.setdefault(ordinal, {}).setdefault(name, _foreign(name, ordinal, ours=False, ending=False))
    found = {ordinal: next(iter(those.values())) for ordinal, those in others.items()}
    for ordinal, entries in several.items():
        entries.sort(key=lambda one: one[0].member or 0)
        said = heard.get(entries[0][0].instance)
        parts = [_instance(entry, fact, ordinal, said, now, limit_s=limit_s, settled=fact.name in told.settled)
                 for fact, entry in entries]
        members = [fact for fact, _ in entries]
        if len(parts) == 1 and members[0].member is None:
            found[ordinal] = parts[0]
            continue
        serves = None if told.fleet is None else said is not None and said.state is State.READY
        stands = groups.standing(members, now, current=current, serves=serves)
        if stands.state != "ending" and (why := _in_the_way(members, others.get(ordinal, {}))):
            stands = groups.Standing("broken", why)
        found[ordinal] = groups.merge_parts(parts, members, stands)
    return tuple(found[ordinal] for ordinal in sorted(found))


def front(
    routers: Iterable[Facts], told: RouterAnswers, *, prefill: bool, decode: bool = True, taken: str = "",
    away: Sequence[Absence] | None = None,
) -> Absence | None:
    """Why requests of clients are not served now, as far as routers tell; None where they are.

    Args:
        routers: pods whose router clients reach.
        told: what the routers have answered.
        prefill: whether prefill instances are wanted.
        decode: whether decode instances are wanted; where not, a request starts one.
        taken: the Service that clients use, where it belongs to somebody else; else empty.
        away: why routers in pods of their own are missing; None where routers run beside engines.
    """
    if taken:
        return Breakage("NameTaken", f"{taken} is somebody else's, so that clients reach whatever that one selects")
    reached = [each for each in routers if each.usable]
    if not reached:
        return Waiting("NoRouter", _nobody(away))
    ready = [each for each in reached if each.phase is Phase.READY]
    if not ready:
        names = ", ".join(sorted(each.name for each in reached))
        why = f": {first_words(away)}" if away else ""
        return Waiting("RouterNotReady", f"no router is ready: {names}{why}")
    if told.fleet is None or not any(each.name in told.settled for each in ready):
        return Waiting("RouterNotSettled", "no router answers that has heard from all instances")
    if not decode:
        return None
    pickable = [each for each in told.fleet.instances if each.state is State.READY and not each.suspended]
    decodes = {each.fingerprint for each in pickable if each.role is Role.DECODE}
    if not decodes:
        return Waiting("NoDecode", f"no decode instance can be picked{_why(told.fleet, Role.DECODE)}")
    if prefill:
        prefills = {each.fingerprint for each in pickable if each.role is Role.PREFILL}
        if not prefills:
            return Waiting("NoPrefill", f"no prefill instance can be picked{_why(told.fleet, Role.PREFILL)}")
        if not prefills & decodes:
            return Breakage("NoPair", "prefill and decode instances compute different KV; they cannot serve together")
    return None


def _nobody(away: Sequence[Absence] | None) -> str:
    if away is None:
        return "no pod routes yet: the first decode instance that runs becomes the router"
    return f"no router runs: {first_words(away) or 'those that there are end'}"


def _instance(
    entry: Entry, fact: Facts, ordinal: int, heard: FleetInstance | None, now: float, *, limit_s: float, settled: bool
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
        absent=None if phase in (Phase.READY, Phase.STOPPING) else _absent(entry, fact, phase, now, limit_s),
        fingerprint=heard.fingerprint if heard is not None else Fingerprint(""),
        refuses=tuple((one.instance, one.reason) for one in heard.refused) if heard is not None else (),
        links=heard.links if heard is not None else (),
        adapters=heard.adapters if heard is not None else None,
        ejected=words_of_ejection(heard) if heard is not None else "",
        roster=fact.roster,
        router=fact.router,
        settled=settled,
        cached=heard.cached if heard is not None else 0,
        epoch=fact.told.epoch if fact.told is not None else FIRST_EPOCH,
        switching=fact.switching,
        assigned=fact.told.at if fact.told is not None else 0.0,
    )


def _absent(entry: Entry, fact: Facts, phase: Phase, now: float, limit_s: float) -> Absence | None:
    if phase is Phase.LOST:
        words = f"pod {fact.name} should have ended by {clock(fact.ends_by)}; its node does not answer (kubectl get nodes)"
        return Breakage("Lost", words, f"once the node is surely off: kubectl delete pod {fact.name} --force")
    return absent(entry.body, now, limit_s)


def _foreign(name: str, ordinal: int, *, ours: bool, ending: bool) -> Instance:
    found = None
    if ours:
        what = f"pod {name} has lost the label {labels.ROLE}"
        found = Breakage("Unrecognized", what, "delete the pod, and it is made anew")
    elif not ending:
        found = Breakage("NameTaken", f"pod {name} belongs to somebody else", "rename or delete it to free the name")
    return Instance(member_of(name)[0], ordinal, Role.DECODE, Revision(""), Phase.LOST, absent=found)


def _in_the_way(members: list[Facts], others: dict[str, Instance]) -> str:
    """Why an instance of several pods cannot be completed: a pod of others has the name of a missing member, or a pod that
    lost its role label has the instance's own name. Empty where nothing is in the way.
    """
    lacking = set(range(members[0].size)) - {each.member for each in members}
    found = [each.absent for name, each in others.items()
                if member_of(name)[1] in lacking or (each.absent is not None and each.absent.reason == "Unrecognized")]
    return next((each.message for each in found if each is not None), "")


def _why(fleet: Fleet, role: Role) -> str:
    mine = [each for each in fleet.instances if each.role is role]
    suspended = [f"{each.instance} ({each.suspended})" for each in mine if each.suspended]
    if suspended:
        return f": {', '.join(suspended)}"
    return ": none is known to the router" if not mine else ": none is ready"


def picture(pods: list[Facts], now: float) -> Hashable:
    """A hash that changes when a router's answer may have changed, so that routers are to be asked again: with phase, role,
    address or labels of a pod, and every second of ``now`` (unix seconds) while some pod takes another role.
    """
    second = int(now) if any(each.switching for each in pods) else 0
    return hash(frozenset(
        (each.uid, each.phase, bool(each.ends_by), each.roster, each.router, each.ip, each.role, second) for each in pods))
