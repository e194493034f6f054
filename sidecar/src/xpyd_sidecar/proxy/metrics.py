"""What the router counts: Prometheus metrics ``xpyd_router_*``.

Belongs here: names, labels, buckets. Label values come from small fixed sets (never from clients), so that the number of
series is bounded; only ``instance`` grows with the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.routing.roster import Member

_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one router."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("xpyd_router_requests", "Generation requests by outcome", ["api", "outcome"],
                                 registry=self.registry)
        self._legs = Counter("xpyd_router_legs", "Legs sent to engines by how they ended", ["role", "outcome"],
                             registry=self.registry)
        self._retries = Counter("xpyd_router_retries", "Legs sent beyond the first pair of a request",
                                registry=self.registry)
        self._beats = Counter("xpyd_router_membership_messages", "Heartbeats and goodbyes by result", ["result"],
                              registry=self.registry)
        self._ttft = Histogram("xpyd_router_first_byte_seconds", "From a request's arrival to the first byte of its stream",
                               ["api"], buckets=_TTFT, registry=self.registry)
        self._seconds = Histogram("xpyd_router_request_seconds", "From a request's arrival to its end", ["api"],
                                  buckets=_SECONDS, registry=self.registry)
        self._in_flight = Gauge("xpyd_router_in_flight", "Generation requests being served", registry=self.registry)
        self.registry.register(_Instances(members))
        self.requests_total = 0
        self.requests_failed = 0

    def opened(self) -> None:
        """A generation request is being served."""
        self._in_flight.inc()

    def closed(self, api: str, outcome: str, seconds: float, retries: int) -> None:
        """It ended."""
        self._in_flight.dec()
        self._seconds.labels(api).observe(seconds)
        if retries:
            self._retries.inc(retries)
        self.counted(api, outcome)

    def counted(self, api: str, outcome: str) -> None:
        """A request that ended with ``outcome``."""
        self._requests.labels(api, outcome).inc()
        self.requests_total += 1
        if outcome in {"failed", "broken", "timeout", "unavailable"}:
            self.requests_failed += 1

    def first_byte(self, api: str, seconds: float) -> None:
        """A stream began."""
        self._ttft.labels(api).observe(seconds)

    def leg_ended(self, role: Role, outcome: str) -> None:
        """A leg ended."""
        self._legs.labels(role.value, outcome).inc()

    def message(self, result: str) -> None:
        """A membership message: taken, refused, or undecodable."""
        self._beats.labels(result).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _Instances(Collector):
    """Instances by state, and open legs per instance, read when asked."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily("xpyd_router_instances", "Known instances", labels=["role", "state"])
        legs = GaugeMetricFamily("xpyd_router_legs_open", "Open legs of this router", labels=["instance", "role"])
        counts: dict[tuple[str, str], int] = {}
        for member in self._members():
            key = (member.role.value, "suspended" if member.suspended else member.state.value)
            counts[key] = counts.get(key, 0) + 1
            legs.add_metric([member.name, member.role.value], member.in_flight)
        for (role, state), number in sorted(counts.items()):
            states.add_metric([role, state], number)
        return [states, legs]
