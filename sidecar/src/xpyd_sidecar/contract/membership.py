"""Heartbeats: what an agent tells every router, and what the router answers (DESIGN "Membership").

Transport: ZMQ, DEALER (agent) to ROUTER (port 30001), CURVE; one msgpack message per frame.

Wire history
    1   first version
"""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State

WIRE_VERSION = 1


class Load(msgspec.Struct, frozen=True):
    """What the engine says of itself, at the time of the beat."""

    running: int = 0
    """Requests in the engine's batch."""
    waiting: int = 0
    """Requests queued in the engine, parked ones (waiting for KV) included."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    transfers: int = 0
    """KV transfers open on either side: pushed and not yet taken, or awaited."""


class Parallel(msgspec.Struct, frozen=True):
    """Parallel sizes of the instance."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1


class Heartbeat(msgspec.Struct, frozen=True, tag="beat", tag_field="t"):
    """One beat. Everything the router knows of an instance is in the latest one."""

    v: int
    service: ServiceName
    instance: InstanceName
    seq: int
    """Grows by one per beat of one agent process; the ack carries it back."""
    role: Role
    epoch: int
    """Grows with each role change; a router ignores beats with a lower one."""
    state: State
    incarnation: Incarnation = Incarnation("")
    """Empty until the engine's connector has started."""
    http: tuple[HostPort, ...] = ()
    """HTTP endpoints, one per DP rank that has its own; one entry when a front end serves all ranks."""
    control: tuple[HostPort, ...] = ()
    """KV control addresses, one per DP rank."""
    model: str = ""
    """Served model name."""
    max_model_len: int = 0
    """Tokens; 0: unknown."""
    fingerprint: Fingerprint = Fingerprint("")
    parallel: Parallel = Parallel()
    load: Load = Load()
    interval_s: float = 3.0
    """When the next beat is due, seconds."""
    drained: bool = False
    """State is draining, and nothing runs, waits or moves any more."""


class Goodbye(msgspec.Struct, frozen=True, tag="bye", tag_field="t"):
    """The last message: stop picking this instance now, do not wait for missed beats."""

    v: int
    service: ServiceName
    instance: InstanceName
    incarnation: Incarnation = Incarnation("")


class Ack(msgspec.Struct, frozen=True, tag="ack", tag_field="t"):
    """The router has taken note of a beat or a goodbye (``seq`` is -1 then)."""

    v: int
    seq: int
    router: str
    """The router's name, for logs."""
    refused: str = ""
    """Not empty: the beat was not taken, and why (wrong service, unknown version …)."""
    in_flight: int = 0
    """Legs that this router has open on the instance: a drain waits until there are none."""


Up = Heartbeat | Goodbye
"""Agent to router."""
