"""Whether what a document preserves of Kubernetes' own objects is made of fields that these have: their names, their kinds.

An API server that is asked without strict validation drops a field that it does not know, without a word: pods would run
without the tolerations, limits or rules that somebody believes to have written. Values themselves are its business.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xpyd_operator.api import tables
from xpyd_operator.api.rule import Finding

_NEAR = 0.6


def faults(part: str, found: Any, path: str, only: Iterable[str] = ()) -> Iterator[Finding]:
    """What is wrong with an object.

    Args:
        part: what it is, e.g. ``PodTemplateSpec``.
        found: the object.
        path: where it stands.
        only: the fields that it may have here; none named: all of the part's.
    """
    fields = tables.kubernetes().parts[part]
    allowed = {name: fields[name] for name in only} if only else fields
    yield from _object(part, allowed, found, path)


def _object(part: str, fields: Mapping[str, str], found: Any, path: str) -> Iterator[Finding]:
    if not isinstance(found, dict):
        yield path, f"must be an object with {', '.join(list(fields)[:8])}"
        return
    for name, inner in found.items():
        here = f"{path}.{name}"
        if str(name).startswith("$"):
            continue  # refused where templates are merged, with what holds there
        if name not in fields:
            yield here, f"is no field of {part}; {nearest(str(name), fields)}"
        elif inner is not None:
            yield from _value(fields[name], inner, here)


def nearest(name: str, fields: Iterable[str]) -> str:
    """What to write in place of a name that is not among these."""
    known = list(fields)
    lower = {one.lower(): one for one in known}
    plain = name.lower().replace("_", "").replace("-", "")
    longer = [one for low, one in lower.items() if plain and low.startswith(plain)]
    near = difflib.get_close_matches(plain, lower, 1, _NEAR)
    if longer or near:
        return f"write {longer[0] if longer else lower[near[0]]}"
    return f"there are {', '.join(known[:12])}" + (" …" if len(known) > 12 else "")


def _value(kind: str, found: Any, path: str) -> Iterator[Finding]:
    if kind.startswith("["):
        if not isinstance(found, list | tuple):
            yield path, "must be a list"
            return
        for index, one in enumerate(found):
            yield from _value(kind[1:-1], one, f"{path}[{index}]")
    elif kind.startswith("{"):
        if not isinstance(found, dict):
            yield path, "must be an object (key: value)"
            return
        for key, one in found.items():
            if one is not None:
                yield from _value(kind[1:-1], one, f'{path}["{key}"]')
    elif (fields := tables.kubernetes().parts.get(kind)) is not None:
        yield from _object(kind, fields, found, path)
    elif not _is(kind, found):
        yield path, f"must be {_WORDS[kind]}, not {_shown(found)}{_advice(kind, found)}"


_WORDS = {"text": "text", "int": "a whole number", "number": "a number", "bool": "true or false",
          "quantity": "a quantity, e.g. 2, 500m or 16Gi"}


def _is(kind: str, found: Any) -> bool:
    number = isinstance(found, int | float) and not isinstance(found, bool)
    match kind:
        case "text":
            return isinstance(found, str)
        case "int":
            return isinstance(found, int) and number
        case "number":
            return number
        case "bool":
            return isinstance(found, bool)
        case "quantity":
            return isinstance(found, str) or number
    return True


def _shown(found: Any) -> str:
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, int | float):
        return f"the number {found}"
    return f"the text {found[:60]!r}" if isinstance(found, str) else "an object" if isinstance(found, dict) else "a list"


def _advice(kind: str, found: Any) -> str:
    if kind == "text" and isinstance(found, bool | int | float):
        return f'; put it in quotes: "{str(found).lower() if isinstance(found, bool) else found}"'
    return "; write it without quotes" if isinstance(found, str) else ""
