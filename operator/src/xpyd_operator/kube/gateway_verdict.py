"""The condition ``GatewayReady`` of a service, from what gateways say of its route. Pure.

    True     ``Accepted``: every Gateway that is named takes the route, knows what is behind it, and runs
    False    ``CRDMissing``, ``NotAllowed``, ``NameTaken``, ``Refused``: the route cannot be made
             ``NoParent``, ``NotAccepted``, ``RefsNotResolved``, ``NotProgrammed``, ``PoolNotAccepted``,
             ``TLSNotAccepted``: a gateway does not take it, or nobody does
    Unknown  ``Creating``, ``NotReached``, ``NotTold``: nobody has said yet

It says nothing of ``Ready`` nor ``Degraded``: who reaches the Service is served, whatever a gateway does. What a gateway
says of an older generation is not believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from xpyd_operator.api.status import Condition
from xpyd_operator.kube.gateways import ABSENT, Name
from xpyd_operator.plan.conditions import bounded
from xpyd_operator.render.gateway import GATEWAY, GROUP, POOL, ROUTE, TLS

Body = dict[str, Any]
TYPE: Final = "GatewayReady"
_CUT: Final = 250
"""Characters of what one condition of a gateway says."""
_REASONS: Final = {"Accepted": "NotAccepted", "ResolvedRefs": "RefsNotResolved", "Programmed": "NotProgrammed"}


class _Ref(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str | None = None
    section_name: str | None = None
    kind: str = GATEWAY
    group: str = GROUP


class _Stated(msgspec.Struct, rename="camel"):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    observed_generation: int | None = None


class _Parent(msgspec.Struct, rename="camel"):
    parent_ref: _Ref = msgspec.field(default_factory=_Ref)
    conditions: list[_Stated] = []


class _Ancestor(msgspec.Struct, rename="camel"):
    ancestor_ref: _Ref = msgspec.field(default_factory=_Ref)
    conditions: list[_Stated] = []


class _Parents(msgspec.Struct):
    """Status of a route or a pool."""

    parents: list[_Parent] = []


class _Ancestors(msgspec.Struct):
    """Status of a policy."""

    ancestors: list[_Ancestor] = []


class _Conditions(msgspec.Struct):
    """Status of a Gateway."""

    conditions: list[_Stated] = []


Status = TypeVar("Status", _Parents, _Ancestors, _Conditions)


class _Finding(msgspec.Struct, frozen=True):
    holds: Literal["True", "False", "Unknown"]
    reason: str
    words: str


def say(holds: Literal["True", "False", "Unknown"], reason: str, message: str) -> Condition:
    """The condition."""
    return Condition(type=TYPE, status=holds, reason=reason, message=bounded(message))


def verdict(namespace: str, there: Mapping[str, Body], parent: Callable[[Name], Body | None]) -> Condition:
    """What gateways say of what is there.

    Args:
        namespace: of the service.
        there: the objects that it wants, by kind, all of them.
        parent: a Gateway by namespace and name, as ``Gateways.parent`` tells of it.
    """
    route = there[ROUTE]
    found = [each for ref in route["spec"]["parentRefs"] for each in _parent(namespace, route, ref, parent)]
    if POOL in there:
        parents = (_read(there[POOL], _Parents) or _Parents()).parents
        found += _bad([each for one in parents for each in one.conditions], there[POOL], "PoolNotAccepted")
    if TLS in there:
        ancestors = (_read(there[TLS], _Ancestors) or _Ancestors()).ancestors
        found += _bad([each for one in ancestors for each in one.conditions], there[TLS], "TLSNotAccepted")
    for holds in ("False", "Unknown"):
        worst = next((each for each in found if each.holds == holds), None)
        if worst is not None:
            return say(worst.holds, worst.reason, "; ".join(each.words for each in _sorted(found)))
    return say("True", "Accepted", "; ".join(each.words for each in found))


def _sorted(found: Sequence[_Finding]) -> list[_Finding]:
    """What is wrong comes first."""
    return sorted(found, key=lambda each: ("False", "Unknown", "True").index(each.holds))


def _parent(
    namespace: str, route: Body, ref: Body, parent: Callable[[Name], Body | None]
) -> Iterator[_Finding]:
    """What is to be said of one parent of the route: at least one finding."""
    at = (ref.get("namespace") or namespace, ref["name"])
    section = ref.get("sectionName")
    called = f"{GATEWAY} {at[0]}/{at[1]}{f' ({section})' if section else ''}"
    gateway = parent(at)
    if gateway == ABSENT:
        yield _Finding("False", "NoParent", f"{called} does not exist")
        return
    status = _read(route, _Parents)
    of_it = [] if status is None else [each for each in status.parents if _same(each.parent_ref, at, section, namespace)]
    said = [each for one in of_it for each in one.conditions if not _stale(each, route)]
    bad = [each for each in said if each.status == "False" and each.type in _REASONS]
    for each in bad:
        yield _Finding("False", _REASONS[each.type], f"{called}: {_words(each)}")
    if bad:
        return
    if not any(each.type == "Accepted" and each.status == "True" for each in said):
        words = "has said nothing of the route yet; is a controller for its class running?"
        yield _Finding("Unknown", "NotTold", f"{called} {words}")
        return
    runs = [each for each in (_read(gateway or {}, _Conditions) or _Conditions()).conditions if each.type == "Programmed"]
    down = next((each for each in runs if each.status == "False"), None)
    if down is not None:
        yield _Finding("False", _REASONS["Programmed"], f"{called}: {_words(down)}")
        return
    also = ", programmed" if any(each.status == "True" for each in runs) else ""
    yield _Finding("True", "Accepted", f"{called}: accepted{also}")


def _bad(said: Sequence[_Stated], body: Body, reason: str) -> Iterator[_Finding]:
    """What is refused of a pool or a policy. Who says nothing of one does not look at it, and the route tells more."""
    for each in said:
        if each.status == "False" and each.type in _REASONS and not _stale(each, body):
            yield _Finding("False", reason, f"{body['kind']} {body['metadata']['name']}: {_words(each)}")


def _same(ref: _Ref, at: Name, section: str | None, namespace: str) -> bool:
    there = (ref.namespace or namespace, ref.name)
    return there == at and (ref.section_name or None) == section and (ref.kind, ref.group) == (GATEWAY, GROUP)


def _stale(said: _Stated, body: Body) -> bool:
    generation = body["metadata"].get("generation")
    return said.observed_generation is not None and generation is not None and said.observed_generation < generation


def _words(said: _Stated) -> str:
    message = " ".join(said.message.split())
    cut = message if len(message) <= _CUT else message[: _CUT - 1] + "…"
    return f"{said.type} is {said.status}, {said.reason}{f': {cut}' if cut else ''}"


def _read(body: Body, kind: type[Status]) -> Status | None:
    """A status; what cannot be read is taken to be none."""
    try:
        return msgspec.convert(body.get("status") or {}, kind)
    except msgspec.ValidationError:
        return None
