"""Names of instances: ``<service>-e<ordinal>``, the lowest free ordinal first; and of the members that some have:
``<instance>-<index>``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from xpyd_sidecar.contract.ids import InstanceName, ServiceName

_ORDINAL = re.compile(r"-e(0|[1-9][0-9]{0,8})")
_MEMBER = re.compile(r"(.+-e(?:0|[1-9][0-9]{0,8}))-(0|[1-9][0-9]?)")


def instance_name(service: ServiceName, ordinal: int) -> InstanceName:
    """The name of a service's instance by its ordinal: ``qwen`` and 3 make ``qwen-e3``."""
    return InstanceName(f"{service}-e{ordinal}")


def ordinal_of(service: ServiceName, instance: str) -> int | None:
    """``qwen``, ``qwen-e3`` → 3; None where the name was not made by ``instance_name`` (an engine joined by hand)."""
    if not instance.startswith(service):
        return None
    match = _ORDINAL.fullmatch(instance, len(service))
    return int(match[1]) if match else None


def member_name(instance: str, index: int) -> str:
    """The name of an instance's member by its index: ``qwen-e3`` and 1 make ``qwen-e3-1``."""
    return f"{instance}-{index}"


def member_of(name: str) -> tuple[InstanceName, int | None]:
    """``qwen-e3-1`` → ``qwen-e3``, 1; an instance that is one pod is its own: ``qwen-e3`` → ``qwen-e3``, None."""
    match = _MEMBER.fullmatch(name)
    return (InstanceName(name), None) if match is None else (InstanceName(match[1]), int(match[2]))


def free_ordinals(taken: Collection[int]) -> Iterator[int]:
    """The ordinals that nobody has, lowest first, without end."""
    used = set(taken)
    ordinal = 0
    while True:
        if ordinal not in used:
            yield ordinal
        ordinal += 1
