"""Asking every rule about a service."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from xpyd_operator.api import (
    outside,
    rules_adapters,
    rules_devices,
    rules_gateway,
    rules_instances,
    rules_kv,
    rules_policies,
    rules_service,
    rules_zero,
    templates,
)
from xpyd_operator.api.rule import Rule, Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Fault
from xpyd_sidecar.contract.ids import Role

RULES: tuple[Rule, ...] = (
    *rules_instances.RULES, *rules_devices.RULES, *rules_service.RULES, *rules_zero.RULES, *rules_kv.RULES,
    *rules_policies.RULES, *rules_gateway.RULES, *rules_adapters.RULES, *outside.RULES,
)
_ROLES = {f"spec.{role.value}": role for role in Role}


def faults(
    service: DisaggService, target: Target | None, already: Collection[str] = ()
) -> tuple[list[Fault], dict[Target, list[Fault]]]:
    """What the rules find.

    Args:
        service: the document.
        target: where it is to run; None: anywhere.
        already: paths of fields that are faulty by themselves; rules that read one of them are not asked.

    Returns:
        What is wrong for ``target`` (None: for every target), and for None also what is wrong for one target only.
    """
    wrong: list[Fault] = []
    notes: dict[Target, list[Fault]] = {}
    for rule, at, section in sections(service):
        if (rule.target not in (None, target) and target is not None) or _blocked(at, rule.reads, already):
            continue
        found = [Fault(_written(service, at, path), message) for path, message in rule.wrong(section)]
        if rule.target in (None, target):
            wrong += found
        elif found and rule.target is not None:
            notes.setdefault(rule.target, []).extend(found)
    return wrong, notes


def sections(service: DisaggService) -> Iterator[tuple[Rule, str, Any]]:
    """Each rule with each section of the service that it holds for: its path and its value."""
    for rule in RULES:
        for at in rule.at:
            section = _section(service, at)
            if section is not None:
                yield rule, at, section


def _section(service: DisaggService, at: str) -> Any:
    if at in _ROLES:
        return service.spec.role(_ROLES[at])
    section: Any = service
    for name in at.split("."):
        if section is None:
            return None
        kind = type(section)
        section = getattr(section, kind.__struct_fields__[kind.__struct_encode_fields__.index(name)])
    return section


def _written(service: DisaggService, at: str, path: str) -> str:
    """The path of a finding: of a role's template, which is laid over that of all pods, where that part was written."""
    below = path.removeprefix("template")
    if at in _ROLES and below != path and service.spec.template is not None:
        both = ((f"{at}.template", service.spec.written_section(_ROLES[at]).template),
                ("spec.template", service.spec.template))
        return templates.origin(below, service.spec.role(_ROLES[at]).template, *both) or f"{at}.{path}"
    return f"{at}.{path}" if path else at


def _blocked(at: str, reads: tuple[str, ...], already: Collection[str]) -> bool:
    read = [f"{at}.{field}" for field in reads]
    return any(path == bad or path.startswith(f"{bad}.") for path in (at, *read) for bad in already)
