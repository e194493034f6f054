"""``spec.router``: how requests come in and how instances are chosen."""

from __future__ import annotations

from typing import Annotated, Final, Literal

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
from xpyd_sidecar.contract.launch import RouterConfig, ledger_bytes

_ADMIN_PORTS = (10002, 10003, 10004)
SIDECARS: Final = 8
"""Most decode pods that route by themselves: more share no work, and each hears every heartbeat."""
PROCESS_BYTES: Final = 512 << 20
"""Memory of a router beside what it holds for clients (``render.sidecar.router_resources`` says for what)."""
_DEFAULTS: Final = RouterConfig()
BODY_BUDGET: Final = _DEFAULTS.body_budget_bytes
"""Bytes that a router holds for its clients where no limit of memory is written."""
QUEUE_TIMEOUT_S: Final = _DEFAULTS.queue_timeout_s
"""Longest wait for a place."""
PAIR_TIMEOUT_S: Final = _DEFAULTS.pair_timeout_s
"""How long decode waits for prefill's announcement."""
HEARTBEAT_S: Final = _DEFAULTS.heartbeat_s
"""Between two beats of an instance."""


class Ports(Part, frozen=True):
    """Ports of the router. Below 1024 they would need a privilege that engine pods do not have."""

    http: Port = 10001
    """HTTP port for clients. Set it where the port is taken, as by a second service on one host."""
    members: Port = 30001
    """Port for the heartbeats of instances. Set it where the port is taken."""
    admin: Port | None = None
    """HTTP port for probes, metrics, the operator and the dashboard. Default: the first of 10002, 10003 and 10004 that
    is none of the others. Set it where the port is taken.
    """

    @property
    def admin_or_default(self) -> int:
        """The admin port. A service that had 10002 for something else before there was one keeps it for that."""
        if self.admin is not None:
            return self.admin
        return next(port for port in _ADMIN_PORTS if port not in (self.http, self.members))


class SkipPrefill(Part, frozen=True):
    """Which prompts go to decode alone."""

    below_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Prompts of which decode has fewer tokens to compute: short ones (text: estimated), and longer ones that it
    probably holds but for so many. An instance has no more of such rests at once. 0: none. Set it where many prompts
    are short, or conversations come back to the decode that has them.
    """


class Tls(Part, frozen=True):
    """HTTPS for clients."""

    secret: ObjectName | None = None
    """Secret of type kubernetes.io/tls (`tls.crt`, `tls.key`). Default: plain HTTP. Set it where clients come over a
    network that others share.
    """


class Cors(Part, frozen=True):
    """Pages of other origins."""

    origins: Origins = ()
    """Origins (`https://app.example`) whose pages may send requests from a browser and read the answers; `*`: all.
    Default: none. Set it for a web page that asks the router itself.
    """


class Tracing(Part, frozen=True):
    """Spans of requests."""

    endpoint: Url | None = None
    """OpenTelemetry collector, OTLP over HTTP. Default: no spans. Ports other than 443 need a rule in
    `networkPolicy.egress`. Set it where you collect traces.
    """


class RouterResources(Part, frozen=True):
    """Resources of one router, as in Kubernetes. What is not named has its default."""

    limits: Quantities = msgspec.field(default_factory=dict)
    """Most that one router may use."""
    requests: Quantities = msgspec.field(default_factory=dict)
    """What the scheduler reserves for one router. Default: the limits that are written; without them 250m of cpu and
    256 MiB of memory."""


class Router(Part, frozen=True):
    """How requests come in and how instances are chosen."""

    placement: Literal["sidecar", "deployment"] = "sidecar"
    """Routers run beside decode engines, or in pods of their own. Only the latter can answer when no decode is left.
    Set it to `deployment` for that, for routers on nodes without devices, or to scale them apart.
    """
    replicas: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Routers. With placement sidecar the most decode pods that route, 8 by default; the number of heartbeats grows
    with it. With deployment 2 at first by default, and the count is the Deployment's own, which a
    HorizontalPodAutoscaler or `kubectl scale` may write. Set it where a router's processor is full.
    """
    resources: Annotated[RouterResources, Meta(extra={"preserve": True})] | None = None
    """Resources of one router, as in a container: `limits` and `requests`. Of a memory limit 512 MiB are for the
    process, the rest for what it holds for clients: bodies of requests, ids of prompts, what they have not read. Beyond
    that the slowest bodies are ended with 408, answers that nobody reads are cut, and new requests refused with 503
    (429 for a key that has half of it). Default: 250m of cpu and 256 MiB reserved, and at most 1 GiB, or 512 MiB and
    six times `maxBodySize` where that is more; `{}`: no resources at all. Not used by `xpyd up`. Set it where requests
    are large or very many.
    """
    template: Preserved | None = None
    """Pod template laid over the pods of routers (placement deployment), as that of a role over its pods; their
    container is named `router`: `imagePullSecrets`, `tolerations`, `securityContext` and so on. Not used by `xpyd up`.
    Set it for nodes, pull secrets and certificates of routers.
    """
    policy: Literal["cost", "round_robin", "random", "least_loaded"] = "cost"
    """How instances are chosen: where the prompt is done soonest, by the tokens that wait there and those of it that
    are probably in the cache; in turn; at random; or the less loaded of two. Set it where prompts have nothing in
    common, or to compare.
    """
    ports: Ports = Ports()
    """Ports of the router."""
    failover: Literal["continue", "exact", "error"] = "continue"
    """When a decode instance fails in mid-answer: another one goes on; only where it gives the very same answer (greedy
    or seeded), and else the client gets an error; or the client gets one always. Set it where each answer must come
    from one engine.
    """
    on_no_prefill: Literal["decode", "reject"] = "decode"
    """When no prefill instance is ready: decode does the prefill, or requests are answered with 503. Set it to `reject`
    where prompts on decode would slow its streams too much.
    """
    skip_prefill: SkipPrefill = SkipPrefill()
    """Which prompts go to decode alone."""
    hold: ShortDuration = "30s"
    """How long a request waits, in every case: where no instance is ready and one is expected (it is starting, it was
    lost a moment ago or its engine restarts), and, up to 30 s, where all are full; then 503 with Retry-After. Set it
    longer to bridge starts, and shorter where clients have somewhere else to go.
    """
    first_token: Literal["decode", "prefill"] = "decode"  # noqa: S105  # a token of an answer
    """Who gives the first token of a stream: `prefill` is sooner, where it is the same answer. Set it where the time to
    the first token counts most.
    """
    tls: Tls = Tls()
    """HTTPS for clients."""
    gateway: GatewayOptions | None = None
    """A route of the Gateway API to the routers. Default: none, and clients reach the Service. Not used by `xpyd up`."""
    tracing: Tracing = Tracing()
    """Spans of requests."""
    api_key_secret: SecretKeyRef | None = None
    """Client keys, one per line. Default: clients need none."""
    hosts: HostNames = ()
    """Names that a router on a loopback address (`xpyd up`) answers for beside localhost, 127.0.0.0/8 and [::1]. Set it
    where this host is reached by a name.
    """
    trusted_proxies: Networks = ()
    """Networks (`10.0.0.0/8`) of proxies: of their connections any number may have brought no request yet. Of another
    address an eighth of all may. Set it where clients come through a proxy.
    """
    cors: Cors = Cors()
    """Pages of other origins."""
    request_timeout: Duration = "1h"
    """Longest time for one request. Set it where answers take longer, or must not take so long."""
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """Requests that one router serves at once; a quarter as many wait for a place, and those beyond get 503 with
    Retry-After. Set it where a router has the memory and files for more, or engines should get less at once.
    """
    max_body_size: Size = "32Mi"
    """Largest request body. Set it for images and audio that are larger."""

    @property
    def request_timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.request_timeout)

    @property
    def most_sidecars(self) -> int:
        """Most decode pods that route, with placement sidecar."""
        return SIDECARS if self.replicas is None else self.replicas

    @property
    def queue_size(self) -> int:
        """Requests that may wait for a place: a quarter of those that are served."""
        return max(1, self.max_in_flight // 4)

    @property
    def queue_timeout_s(self) -> float:
        """Seconds that a request waits for a place: where all are full for half a minute, more waiting only delays the
        answer that more instances are needed.
        """
        return min(QUEUE_TIMEOUT_S, self.hold_s, self.request_timeout_s)

    @property
    def hold_s(self) -> float:
        """Seconds."""
        return seconds(self.hold)

    @property
    def pair_timeout_s(self) -> float:
        """Seconds that decode waits for prefill to announce a request."""
        return min(PAIR_TIMEOUT_S, self.request_timeout_s)

    @property
    def max_body_bytes(self) -> int:
        """Bytes."""
        return size(self.max_body_size)

    @property
    def body_budget_bytes(self) -> int:
        """Bytes for what a router holds for its clients: what a memory limit leaves it beside the process itself, or as
        much as that has by default. At least six times the largest body, also where this is less.
        """
        limit = None if self.resources is None else self.resources.limits.get("memory")
        return BODY_BUDGET if limit is None else max(1, size(limit) - PROCESS_BYTES)

    @property
    def held_bodies_bytes(self) -> int:
        """Bytes that one router may hold for its clients: its budget, and room for the largest request in any case."""
        return ledger_bytes(self.body_budget_bytes, self.max_body_bytes)

