"""Heartbeats: what an agent tells every router, and what the router answers (DESIGN "Membership").

Transport: ZMQ, DEALER (agent) to ROUTER (port 30001), CURVE; one msgpack message per frame.

Wire history
    1   first version
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from xpyd_sidecar.contract import adapters, held_prefixes
from xpyd_sidecar.contract.adapters import AdapterReport
from xpyd_sidecar.contract.core_steps import CoreSteps, PromptWork
from xpyd_sidecar.contract.demand import MAX_DEMANDING, RouterDemand
from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.intake import Intake
from xpyd_sidecar.contract.liveness import RestartWish
from xpyd_sidecar.contract.pair_notes import LinkWords, RefusedPeers

WIRE_VERSION = 1
MAX_RANKS = 1024
"""Addresses of one instance."""
MAX_ALSO = adapters.MOST + 256
"""Further names of one instance."""
MAX_ROUTERS = 64
"""Routers that an instance tells of."""
MAX_POISONS = 64
"""Hashes and labels of requests that end engines."""
MAX_ADDED = 64
"""Fields that an engine adds to requests."""
MAX_PREFIXES = 2000
"""Keys of prefixes that one message adds, and that it removes."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Addresses = Annotated[tuple[HostPort, ...], msgspec.Meta(max_length=MAX_RANKS)]
Speaker = Annotated[AgentId, msgspec.Meta(min_length=1)]
RouterName = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Poisons = Annotated[tuple[Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16}|[0-9a-f]{32})$")], ...],
                    msgspec.Meta(max_length=MAX_POISONS)]
Demands = Annotated[tuple[RouterDemand, ...], msgspec.Meta(max_length=MAX_DEMANDING)]
ShortName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
RecentAdapters = Annotated[tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=128)], ...],
                           msgspec.Meta(max_length=adapters.MOST_RECENT)]
Names = Annotated[tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=512)], ...], msgspec.Meta(max_length=MAX_ALSO)]


class Drafts(msgspec.Struct, frozen=True):
    """What an engine has drafted since its start, tokens; these only grow."""

    drafted: Count = 0
    """Placeholders of the first step after a load included, which are never accepted."""
    accepted: Count = 0
    generated: Count = 0
    """All that it has given out. Each step gives one for a request, and what is accepted besides."""


class Load(msgspec.Struct, frozen=True):
    """What the engine says of itself, at the time of the beat."""

    running: Count = 0
    """Requests in the engine's batch."""
    waiting: Count = 0
    """Requests queued in the engine, parked ones (waiting for KV) included."""
    kv_usage: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Share of KV blocks in use, 0 to 1."""
    transfers: Count = 0
    """KV transfers open on either side: pushed and not yet taken, or awaited."""
    drafts: Drafts | None = None
    """None: it does not speculate."""
    prompts: PromptWork | None = None
    """None: not known."""
    intake: Intake | None = None
    """What became of its prompts; None: it does not tell."""
    adapters: RecentAdapters = ()
    """That it was asked for last, the latest last: those that are in its batch's places, about."""


class Parallel(msgspec.Struct, frozen=True):
    """Parallel sizes of the instance."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1


class Sampling(msgspec.Struct, frozen=True):
    """What an engine adds to how the tokens of its requests are chosen."""

    defaults: Annotated[tuple[tuple[ShortName, float], ...], msgspec.Meta(max_length=MAX_ADDED)] = ()
    """Fields that count where a request has none, sorted: the model's generation config with what overrides it."""
    own: Annotated[tuple[ShortName, ...], msgspec.Meta(max_length=MAX_ADDED)] = ()
    """What it does by itself that may need what was generated before: logits processors, watermarks …, sorted."""
    max_tokens: Count = 0
    """Most tokens that it generates for any request, whatever that asks for; 0: no such bound."""


class Heartbeat(msgspec.Struct, frozen=True, tag="beat", tag_field="t"):
    """One beat. Everything the router knows of an instance is in the latest one."""

    v: int
    service: ServiceName
    instance: InstanceName
    seq: Count
    """Grows by one per beat of one agent process; the ack carries it back."""
    role: Role
    epoch: Count
    """Grows with each role change; a router ignores beats with a lower one."""
    state: State
    agent: Speaker
    """The process that beats."""
    incarnation: Incarnation = Incarnation("")
    """Empty until the engine's connector has started."""
    http: Addresses = ()
    """HTTP endpoints, one per DP rank, equal ones for ranks that share a server; one entry where one serves all ranks."""
    control: Addresses = ()
    """KV control addresses, one per DP rank."""
    model: str = ""
    """Served model name."""
    max_model_len: Count = 0
    """Tokens; 0: unknown."""
    fingerprint: Fingerprint = Fingerprint("")
    parallel: Parallel = Parallel()
    load: Load = Load()
    interval_s: Annotated[float, msgspec.Meta(gt=0)] = 3.0
    """When the next beat is due, seconds."""
    drained: bool = False
    """State is draining, and nothing runs, waits or moves any more."""
    leaving: bool = False
    """State is draining, and the time for it is nearly over: streams that can go on elsewhere must do so now."""
    also: Names = ()
    """What the engine answers to besides ``model``, sorted: LoRA adapters and further served names."""
    sampling: Sampling | None = None
    """None: it could not be found out."""
    refused: RefusedPeers = ()
    """Prefill engines whose KV it has found that it cannot take: the two are not to be paired while it says so."""
    links: LinkWords = ()
    """Words on links of it that are worse than they could be, for people."""
    ejected_by: Annotated[tuple[RouterName, ...], msgspec.Meta(max_length=MAX_ROUTERS)] = ()
    """Routers that say in their acknowledgements that they have ejected it, sorted."""
    core: CoreSteps | None = None
    """How far its cores have got; None: not known."""
    poisons: Poisons = ()
    """What routers say in their acknowledgements that they refuse, sorted."""
    demands: Demands = ()
    """What routers say in their acknowledgements of their tenants."""
    adapters: AdapterReport | None = None
    """How far it has followed the order of adapters; None: nothing is known of any."""
    restart: RestartWish = RestartWish.NONE
    """Whether its engine is to be restarted because it stands still, so that no two of a role are at once."""


class GoodbyeMessage(msgspec.Struct, frozen=True, tag="bye", tag_field="t"):
    """The last message: stop picking this instance now, do not wait for missed beats."""

    v: int
    service: ServiceName
    instance: InstanceName
    agent: Speaker
    incarnation: Incarnation = Incarnation("")


PrefixKeys = Annotated[bytes, msgspec.Meta(max_length=MAX_PREFIXES * held_prefixes.KEY_BYTES)]


class PrefixChanges(msgspec.Struct, frozen=True, tag="prefixes", tag_field="t"):
    """What has changed in an engine's cache of prefixes. It goes only to routers whose acknowledgements say that they take
    it, behind a beat, and is not acknowledged itself.
    """

    v: int
    service: ServiceName
    instance: InstanceName
    agent: Speaker
    incarnation: Incarnation
    seq: Count
    """1 more than that of the one before; the router says in its acknowledgements which one it has taken last."""
    whole: bool = False
    """What was told before does not count: this one and those behind it tell all."""
    added: PrefixKeys = b""
    """Keys (``held_prefixes.pack``) of what is in the cache."""
    removed: PrefixKeys = b""
    """Of what is not, or not any more."""


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
    ejected: bool = False
    """This router does not pick the instance, since requests fail there that end well on others."""
    poisons: Poisons = ()
    """What this router refuses, since engines died of it: hashes of requests (16 bytes) and labels of requests that are
    alike (8 bytes), in hexadecimal digits, sorted."""
    stalled: bool = False
    """Its core does not step, as far as beats tell, though this router has sent it requests that have not ended."""
    demand: RouterDemand | None = None
    """What this router's tenants want of it; None: it has none."""
    hold: bool = False
    """It is not to be restarted now: another of its role is, or most of its role stands still."""
    prefixes: int = -1
    """``seq`` of the ``PrefixChanges`` that this router has taken last of this agent and incarnation; 0: none; -1: it takes
    none.
    """


Up = Heartbeat | GoodbyeMessage
"""Agent to router, of an instance as a whole."""
AgentMessage = Up | PrefixChanges
"""All that an agent says to a router."""
