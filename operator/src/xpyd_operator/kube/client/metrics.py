"""What the operator counts: Prometheus metrics ``xpyd_operator_*``.

Belongs here: names, labels, buckets. Label values come from small fixed sets (never from objects' names), so that the
number of series is bounded.
"""

from __future__ import annotations

import importlib.metadata

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ROUND = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUEST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one operator, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._rounds = Histogram("xpyd_operator_reconcile_seconds",
                                 "One round of one service, from observing to its last write", buckets=_ROUND,
                                 registry=self.registry)
        self._results = Counter("xpyd_operator_reconcile", "Rounds by result", ["result"], registry=self.registry)
        self._requests = Counter("xpyd_operator_api_requests", "Requests to the API server; code 0: no answer came",
                                 ["verb", "resource", "code"], registry=self.registry)
        self._seconds = Histogram("xpyd_operator_api_request_seconds",
                                  "From sending a request to its answer or its deadline", ["verb", "resource"],
                                  buckets=_REQUEST, registry=self.registry)
        self._errors = Counter("xpyd_operator_errors", "What went wrong, by kind", ["kind"], registry=self.registry)
        self._watched = Counter("xpyd_operator_watch_events", "Objects that the watches brought", ["kind", "type"],
                                registry=self.registry)
        self._dropped = Counter("xpyd_operator_events_dropped", "Kubernetes Events left unwritten, to keep within bounds",
                                registry=self.registry)
        self._planned = Counter("xpyd_operator_planner_decisions", "Decisions of the planner, by its mode and what it did",
                                ["mode", "kind"], registry=self.registry)
        self.tasks = Gauge("xpyd_operator_tasks", "Services that are being looked after", registry=self.registry)
        self.waiting = Gauge("xpyd_operator_queue", "Services that were woken and whose round has not begun",
                             registry=self.registry)
        self.leader = Gauge("xpyd_operator_leader", "1 while this process holds the Lease", registry=self.registry)
        build = Gauge("xpyd_operator_build_info", "1, with the version as a label", ["version"], registry=self.registry)
        build.labels(importlib.metadata.version("xpyd-operator")).set(1)

    def reconcile(self, seconds: float, result: str) -> None:
        """A round ended. ``result``: ``same``, ``changed``, ``failed`` and the like."""
        self._rounds.observe(seconds)
        self._results.labels(result).inc()

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """A request to the API server was answered with ``code``, or with 0 not at all.

        ``resource`` is the plural, with the subresource after a slash where there is one (``disaggservices/status``).
        """
        self._requests.labels(verb, resource, str(code)).inc()
        self._seconds.labels(verb, resource).observe(seconds)

    def errors(self, kind: str) -> None:
        """Something went wrong. ``kind`` is the class of an exception or a word of ours."""
        self._errors.labels(kind).inc()

    def on_watched(self, kind: str, type_: str) -> None:
        """A watch brought an object. ``type_``: ``listed``, ``added``, ``modified`` or ``deleted``."""
        self._watched.labels(kind, type_).inc()

    def on_planned(self, mode: str, kind: str) -> None:
        """The planner decided. ``mode``: ``auto`` or ``observe``; ``kind``: ``switch``, ``add``, ``remove`` or ``stay``."""
        self._planned.labels(mode, kind).inc()

    def event_dropped(self, count: int = 1) -> None:
        """Kubernetes Events were not written."""
        self._dropped.inc(count)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
