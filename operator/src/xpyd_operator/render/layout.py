"""The members of an instance: what runs in one place each, a pod or the processes of one host.

An instance is what the planner counts. Where it runs in parts, this alone says which there are and what each one's engine
is told, so that both backends only bind addresses, files and devices. Today every instance has one member of its own name.
"""

from __future__ import annotations

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render.engine import MODULE, dp_env, engine_args, shutdown_args
from xpyd_sidecar.contract.ids import InstanceName, Role


class Member(msgspec.Struct, frozen=True):
    """One part of an instance."""

    instance: InstanceName
    index: int
    """From 0, the leader: the one that routers know."""
    name: str
    """Of its pod, or of its folder on a host."""
    devices: int
    """How many devices its engine uses."""
    module: str
    """What Python is to run."""
    args: tuple[str, ...]
    """Its arguments, but for where it listens."""
    env: dict[str, str]
    """Variables that follow from the layout, which nobody may change."""


def layout(service: DisaggService, role: Role, instance: InstanceName, model: str, shared: str = "") -> tuple[Member, ...]:
    """The members of an instance, the leader first.

    Args:
        service: the document.
        role: of the instance.
        instance: its name.
        model: a hub id, or a path as the engine sees it.
        shared: a folder that all engines of a host share; empty where there is none.
    """
    return (
        Member(
            instance=instance,
            index=0,
            name=instance,
            devices=service.spec.role(role).parallelism.devices,
            module=MODULE,
            args=(*engine_args(service, role, model, shared), *shutdown_args(service)),
            env=dp_env(service, role),
        ),
    )
