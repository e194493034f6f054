"""``GET /fleet`` of a router: what it knows, as the operator and ``xpyd status`` read it, and the dashboard beside them.

Authenticated with the admin bearer token (``contract.keys.admin_token``). Readers ignore fields that they do not know, and
every field that came later has a default, so routers and readers of different versions understand each other.
"""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract.adapters import AdapterReport
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.intake import Disaggregation, IntakeRates
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.pair_notes import RefusedPeer
from xpyd_sidecar.contract.totals import Totals


class FleetInstance(msgspec.Struct, frozen=True):
    """One instance as this router sees it."""

    instance: InstanceName
    role: Role
    epoch: int
    state: State
    incarnation: Incarnation
    fingerprint: Fingerprint
    http: tuple[HostPort, ...]
    control: tuple[HostPort, ...]
    model: str
    load: Load
    drained: bool
    in_flight: int
    """Legs of this router that are open on the instance."""
    beat_age_s: float
    """Seconds since the last beat."""
    suspended: str = ""
    """Not empty: not picked at present, and why."""
    ejected: str = ""
    """Not empty: not picked at present, since it fails or is silent while others are not, and why."""
    ejected_by: tuple[str, ...] = ()
    """Routers that have ejected it, as it tells all routers."""
    stalled_s: float = 0.0
    """Its core has requests of this router and has not stepped for so long, which is longer than its steps explain; 0: it
    steps, has none, or does not tell."""
    cached: int = 0
    """Beginnings of prompts that this router takes to be in its prefix cache, about; 0 where it chooses without regard to
    that."""
    served_s: float = 0.0
    """Legs a second that ended well there, of this router."""
    refused: tuple[RefusedPeer, ...] = ()
    """Prefill engines whose KV it has found that it cannot take, so that this router does not pair them."""
    links: tuple[str, ...] = ()
    """Words on links of it that are worse than they could be."""
    adapters: AdapterReport | None = None
    """How far it has followed the order of adapters; None: nothing is known of any."""
    intake: IntakeRates | None = None
    """What comes to it as KV, and what of prompts it computes; None: it does not tell, or has told but once."""


def words_of_ejection(instance: FleetInstance) -> str:
    """Why routers do not pick it though it lives; empty where they do."""
    if instance.ejected or not instance.ejected_by:
        return instance.ejected
    return f"it was ejected by {', '.join(instance.ejected_by)}"


class Quantiles(msgspec.Struct, frozen=True):
    """Durations within the window, seconds; zeros where ``count`` is 0."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Rates(msgspec.Struct, frozen=True):
    """Requests, tokens and other events a second, on average over the window of ``/fleet``."""

    requests: float = 0.0
    """Requests that ended."""
    failed: float = 0.0
    retries: float = 0.0
    continued: float = 0.0
    tokens: float = 0.0
    """Generated tokens relayed, where they could be counted."""
    bytes: float = 0.0
    """Of answers, towards clients."""


class FleetPair(msgspec.Struct, frozen=True):
    """KV that went from a prefill to a decode instance within the window, the busiest pairs first."""

    prefill: InstanceName
    decode: InstanceName
    count: int
    per_s: float
    handover_s: float
    """From the end of the prefill leg to decode's first event, mean."""


class FleetFailure(msgspec.Struct, frozen=True):
    """A request that failed, for whatever reason but the client's own."""

    at: float
    """Seconds since 1970."""
    outcome: str
    status: int
    detail: str
    request: str
    transfer: str = ""
    """This and what follows is empty where no leg was sent."""
    prefill: str = ""
    decode: str = ""
    attempt: int = 0


class FleetNews(msgspec.Struct, frozen=True):
    """A change of the roster."""

    at: float
    """Seconds since 1970."""
    instance: str
    what: str


class Fleet(msgspec.Struct, frozen=True):
    """Everything a router knows."""

    service: ServiceName
    router: str
    uptime_s: float
    settled: bool
    """The router has listened for one beat interval plus the agents' re-resolve interval: the roster is complete."""
    instances: tuple[FleetInstance, ...]
    requests_total: int = 0
    requests_failed: int = 0
    draining: bool = False
    """The router takes no new requests."""
    in_flight: int = 0
    queued: int = 0
    """Requests that wait for a place, or for an instance that is expected."""
    window_s: int = 0
    """What rates, latencies and pairs are over, seconds."""
    rates: Rates = Rates()
    latencies: dict[str, Quantiles] = {}
    """ttft, tpot, total (the whole request), queue, handover."""
    pairs: tuple[FleetPair, ...] = ()
    failures: tuple[FleetFailure, ...] = ()
    """The latest, oldest first."""
    totals: Totals = Totals()
    """Since the start, for who asks now and then."""
    changes: tuple[FleetNews, ...] = ()
    """Of the roster, the latest, oldest first."""
    disaggregation: Disaggregation = Disaggregation()
    idle_s: float | None = None
    """Seconds since the last request that generates was let in or ended, at the most since the router began; 0: one is in
    flight, queued or held. None: an older router, that does not tell."""
