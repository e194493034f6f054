from __future__ import annotations

import random
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from xpyd_sidecar.router.observing.metrics import RouterMetrics, TallyTimes

BOUNDS = (0.01, 0.1, 1.0, 10.0)


class Shown(Collector):
    def __init__(self, *families: TallyTimes) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return [one.family() for one in self.families]


def shown(registry: CollectorRegistry) -> list[str]:
    """Samples and their types, without the times of creation that the library adds."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_they_show_what_the_librarys_own_show() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics, times = RouterMetrics(list), TallyTimes("b", "words", BOUNDS, ("x",))
    ours.register(Shown(times))
    counter = Counter("xpyd_router_legs", "Legs sent to engines by how they ended", ["role", "result"], registry=theirs)
    histogram = Histogram("b", "words", ["x"], buckets=BOUNDS, registry=theirs)
    single = Counter("xpyd_router_retries", "Legs sent beyond the first pair of a request", registry=theirs)
    draw = random.Random(3)
    for _ in range(500):
        x, y = draw.choice("pq"), draw.choice('rs"\n')
        seconds = draw.choice([*BOUNDS, 0.0, draw.expovariate(1), 100.0])
        metrics.count("legs", x, y)
        counter.labels(x, y).inc()
        times.add_all([seconds], (x,))
        histogram.labels(x).observe(seconds)
        metrics.count("retries", by=2)
        single.inc(2)
    counted = [line for line in shown(metrics.registry) if "router_legs_total" in line or "router_retries_total" in line]
    assert sorted(shown(ours) + counted) == sorted(shown(theirs))


def test_metrics_without_labels_are_there_before_anything_happens() -> None:
    registry = CollectorRegistry()
    registry.register(Shown(TallyTimes("b", "words", BOUNDS)))
    assert "xpyd_router_continued_total 0.0" in shown(RouterMetrics(list).registry)
    assert "b_count 0.0" in shown(registry)
