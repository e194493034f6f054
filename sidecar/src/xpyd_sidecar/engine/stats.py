"""What the connector counts, on its way through vLLM's statistics to ``/metrics`` (names in ``contract.metrics``).

Only the scheduler side counts: ranks report to it, so that a transfer counts once. Counters of data-parallel step sync go
the same way, since vLLM has no other for a plugin: with the outputs of a step, so those of a rank that runs only dummy
forwards arrive with its next step that has tokens.
"""

from __future__ import annotations

from typing import Any

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine.compat import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine
from xpyd_sidecar.engine.dp_plugin.counters import COUNTERS as STEPS
from xpyd_sidecar.engine.reports import LINK

COUNTERS = {
    metrics.PUSHED_BYTES: "KV payload bytes that decode engines confirmed.",
    metrics.PUSHED_TOKENS: "Prompt tokens of the pushes that decode engines confirmed.",
    metrics.LOADED_BYTES: "KV payload bytes loaded from prefill engines.",
    metrics.LOADED_TOKENS: "Prompt tokens whose KV was loaded instead of computed.",
    metrics.WAIT_SECONDS: "From a decode leg's arrival until its KV was in place, summed over loads.",
    metrics.RETRIES: "Times that decode began a load anew, from another try of its transfer.",
    metrics.STORE_RETRIES: "Times that decode's buffer was too full for a copy that it was to take, which was kept.",
    metrics.PUT_WAIT_SECONDS: "Time in which prefill steps of mode put have waited for their KV to leave.",
    metrics.PUT_LATE: "Transfers of mode put that went on as put_async.",
    metrics.PUSH_SECONDS: "From the first manifest to confirmed, summed over pushes and ranks.",
    metrics.BUFFERED_BYTES: "KV payload bytes that came into the lookup buffer or the host pool.",
    metrics.BUFFER_BUSY: "Times that lookup buffer and host pool had no room for what decode was to take.",
    metrics.UNCLAIMED: "Transfers in the lookup buffer that no request has claimed in time.",
    metrics.DP_DUMMIES: "Dummy forwards of this data-parallel rank.",
    metrics.DP_WASTED: "Dummy forwards in steps that the rank had asked for itself and had no use for.",
    metrics.DP_WAKES: "Times that an idle data-parallel rank was granted a step and ran a dummy for it.",
    metrics.DP_WAKE_SECONDS: "From hearing of these grants to beginning the dummies.",
}
GAUGES = {
    metrics.SENDS_OPEN: "Transfers whose KV this engine still holds or sends.",
    metrics.RECEIVES_OPEN: "Transfers this engine waits for.",
    metrics.KEPT_BYTES: "Bytes of KV copies that this engine holds to send.",
    metrics.BLOCKS_WAITING: "Blocks in the KV cache that wait for room to be copied out.",
    metrics.BUFFER_USED: "Bytes in use of the lookup buffer.",
    metrics.POOL_USED: "Bytes in use of the host pool behind the lookup buffer.",
    metrics.NCCL_GROUPS: "NCCL groups with peers' ranks.",
    metrics.NCCL_BYTES: "GPU memory that NCCL groups take.",
    metrics.DP_LOCAL: "Forwards that this data-parallel rank has begun.",
    metrics.DP_GRANTED: "The last forward that all data-parallel ranks must run.",
}
REFUSED = f"{metrics.LINKS_REFUSED}:"
"""Begins the name of a link that sessions could not have."""


class Stats(KVConnectorStats):
    """What was counted since the last report. ``data``, by name:

        a counter          its increment
        a gauge            its latest value
        side/outcome       transfers that have ended
        link:name          KV payload bytes that came over this link
        REFUSED + name     sessions that could not have this link
    """

    def reset(self) -> None:
        """Forget everything that was counted."""
        self.data.clear()

    def add(self, name: str, amount: float) -> None:
        """Increase a counter."""
        self.data[name] = self.data.get(name, 0) + amount

    def count_transfer(self, side: str, outcome: str) -> None:
        """Count a transfer that has ended with ``outcome`` (``kv.keys.Outcome``) on ``side``: send or receive."""
        self.add(f"{side}/{outcome}", 1)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what was counted later, and return this object: increments are summed, gauges take the later value."""
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            else:
                self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Numbers by name, without the prefix ``xpyd_kv_``, for vLLM's log line."""
        return {name.removeprefix("xpyd_kv_"): value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def with_steps(stats: Stats | None) -> Stats | None:
    """``stats`` with what data-parallel step sync has counted since the last call; None where there is neither."""
    steps = STEPS.take()
    if steps:
        stats = Stats(data={}) if stats is None else stats
        stats.data.update(steps)
    return stats


class PromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, in vLLM's API server process."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {name: create_metric_per_engine(
            self._counter_cls(name=name, documentation=text, labelnames=labelnames), per_engine_labelvalues)
            for name, text in COUNTERS.items()}
        self._gauges = {name: create_metric_per_engine(
            self._gauge_cls(name=name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"),
            per_engine_labelvalues) for name, text in GAUGES.items()}
        self._transfers = self._counter_cls(
            name=metrics.TRANSFERS, documentation="KV transfers ended, by side and outcome.",
            labelnames=[*labelnames, "side", "outcome"])
        self._links = self._counter_cls(
            name=metrics.LINK_BYTES, documentation="KV payload bytes that have come in, by link.",
            labelnames=[*labelnames, "link"])
        self._refused = self._counter_cls(
            name=metrics.LINKS_REFUSED, documentation="Sessions that could not have a link, and go on over a worse one.",
            labelnames=[*labelnames, "link"])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine has counted (``Stats.data``) to its metrics."""
        for name, value in transfer_stats_data.items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name.startswith(LINK):
                link = name.removeprefix(LINK)
                self._links.labels(*self.per_engine_labelvalues[engine_idx], link).inc(value)
            elif name.startswith(REFUSED):
                self._refused.labels(*self.per_engine_labelvalues[engine_idx], name.removeprefix(REFUSED)).inc(value)
            else:
                side, _, outcome = name.partition("/")
                self._transfers.labels(*self.per_engine_labelvalues[engine_idx], side, outcome).inc(value)
