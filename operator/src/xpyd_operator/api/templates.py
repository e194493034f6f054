"""Pod templates: how one is laid over another, and what of ``spec.template`` each kind of pod gets.

    spec.template            of all pods of a service           ┐
    spec.prefill.template    of a role, laid over it            │ the outcome is laid over the pod that xpyd makes
    spec.decode.template                                        │ (``render.overlay``)
    spec.router.template     of routers in pods of their own    ┘

Maps are merged. Lists of things with names are merged by these (``LISTS``), and a variable or a volume with another source
replaces the one of that name; every other list is replaced. A probe that asks another way (``exec``, ``httpGet`` …)
replaces the one there. This is Kubernetes' strategic merge without its directives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

Template = Mapping[str, Any]


class KeyedList(NamedTuple):
    """A list that is merged by a key, and the lists of that kind inside its items."""

    key: str
    inside: Mapping[str, KeyedList] = {}


_CONTAINERS: Final = KeyedList(
    "name", {"env": KeyedList("name"), "ports": KeyedList("name"), "volumeMounts": KeyedList("mountPath")})
LISTS: Final[Mapping[str, KeyedList]] = {
    "containers": _CONTAINERS,
    "initContainers": _CONTAINERS,
    "volumes": KeyedList("name"),
    "imagePullSecrets": KeyedList("name"),
}
"""Those of a pod's spec."""
_SOURCES: Final = frozenset({"env", "volumes"})
"""Lists whose items have one source each: another one replaces it."""
_WAYS: Final = frozenset({"exec", "httpGet", "tcpSocket", "grpc"})
"""How a probe may ask: in one of these ways."""
ENGINES_ALONE: Final[Mapping[str, frozenset[str]]] = {
    "containers": frozenset({"main"}),
    "initContainers": frozenset({"sidecar", "xpyd-install"}),
    "volumes": frozenset({"shm", "home", "cache", "kv", "offload"}),
}
"""Items of ``spec.template`` that routers do not get: they have nothing of that name."""
ROUTERS_ALONE: Final[Mapping[str, frozenset[str]]] = {"containers": frozenset({"router"})}
"""Items of ``spec.template`` that engines do not get."""
_DEVICES: Final = ("resourceClaims",)
"""Fields of ``spec.template`` that routers do not get: the devices would be theirs."""


def of_engine(common: Template | None, own: Template | None) -> dict[str, Any] | None:
    """The template of a role: its own, over what of the common one is for engines."""
    return _both(None if common is None else _for(common, ROUTERS_ALONE), own)


def of_router(common: Template | None, own: Template | None) -> dict[str, Any] | None:
    """The template of routers: their own, over what of the common one is for them."""
    return _both(None if common is None else _for(common, ENGINES_ALONE, _DEVICES), own)


def merge(
    base: Mapping[str, Any], given: Mapping[str, Any], lists: Mapping[str, KeyedList], *, keep: bool = False
) -> dict[str, Any]:
    """``given`` laid over ``base``. ``null`` takes a field away, or with ``keep`` stays, so that it takes it away later."""
    made = dict(base)
    for key, part in given.items():
        below = made.get(key)
        if part is None:
            made.pop(key, None)
            if keep:
                made[key] = None
        elif key in lists and _keyed(part, lists[key]) and (below is None or _keyed(below, lists[key])):
            made[key] = _list(below or [], part, lists[key], sources=key in _SOURCES, keep=keep)
        elif isinstance(part, dict):
            known = below if isinstance(below, dict) else {}
            if key.endswith("Probe") and (ways := _WAYS & part.keys()):
                known = {name: one for name, one in known.items() if name not in _WAYS - ways}
            made[key] = merge(known, part, {}, keep=keep)
        else:
            made[key] = part
    return made


def variables(template: Template, path: str, only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The variables of a template's containers, each with its path; ``only``: those of the container of that name."""
    spec = template.get("spec")
    lists = {kind: spec.get(kind) for kind in ("initContainers", "containers")} if isinstance(spec, dict) else {}
    for kind, containers in lists.items():
        for index, one in enumerate(containers if isinstance(containers, list | tuple) else ()):
            env = one.get("env") if isinstance(one, dict) and only in ("", one.get("name")) else None
            for at, variable in enumerate(env if isinstance(env, list | tuple) else ()):
                if isinstance(variable, dict) and isinstance(variable.get("name"), str):
                    yield f"{path}.spec.{kind}[{index}].env[{at}]", variable


def origin(path: str, whole: Any, *written: tuple[str, Any]) -> str | None:
    """Where something of a merged template was written.

    Args:
        path: below the template, e.g. ``.spec.containers[1].image``.
        whole: the merged template.
        written: templates that it was merged from, each with its path, the last one first.
    """
    return next((f"{at}{found}" for at, one in written if (found := _below(path, whole, one)) is not None), None)


def _both(common: dict[str, Any] | None, own: Template | None) -> dict[str, Any] | None:
    if common is None or own is None:
        return dict(own) if own is not None else common
    made = dict(common)
    for key, part in own.items():
        below = common.get(key)
        if isinstance(part, dict) and isinstance(below, dict):
            made[key] = merge(below, part, LISTS if key == "spec" else {}, keep=True)
        else:
            made[key] = part
    return made


def _for(common: Template, without: Mapping[str, frozenset[str]], fields: tuple[str, ...] = ()) -> dict[str, Any]:
    spec = common.get("spec")
    if not isinstance(spec, dict):
        return dict(common)
    left = {key: part for key, part in spec.items() if key not in fields}
    for key, names in without.items():
        if isinstance(left.get(key), list | tuple):
            left[key] = [one for one in left[key] if not (isinstance(one, dict) and one.get("name") in names)]
            if not left[key] and spec[key]:
                del left[key]
    return {**common, "spec": left}


def _keyed(items: Any, how: KeyedList) -> bool:
    return isinstance(items, list | tuple) and all(
        isinstance(one, dict) and isinstance(one.get(how.key), str) for one in items)


def _list(
    base: list[Any] | tuple[Any, ...], given: list[Any] | tuple[Any, ...], how: KeyedList, *, sources: bool, keep: bool
) -> list[Any]:
    made = {item[how.key]: item for item in base}
    for item in given:
        known = made.get(item[how.key], {})
        if sources and known.keys() != item.keys():
            known = {}
        made[item[how.key]] = merge(known, item, how.inside, keep=keep)
    return list(made.values())


def _below(path: str, whole: Any, one: Any) -> str | None:
    """The same path in one of the templates that were merged, whose lists may have another order; None: it is not there."""
    found = ""
    for name, index, key in _steps(path):
        if index:
            item = whole[int(index)] if isinstance(whole, list | tuple) and int(index) < len(whole) else None
            at = _place(item, one, int(index))
            if at is None:
                return None
            found, whole, one = f"{found}[{at}]", item, one[at]
            continue
        step = name or key
        if not isinstance(one, dict) or step not in one:
            return None
        found = f"{found}.{name}" if name else f'{found}["{key}"]'
        whole, one = whole.get(step) if isinstance(whole, dict) else None, one[step]
    return found


def _steps(path: str) -> Iterator[tuple[str, str, str]]:
    yield from re.findall(r'\.([^.\[\]]+)|\[([0-9]+)\]|\["((?:[^"\\]|\\.)*)"\]', path)


def _place(item: Any, items: Any, index: int) -> int | None:
    """Where an item of a merged list is in another one: by its name, or else at the same place if it is equal."""
    for at, other in enumerate(items if isinstance(items, list | tuple) else ()):
        if isinstance(item, dict) and isinstance(other, dict):
            key = next((key for key in ("mountPath", "name") if isinstance(item.get(key), str)), None)
            if key is not None and item[key] == other.get(key):
                return at
        if at == index and item == other:
            return at
    return None
