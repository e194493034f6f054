"""How a service changes: ``spec.drain``, ``rollout``, ``limits``, ``planner`` and ``networkPolicy``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import CountOrPart, CountOrShare, Duration, Latency, Part, Preserved, Window
from xpyd_operator.api.durations import seconds


class DrainOptions(Part, frozen=True):
    """How an instance leaves."""

    timeout: Duration = "10m"
    """How long running requests may go on before the instance ends all the same. Set it above the longest answers that
    must not be cut.
    """

    @property
    def timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.timeout)


class Rollout(Part, frozen=True):
    """How a new revision replaces the old one. Counts are per role, shares are of the wanted count of the role."""

    max_surge: CountOrShare = 1
    """Instances above the wanted count while rolling, as a number or a share, which is rounded up. 0 where no device is
    spare; not together with `maxUnavailable` 0. Set it higher for a faster rollout.
    """
    max_unavailable: CountOrPart = 0
    """Instances below the wanted count while rolling, as a number or a share, which is rounded down. So many pods may
    be evicted at a time, too (one, where this is 0). Where both shares come to no instance, one may be missing. Set it
    where so much less capacity does for a while.
    """
    switch_window: Window = "30s"
    """How long a surplus of one role waits for a deficit of the other, so that an instance switches its role instead of
    being replaced. 0s: never switch. Set it where instances should keep their role, or counts of both change far apart.
    """

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


class Limits(Part, frozen=True):
    """Bounds on the counts, whoever sets them."""

    max_instances: Annotated[int, Meta(ge=1, le=2000)] | None = None
    """Most instances, both roles together. Set it to the devices that the service may have."""


class Slo(Part, frozen=True):
    """Service level that the planner works for."""

    ttft_p95: Latency | None = None
    """Time to the first token, 95th percentile. Set it to what your users wait for an answer to begin."""
    tpot_p95: Latency | None = None
    """Time per output token, 95th percentile. Set it to the pace at which they read."""


class Planner(Part, frozen=True):
    """Sets the counts of roles that have `scaling`."""

    idle_timeout: Duration = "10m"
    """With `decode.scaling.min` 0, in every mode: both roles go to no instances when no router had a request that
    generates for so long, and for three starts at least; the next request starts them. Set it where starts are dear, or
    devices are.
    """
    mode: Literal["disabled", "observe", "auto"] = "disabled"
    """`observe` writes what it would do into the status; `auto` does it. Set it to `observe` first."""
    slo: Slo = Slo()
    """Service level that the planner works for."""
    interval: Duration = "30s"
    """Time between two decisions. Set it longer for loads that change slowly."""
    late_cost: Annotated[int, Meta(ge=1, le=100)] = 10
    """What a late request costs, in requests: to have one more in time, the planner pays at most for the instance time
    in which so many are answered. More keeps spare instances longer. Set it by what a late answer is worth to you.
    """

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
    """Make a NetworkPolicy: all ports among the pods of the service, clients to the router's port only. Others of yours
    add to it. Always with instances of several pods (`parallelism.pods`), since vLLM authenticates nothing of what
    these say to each other: whoever reaches them runs code in them. Set it to false where something else keeps
    strangers away, or nothing may make policies.
    """
    clients: Annotated[tuple[Preserved, ...], Meta(extra={"max_items": 32})] = ()
    """Who may reach the router, as `from` of a NetworkPolicy. Default: everybody. Set it so that not everybody may ask."""
    egress: Annotated[tuple[Preserved, ...], Meta(extra={"max_items": 32})] = ()
    """Further egress rules, as in a NetworkPolicy. Name resolution and HTTPS (model hub) are always allowed. Set it for
    collectors, stores and proxies.
    """
