"""What audits have found, by pair of instances (``serving.audits``).

Belongs here: three series. Does not belong here: what is counted.

Pairs have a bound, as those of handovers do (``metrics``): what has no place counts as ``other``. When half of the places
are taken, a scrape shows pairs of instances that are gone once more and then forgets them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.router.fleet.roster import FleetMember
from xpyd_sidecar.router.observing.batch import MAX_PAIRS, OTHER
from xpyd_sidecar.router.observing.tally import TallyCounts, TallyTimes

DIFFERENCES: Final = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Of log probabilities: upper ends of buckets."""


class AuditMetrics(Collector):
    """Of one router."""

    def __init__(self, registry: CollectorRegistry, members: Callable[[], Iterable[FleetMember]]) -> None:
        self._members = members
        self._results = TallyCounts(registry, "xpyd_router_audits", "Answers with KV from prefill that were chosen to be "
                                    "computed again without it, by what was found, or why nothing was", ("result",))
        self._differences = TallyTimes(registry, "xpyd_router_audit_difference", "How far the log probability of a first "
                                       "token is from the one without KV from prefill", DIFFERENCES)
        self._pairs: dict[tuple[InstanceName, InstanceName], dict[str, int]] = {}
        registry.register(self)

    def add(self, prefill: InstanceName, decode: InstanceName, result: str, difference: float) -> None:
        """Count one. ``difference``: NaN where nothing was found."""
        self._results.add((result,))
        if math.isnan(difference):
            return
        self._differences.add_all((difference,))
        pair = (prefill, decode)
        if pair not in self._pairs and len(self._pairs) >= MAX_PAIRS:
            pair = (OTHER, OTHER)
        found = self._pairs.setdefault(pair, {"equal": 0, "differs": 0})
        found[result] += 1

    def collect(self) -> Iterable[Metric]:
        """Audits by pair; where a pair has any, both results are there, so that shares of them can be asked for."""
        family = CounterMetricFamily("xpyd_router_pair_audits", "Audits of which something was found, by pair",
                                     labels=["prefill", "decode", "result"])
        for pair, found in self._pairs.items():
            for result, count in found.items():
                family.add_metric([*pair, result], count)
        if len(self._pairs) > MAX_PAIRS // 2:
            here = {OTHER, *(member.name for member in self._members())}
            self._pairs = {pair: found for pair, found in self._pairs.items() if here.issuperset(pair)}
        return [family]
