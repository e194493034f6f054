"""What data-parallel step sync counts, on the connector's way to ``/metrics``: vLLM has no other for a plugin.

It travels with the outputs of a step, so a rank that runs nothing but dummies is heard of at its next step with tokens.
"""

from __future__ import annotations

from typing import Any

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine.compat import KVConnectorStats, create_metric_per_engine
from xpyd_sidecar.engine.dp_plugin.counters import COUNTERS as STEPS
from xpyd_sidecar.engine.stats import PromMetrics, Stats

COUNTERS = {
    metrics.DP_DUMMIES: "Dummy forwards of this data-parallel rank.",
    metrics.DP_WASTED: "Dummy forwards in steps that the rank had asked for itself and had no use for.",
    metrics.DP_WAKES: "Times that an idle data-parallel rank was granted a step and ran a dummy for it.",
    metrics.DP_WAKE_SECONDS: "From hearing of these grants to beginning the dummies.",
}
GAUGES = {
    metrics.DP_LOCAL: "Forwards that this data-parallel rank has begun.",
    metrics.DP_GRANTED: "The last forward that all data-parallel ranks must run.",
}


class AllStats(Stats):
    """The connector's, and those of steps."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add a later interval."""
        super().aggregate(other)
        self.data.update({name: value for name, value in other.data.items() if name in GAUGES})
        return self


def with_steps(stats: Stats | None) -> Stats | None:
    """``stats`` and what steps have counted since the last call; None if there is nothing to tell."""
    steps = STEPS.take()
    if not steps:
        return stats
    stats = AllStats(data={}) if stats is None else stats
    stats.data.update(steps)
    return stats


class AllMetrics(PromMetrics):
    """The Prometheus side of both."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._steps = {name: create_metric_per_engine(
            self._counter_cls(name=name, documentation=text, labelnames=labelnames), per_engine_labelvalues)
            for name, text in COUNTERS.items()}
        self._levels = {name: create_metric_per_engine(
            self._gauge_cls(name=name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"),
            per_engine_labelvalues) for name, text in GAUGES.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval."""
        rest = {}
        for name, value in transfer_stats_data.items():
            if name in self._steps:
                self._steps[name][engine_idx].inc(value)
            elif name in self._levels:
                self._levels[name][engine_idx].set(value)
            else:
                rest[name] = value
        super().observe(rest, engine_idx)
