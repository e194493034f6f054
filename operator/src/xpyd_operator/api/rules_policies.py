"""What may stand in ``spec.networkPolicy.clients`` and ``egress``: the fields of peers and rules of a NetworkPolicy.

A field that Kubernetes does not know would close what was to be open, or let the policy be refused as a whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from xpyd_operator.api.operation import NetworkPolicy
from xpyd_operator.api.rule import Finding, Rule

_SELECTOR: Final = "labelSelector"
_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "rule": {"to": "[peer]", "ports": "[port]"},
    "peer": {"podSelector": _SELECTOR, "namespaceSelector": _SELECTOR, "ipBlock": "block"},
    "port": {"protocol": "", "port": "", "endPort": ""},
    "block": {"cidr": "", "except": ""},
    _SELECTOR: {"matchLabels": "", "matchExpressions": "[expression]"},
    "expression": {"key": "", "operator": "", "values": ""},
}
"""Of each part its fields, and which part stands in each: ``[part]`` in a list, empty: none that is looked into."""


def _names(policy: NetworkPolicy) -> Iterator[Finding]:
    for section, part, items in (("clients", "peer", policy.clients), ("egress", "rule", policy.egress)):
        for index, one in enumerate(items):
            yield from _unknown(f"{section}[{index}]", part, one)


def _unknown(path: str, part: str, found: Any) -> Iterator[Finding]:
    if not isinstance(found, dict):
        yield path, f"must be an object with {_listed(_FIELDS[part])}"
        return
    for name, inner in found.items():
        if name not in _FIELDS[part]:
            near = difflib.get_close_matches(str(name), _FIELDS[part], 1)
            right = f"write {near[0]}" if near else f"there are {_listed(_FIELDS[part])}"
            yield f"{path}.{name}", f"is no field of a NetworkPolicy here; {right}"
            continue
        below = _FIELDS[part][name]
        if not below or inner is None:
            continue
        if below.startswith("["):
            yield from _each(f"{path}.{name}", below.strip("[]"), inner)
        else:
            yield from _unknown(f"{path}.{name}", below, inner)


def _each(path: str, part: str, found: Any) -> Iterator[Finding]:
    if not isinstance(found, list | tuple):
        yield path, "must be a list"
        return
    for index, one in enumerate(found):
        yield from _unknown(f"{path}[{index}]", part, one)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec.networkPolicy",),
        reads=("clients", "egress"),
        says="",
        wrong=_names,
        no_twin="CEL does not see fields that the schema only preserves",
    ),
)
