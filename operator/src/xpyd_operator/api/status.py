"""What the operator says of a service or a pool."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import Part

Revisions = Annotated[tuple[str, ...], Meta(extra={"max_items": 16})]


class Condition(Part, frozen=True):
    """One aspect of the state, as usual in Kubernetes."""

    type: Annotated[str, Meta(max_length=316)]
    """Which aspect. `Ready`: a request is answered now, by prefill (where it is wanted) and decode of one fingerprint,
    through a router that clients reach; reason `AllReady` when as many serve as are wanted, `Serving` when fewer do.
    `Progressing`: something changes or waits. `Degraded`: a person should look. `Compatible`: prefill and decode can
    exchange KV. `Disaggregating`: decode receives the prompts that it was to receive, instead of computing them; the
    message has the share of their tokens and the links with their GB/s. `Valid`: the document is used as it is.
    `AdaptersLoaded`: only there with `adapters`: every instance that serves has them; no other condition follows it.
    `Prefetched`: only there with `model.prefetch`: images and weights are there before an instance; no other condition
    follows it.
    `GatewayReady`: only there with `router.gateway`: every gateway that it names takes the route; no other condition
    follows it. `Stalled`: only there while nothing will move before a person does something, or the newest document is
    refused. `Suspended`: only there while `suspend` is true; once nothing runs it is `True`, and nothing is said of
    `Ready`."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Meta(max_length=1024)]
    """One word that a program can compare."""
    message: Annotated[str, Meta(max_length=32768)] = ""
    """What is so, and what a person can do about it."""
    last_transition_time: Annotated[str, Meta(extra={"format": "date-time"})] | None = None
    """When `status` changed last."""
    observed_generation: int | None = None
    """Generation of the object that this was said of."""


class PoolCondition(Condition, frozen=True):
    """One aspect of the state of a pool, as usual in Kubernetes."""

    type: Annotated[str, Meta(max_length=316)]
    """Which aspect. `Ready`: as many instances of the role serve as are wanted. `Limited`: a bound of the service
    (`limits`, or the other role's count) keeps the count from what was asked for; the message names it."""


_LISTED = Meta(extra={"max_items": 32, "merge_key": "type"})
Conditions = Annotated[tuple[Condition, ...], _LISTED]
PoolConditions = Annotated[tuple[PoolCondition, ...], _LISTED]


class RoleStatus(Part, frozen=True):
    """Instances of one role."""

    wanted: int = 0
    """How many there should be."""
    ready: int = 0
    """How many serve."""
    starting: int = 0
    """How many are on their way."""
    draining: int = 0
    """How many finish their last requests."""
    failed: int = 0
    """How many do not start or have crashed, and wait for another try."""
    updated: int = 0
    """How many of those that stay are of the wanted revision."""
    revision: str | None = None
    """Revision that the spec asks for."""


class RolesStatus(Part, frozen=True):
    """Instances of each role."""

    prefill: RoleStatus = RoleStatus()
    """Prefill instances."""
    decode: RoleStatus = RoleStatus()
    """Decode instances."""


class ServiceStatus(Part, frozen=True):
    """What the operator says of a service."""

    observed_generation: int | None = None
    """Generation of the spec that this status is about."""
    conditions: Conditions = ()
    """Aspects of the state."""
    model: str | None = None
    """Name that clients ask for."""
    wanted: str | None = None
    """Wanted instances, e.g. `1P3D`."""
    ready: str | None = None
    """Ready instances, e.g. `1P2D`."""
    url: str | None = None
    """Where clients reach the service inside the cluster."""
    roles: RolesStatus = RolesStatus()
    """Instances of each role."""
    revision: str | None = None
    """Revision that the spec asks for; `<prefill>/<decode>` where the roles differ."""
    revisions: Revisions = ()
    """Revisions that run, newest first; one when no rollout is going on."""
    fingerprints: Revisions = ()
    """KV fingerprints of the running engines; pairs are made only within one."""
    step_sync: str | None = None
    """How data-parallel ranks are kept in step: auto, rpc, shm or disabled; absent where no role has several."""
    plan: str | None = None
    """What happens next, in words."""


class PoolStatus(Part, frozen=True):
    """What the operator says of a pool."""

    observed_generation: int | None = None
    """Generation of the spec that this status is about."""
    replicas: int = 0
    """Instances that exist."""
    ready_replicas: int = 0
    """Instances that serve."""
    selector: str | None = None
    """Label selector of the instances' pods, for autoscalers."""
    conditions: PoolConditions = ()
    """Aspects of the state."""
