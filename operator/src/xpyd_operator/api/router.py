"""``spec.router``: how requests come in and how instances are chosen."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from xpyd_operator.api.base import (
    Duration,
    HostNames,
    Networks,
    ObjectName,
    Origins,
    Part,
    Port,
    Preserved,
    Quantities,
    SecretKeyRef,
    ShortDuration,
    Size,
    Url,
)
from xpyd_operator.api.durations import seconds
from xpyd_operator.api.gateway import GatewayOptions
from xpyd_operator.api.quantity import size
from xpyd_sidecar.contract.launch import ledger_bytes

_ADMIN_PORTS = (10002, 10003, 10004)


class Ports(Part, frozen=True):
    """Ports of the router. Below 1024 they would need a privilege that engine pods do not have."""

    http: Port = 10001
    """HTTP port for clients."""
    members: Port = 30001
    """Port for the heartbeats of instances."""
    admin: Port | None = None
    """HTTP port for probes, metrics, the operator and the dashboard. Default: the first of 10002, 10003 and 10004 that is
    none of the others."""

    @property
    def admin_or_default(self) -> int:
        """The admin port. A service that had 10002 for something else before there was one keeps it for that."""
        if self.admin is not None:
            return self.admin
        return next(port for port in _ADMIN_PORTS if port not in (self.http, self.members))


class HeartbeatOptions(Part, frozen=True):
    """How routers learn which instances live."""

    interval: ShortDuration = "3s"
    """Time between two beats of an instance."""
    missed: Annotated[int, Meta(ge=1, le=100)] = 3
    """Beats that must be missing before an instance is probed and, if it does not answer, no longer picked."""


class PolicyOptions(Part, frozen=True):
    """Settings of the policy; each belongs to one policy."""

    choices: Annotated[int, Meta(ge=2, le=16)] | None = None
    """`least_loaded`: instances that are compared; 2 by default."""


class SkipPrefill(Part, frozen=True):
    """Which prompts go to decode alone."""

    below_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Prompts with fewer tokens (text: estimated). 0: none."""
    rest_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Prompts that decode probably holds but for this many tokens, which it computes itself: one step's worth, e.g. 1024.
    A decode instance has no more of such rests at once. 0: none."""


class Queue(Part, frozen=True):
    """Requests that wait until an instance has room for them."""

    size: Annotated[int, Meta(ge=0, le=100_000)] = 1024
    """Requests that may wait in one router; beyond it 503 with Retry-After."""
    timeout: ShortDuration = "30s"
    """Longest wait; then 503 with Retry-After."""
    per_instance: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Requests of one router that an instance serves at once. 0: found from what engines report as waiting."""


class Tls(Part, frozen=True):
    """HTTPS for clients."""

    secret: ObjectName | None = None
    """Secret of type kubernetes.io/tls (`tls.crt`, `tls.key`). Default: plain HTTP."""


class Cors(Part, frozen=True):
    """Pages of other origins."""

    origins: Origins = ()
    """Origins (`https://app.example`) whose pages may send requests from a browser and read the answers; `*`: all.
    Default: none."""


class Tracing(Part, frozen=True):
    """Spans of requests."""

    endpoint: Url | None = None
    """OpenTelemetry collector, OTLP over HTTP. Default: no spans. Ports other than 443 need a rule in
    `networkPolicy.egress`."""


class RouterResources(Part, frozen=True):
    """Resources of one router, as in Kubernetes. What is not named has its default."""

    limits: Quantities = msgspec.field(default_factory=dict)
    """Most that one router may use. Default: memory, 512 MiB and `bodyBudget`."""
    requests: Quantities = msgspec.field(default_factory=dict)
    """What the scheduler reserves for one router. Default: the limits that are written; without them 250m of cpu and
    256 MiB of memory."""


class Router(Part, frozen=True):
    """How requests come in and how instances are chosen."""

    placement: Literal["sidecar", "deployment"] = "sidecar"
    """Routers run beside decode engines, or in pods of their own. Only the latter can answer when no decode is left."""
    max_sidecars: Annotated[int, Meta(ge=1, le=64)] = 8
    """Most decode pods that route (placement sidecar); the number of heartbeats grows with it."""
    replicas: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Routers with placement deployment. Default: 2 at first, and the count is the Deployment's own, which a
    HorizontalPodAutoscaler or `kubectl scale` may write."""
    resources: RouterResources | None = None
    """Resources of one router: of the container `router`, or with placement sidecar of `sidecar`. The default
    of memory follows the budget of bodies; `{}`: no resources at all. Not used by `xpyd up`."""
    template: Preserved | None = None
    """Pod template laid over the pods of routers (placement deployment), as that of a role over its pods; their container
    is named `router`: `imagePullSecrets`, `tolerations`, `securityContext` and so on. Not used by `xpyd up`."""
    policy: Literal["cost", "round_robin", "random", "least_loaded"] = "cost"
    """How instances are chosen: where the prompt is done soonest, by the tokens that wait there and those of it that are
    probably in the cache; in turn; at random; or the less loaded of two."""
    policy_options: PolicyOptions = PolicyOptions()
    """Settings of the policy."""
    ports: Ports = Ports()
    """Ports of the router."""
    heartbeat: HeartbeatOptions = HeartbeatOptions()
    """How routers learn which instances live."""
    failover: Literal["continue", "exact", "error"] = "continue"
    """When a decode instance fails in mid-answer: another one goes on; only where it gives the very same answer (greedy or
    seeded), and else the client gets an error; or the client gets one always."""
    on_no_prefill: Literal["decode", "reject"] = "decode"
    """When no prefill instance is ready: decode does the prefill, or requests are answered with 503."""
    skip_prefill: SkipPrefill = SkipPrefill()
    """Which prompts go to decode alone."""
    queue: Queue = Queue()
    """Requests that wait until an instance has room for them."""
    hold: ShortDuration = "30s"
    """How long a request waits where no instance is ready and one is expected: it is starting, it was lost a moment ago or
    its engine restarts; then 503 with Retry-After. Waiting requests are bounded in number and bytes by `bodyBudget`."""
    retry_budget: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Most retries, as a share of recent requests, beyond a small floor."""
    first_token: Literal["decode", "prefill"] = "decode"  # noqa: S105  # a token of an answer
    """Who gives the first token of a stream: `prefill` is sooner, where it is the same answer."""
    tls: Tls = Tls()
    """HTTPS for clients."""
    gateway: GatewayOptions | None = None
    """A route of the Gateway API to the routers. Default: none, and clients reach the Service. Not used by `xpyd up`."""
    tracing: Tracing = Tracing()
    """Spans of requests."""
    dashboard: bool = True
    """Serve `/dashboard`."""
    api_key_secret: SecretKeyRef | None = None
    """Client keys, one per line. Default: clients need none."""
    hosts: HostNames = ()
    """Names that a router on a loopback address (`xpyd up`) answers for beside localhost, 127.0.0.0/8 and [::1]."""
    trusted_proxies: Networks = ()
    """Networks (`10.0.0.0/8`) of proxies: of their connections any number may have brought no request yet. Of another
    address an eighth of all may."""
    cors: Cors = Cors()
    """Pages of other origins."""
    request_timeout: Duration = "1h"
    """Longest time for one request."""
    pair_timeout: Duration = "60s"
    """How long decode waits for prefill to announce a request."""
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """Requests that one router serves at once; those beyond it wait in the queue."""
    max_body_size: Size = "32Mi"
    """Largest request body."""
    body_budget: Size = "512Mi"
    """Bytes that one router holds for its clients: request bodies, heads that are not whole, the ids of prompts, what
    clients have of streams that may go on or have not read. Beyond it the slowest bodies and heads are ended with 408,
    answers that nobody reads are cut, and new requests refused with 503; of several keys each has half of it at most (429).
    An eighth is a reserve for small bodies. At least six times `maxBodySize`, also where this is less: a request takes up
    to five times its body."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two beats."""
        return seconds(self.heartbeat.interval)

    @property
    def request_timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.request_timeout)

    @property
    def queue_timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.queue.timeout)

    @property
    def hold_s(self) -> float:
        """Seconds."""
        return seconds(self.hold)

    @property
    def pair_timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.pair_timeout)

    @property
    def max_body_bytes(self) -> int:
        """Bytes."""
        return size(self.max_body_size)

    @property
    def body_budget_bytes(self) -> int:
        """Bytes."""
        return size(self.body_budget)

    @property
    def held_bodies_bytes(self) -> int:
        """Bytes that one router may hold for its clients: its budget, and room for the largest request in any case."""
        return ledger_bytes(self.body_budget_bytes, self.max_body_bytes)

