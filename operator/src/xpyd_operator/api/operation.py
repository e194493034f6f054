"""How a service changes: ``spec.drain``, ``rollout``, ``limits``, ``planner`` and ``networkPolicy``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import CountOrPart, CountOrShare, Duration, Latency, Part, Positive, Preserved, Window
from xpyd_operator.api.durations import seconds


class DrainOptions(Part, frozen=True):
    """How an instance leaves."""

    timeout: Duration = "10m"
    """How long running requests may go on before the instance ends all the same."""

    @property
    def timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.timeout)


class Rollout(Part, frozen=True):
    """How a new revision replaces the old one. Counts are per role, shares are of the wanted count of the role."""

    max_surge: CountOrShare = 1
    """Instances above the wanted count while rolling, as a number or a share, which is rounded up. 0 where no device is
    spare; not together with `maxUnavailable` 0."""
    max_unavailable: CountOrPart = 0
    """Instances below the wanted count while rolling, as a number or a share, which is rounded down. So many pods may be
    evicted at a time, too (one, where this is 0). Where both shares come to no instance, one may be missing."""
    switch_window: Window = "30s"
    """How long a surplus of one role waits for a deficit of the other, so that an instance switches its role
    instead of being replaced. 0s: never switch."""

    @property
    def switch_window_s(self) -> float:
        """Seconds."""
        return seconds(self.switch_window)

    def surge(self, wanted: int) -> int:
        """Instances of a role that may exist above ``wanted``."""
        return _number(self.max_surge, wanted, up=True)

    def unavailable(self, wanted: int) -> int:
        """Instances of a role that may be missing of ``wanted``.

        As Deployments of Kubernetes have it (``ResolveFenceposts``): at least one where the surge is none.
        """
        missing = _number(self.max_unavailable, wanted, up=False)
        return missing if missing or self.surge(wanted) else 1


def _number(given: int | str, wanted: int, *, up: bool) -> int:
    """A number as it is; a share of ``wanted``, rounded up or down."""
    if isinstance(given, int):
        return given
    hundredths = wanted * int(given.removesuffix("%"))
    return -(-hundredths // 100) if up else hundredths // 100


class Ratio(Part, frozen=True):
    """A ratio of prefill to decode instances."""

    prefill: Positive
    """Prefill instances."""
    decode: Positive
    """Decode instances."""


class Limits(Part, frozen=True):
    """Bounds on the counts, whoever sets them."""

    max_instances: Annotated[int, Meta(ge=1, le=2000)] | None = None
    """Most instances, both roles together."""
    min_ratio: Ratio | None = None
    """Fewest prefill instances per decode instance."""
    max_ratio: Ratio | None = None
    """Most prefill instances per decode instance."""


class Slo(Part, frozen=True):
    """Service level that the planner works for."""

    ttft_p95: Latency | None = None
    """Time to the first token, 95th percentile."""
    tpot_p95: Latency | None = None
    """Time per output token, 95th percentile."""


class Planner(Part, frozen=True):
    """Sets the counts of roles that have `scaling`."""

    idle_timeout: Duration = "10m"
    """With `decode.scaling.min` 0, in every mode: both roles go to no instances when no router had a request that generates
    for so long, and for three starts at least; the next request starts them."""
    mode: Literal["disabled", "observe", "auto"] = "disabled"
    """`observe` writes what it would do into the status; `auto` does it."""
    slo: Slo = Slo()
    """Service level that the planner works for."""
    interval: Duration = "30s"
    """Time between two decisions."""
    late_cost: Annotated[int, Meta(ge=1, le=100)] = 10
    """What a late request costs, in requests: to have one more in time, the planner pays at most for the instance time in
    which so many are answered. More keeps spare instances longer."""

    @property
    def idle_timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.idle_timeout)

    @property
    def interval_s(self) -> float:
        """Seconds."""
        return seconds(self.interval)


class NetworkPolicy(Part, frozen=True):
    """Who may reach the pods of a service."""

    enabled: bool = True
    """Make a NetworkPolicy: all ports among the pods of the service, clients to the router's port only."""
    allow_open_pods: bool = False
    """Instances of several pods (`parallelism.pods`) also without that policy. vLLM authenticates nothing of what the pods
    of one instance say to each other: whoever reaches them runs code in them."""
    clients: Annotated[tuple[Preserved, ...], Meta(extra={"max_items": 32})] = ()
    """Who may reach the router, as `from` of a NetworkPolicy. Default: everybody."""
    egress: Annotated[tuple[Preserved, ...], Meta(extra={"max_items": 32})] = ()
    """Further egress rules, as in a NetworkPolicy. Name resolution and HTTPS (model hub) are always allowed."""
