"""The members of an instance: what runs in one place each, a pod or the processes of one host.

An instance is what the planner counts. Where it runs in parts, this alone says which there are and what each one's engine
is told, so that both backends only bind addresses, files and devices.

    pods 1                 one member of the instance's name, as if there were none
    one rank (data 1)      workers of one engine: the leader schedules and serves, the others are told (``mp --nnodes``)
    several ranks          each member has a server and its share of the ranks (vLLM's hybrid mode): no token crosses pods

What only a round knows (its life, the leader's host and a port of it) stands as a mark, which the launcher fills in.
"""

from __future__ import annotations

from typing import Final

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import revision_of
from xpyd_operator.plan.names import member_name
from xpyd_operator.render.engine import MODULE, dp_env, engine_args, queue_env, shutdown_args
from xpyd_sidecar.contract.group import LEADER_HERE, LIFE_HERE, PORT_HERE
from xpyd_sidecar.contract.ids import InstanceName, Role

FOLLOWING: Final = "xpyd_sidecar.engine.compat.follower"
"""Runs workers of an engine that is elsewhere. vLLM's own module takes ``--headless`` and starts a whole engine."""


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
    size: int = 1
    """Members of the instance."""
    serves: bool = True
    """Its engine has an HTTP server."""
    ranks: tuple[int, ...] = ()
    """Data-parallel ranks whose records it has; empty: the leader has those of all."""


def layout(
    service: DisaggService, role: Role, instance: InstanceName, model: str, shared: str = ""
) -> tuple[Member, ...]:
    """The members of an instance, the leader first.

    Args:
        service: the document.
        role: of the instance.
        instance: its name.
        model: a hub id, or a path as the engine sees it.
        shared: a folder that all engines of a host share; empty where there is none.
    """
    parallel = service.spec.role(role).parallelism
    pods = parallel.pods
    life = "" if pods == 1 else LIFE_HERE
    args = (*engine_args(service, role, model, shared, life), *shutdown_args(service))
    env = dp_env(service, role) | queue_env(service, role)
    if pods == 1:
        return (Member(instance, 0, instance, parallel.devices, MODULE, args, env),)
    return tuple(
        Member(
            instance=instance,
            index=index,
            name=member_name(instance, index),
            devices=parallel.devices // pods,
            module=MODULE if index == 0 or parallel.data > 1 else FOLLOWING,
            args=(*args, *(_ranks(index, parallel.data // pods) if parallel.data > 1 else _node(index, pods))),
            env=env,
            size=pods,
            serves=index == 0 or parallel.data > 1,
            ranks=_share(index, parallel.data // pods) if parallel.data > 1 else (),
        )
        for index in range(pods)
    )


def digest(members: tuple[Member, ...], image: str = "") -> str:
    """Stands for all that they are made of: members of two layouts never run together, nor of two releases of xpyd, where
    ``image`` is that of its containers.
    """
    return revision_of({"members": msgspec.to_builtins(members)} | ({"image": image} if image else {}))


def _share(index: int, each: int) -> tuple[int, ...]:
    return tuple(range(index * each, (index + 1) * each))


def _node(index: int, pods: int) -> tuple[str, ...]:
    """A member of one engine. ``mp`` is said, since with several nodes vLLM would otherwise look for Ray first."""
    following = ("--headless", "--api-server-count", "0") if index else ()
    return ("--distributed-executor-backend", "mp", "--nnodes", str(pods), "--node-rank", str(index),
            "--master-addr", LEADER_HERE, "--master-port", PORT_HERE, *following)


def _ranks(index: int, each: int) -> tuple[str, ...]:
    """A member with ranks of its own; how many there are in all is said already."""
    return ("--data-parallel-size-local", str(each), "--data-parallel-start-rank", str(index * each),
            "--data-parallel-hybrid-lb", "--data-parallel-address", LEADER_HERE, "--data-parallel-rpc-port", PORT_HERE)
