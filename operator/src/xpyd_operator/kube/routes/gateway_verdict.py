"""The condition ``GatewayReady`` of a service, from what gateways say of its route. Pure.

    True     ``Accepted``: every Gateway that is named takes the route, knows what is behind it, and runs
    False    ``CRDMissing``, ``NotAllowed``, ``NameTaken``, ``Refused``: the route cannot be made
             ``NoParent``, ``NotAccepted``, ``RefsNotResolved``, ``NotProgrammed``, ``PoolNotAccepted``,
             ``TLSNotAccepted``: a gateway does not take it, or nobody does
    Unknown  ``Creating``, ``NotReached``, ``NotTold``: nobody has said yet, or cannot be understood
             ``NotAccepted``, ``RefsNotResolved``, ``NotProgrammed``: it is not decided yet

It says nothing of ``Ready`` nor ``Degraded``: who reaches the Service is served, whatever a gateway does. What a gateway
says of an older generation is not believed. Anybody may write a status, and a schema may let anything pass: what cannot be
read makes nothing True, and hides nothing that others say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from xpyd_operator.api.status import Condition
from xpyd_operator.kube.routes.gateways import ABSENT, Name
from xpyd_operator.plan.conditions import shorten
from xpyd_operator.render.gateway import GATEWAY, GROUP, POOL, ROUTE, TLS

Body = dict[str, Any]
TYPE: Final = "GatewayReady"
_CUT: Final = 250
"""Characters of what one condition of a gateway says."""
_REASON_CUT: Final = 80
"""Characters of its reason."""
_REASONS: Final = {"Accepted": "NotAccepted", "ResolvedRefs": "RefsNotResolved", "Programmed": "NotProgrammed"}


class _Ref(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str | None = None
    section_name: str | None = None
    kind: str | None = None
    group: str | None = None


class _Stated(msgspec.Struct, rename="camel"):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None
    observed_generation: int | None = None


class _Parent(msgspec.Struct, rename="camel"):
    """What one controller says of one parent; each condition is read by itself."""

    parent_ref: _Ref = msgspec.field(default_factory=_Ref)
    conditions: Any = None


T = TypeVar("T", _Stated, _Parent)


class _Finding(msgspec.Struct, frozen=True):
    holds: Literal["True", "False", "Unknown"]
    reason: str
    words: str


def gateway_condition(holds: Literal["True", "False", "Unknown"], reason: str, message: str) -> Condition:
    """The condition ``GatewayReady``. ``holds`` is its status."""
    return Condition(type=TYPE, status=holds, reason=reason, message=shorten(message))


def verdict(namespace: str, there: Mapping[str, Body], parent: Callable[[Name], Body | None]) -> Condition:
    """What gateways say of what is there.

    Args:
        namespace: of the service.
        there: the objects that it wants, by kind, all of them.
        parent: a Gateway by namespace and name, as ``Gateways.parent`` tells of it.
    """
    route = there[ROUTE]
    parents, _ = _read(_listed(route, "parents"), _Parent)
    found = [each for ref in route["spec"]["parentRefs"] for each in _parent(namespace, route, parents, ref, parent)]
    for kind, field, reason in ((POOL, "parents", "PoolNotAccepted"), (TLS, "ancestors", "TLSNotAccepted")):
        if kind in there:
            found += _bad(there[kind], field, reason)
    for holds in ("False", "Unknown"):
        worst = next((each for each in found if each.holds == holds), None)
        if worst is not None:
            return gateway_condition(worst.holds, worst.reason, "; ".join(each.words for each in _sorted(found)))
    return gateway_condition("True", "Accepted", "; ".join(each.words for each in found))


def _sorted(found: Sequence[_Finding]) -> list[_Finding]:
    """What is wrong comes first."""
    return sorted(found, key=lambda each: ("False", "Unknown", "True").index(each.holds))


def _parent(
    namespace: str, route: Body, parents: Sequence[_Parent], ref: Body, parent: Callable[[Name], Body | None]
) -> Iterator[_Finding]:
    """What is to be said of one parent of the route: at least one finding."""
    at = (ref.get("namespace") or namespace, ref["name"])
    section = ref.get("sectionName")
    called = f"{GATEWAY} {at[0]}/{at[1]}{f' ({section})' if section else ''}"
    gateway = parent(at)
    if gateway == ABSENT:
        yield _Finding("False", "NoParent", f"{called} does not exist")
        return
    read = [_read(each.conditions, _Stated) for each in parents if _same(each.parent_ref, at, section, namespace)]
    said = [each for conditions, _ in read for each in conditions if not _stale(each, route)]
    bad = [each for each in said if each.status == "False" and each.type in _REASONS]
    for each in bad:
        yield _Finding("False", _REASONS[each.type], f"{called}: {_words(each)}")
    if bad:
        return
    if not all(whole for _, whole in read):
        yield _Finding("Unknown", "NotTold", f"{called} says something of the route that cannot be read")
        return
    if not any(each.type == "Accepted" and each.status == "True" for each in said):
        words = "has said nothing of the route yet; is a controller for its class running?"
        yield _Finding("Unknown", "NotTold", f"{called} {words}")
        return
    of_itself, _ = _read(_listed(gateway or {}, "conditions"), _Stated)
    runs = [each for each in of_itself if each.type == "Programmed" and gateway and not _stale(each, gateway)]
    down = next((each for each in runs if each.status == "False"), None)
    if down is not None:
        yield _Finding("False", _REASONS["Programmed"], f"{called}: {_words(down)}")
        return
    vague = next((each for each in (*said, *runs) if each.type in _REASONS and each.status != "True"), None)
    if vague is not None:
        yield _Finding("Unknown", _REASONS[vague.type], f"{called}: {_words(vague)}")
        return
    also = ", programmed" if any(each.status == "True" for each in runs) else ""
    yield _Finding("True", "Accepted", f"{called}: accepted{also}")


def _bad(body: Body, field: str, reason: str) -> Iterator[_Finding]:
    """What is refused of a pool or a policy. Who says nothing of one does not look at it, and the route tells more."""
    parents, _ = _read(_listed(body, field), _Parent)
    for each in (each for one in parents for each in _read(one.conditions, _Stated)[0]):
        if each.status == "False" and each.type in _REASONS and not _stale(each, body):
            yield _Finding("False", reason, f"{body['kind']} {body['metadata']['name']}: {_words(each)}")


def _same(ref: _Ref, at: Name, section: str | None, namespace: str) -> bool:
    there = (ref.namespace or namespace, ref.name)
    a_gateway = ref.kind in (GATEWAY, None) and ref.group in (GROUP, None)
    return there == at and (ref.section_name or None) == section and a_gateway


def _stale(said: _Stated, body: Body) -> bool:
    generation = body["metadata"].get("generation")
    return said.observed_generation is not None and generation is not None and said.observed_generation < generation


def _words(said: _Stated) -> str:
    reason, message = _line(said.reason, _REASON_CUT), _line(said.message, _CUT)
    holds = _line(said.status, _REASON_CUT)
    return f"{said.type} is {holds}{f', {reason}' if reason else ''}{f': {message}' if message else ''}"


def _line(text: str | None, most: int) -> str:
    """At most so many characters, none of which a terminal obeys."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in shorten(text or "", most))


def _listed(body: Body, field: str) -> Any:
    """A list of a status, or what is there in its place."""
    status = body.get("status")
    return status.get(field) if isinstance(status, dict) else None


def _read(items: Any, kind: type[T]) -> tuple[list[T], bool]:
    """Those that can be read, and whether all could."""
    found: list[T] = []
    whole = isinstance(items, list | None)
    for item in items if isinstance(items, list) else ():
        try:
            found.append(msgspec.convert(item, kind))
        except msgspec.ValidationError:
            whole = False
    return found, whole
