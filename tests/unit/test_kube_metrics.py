"""The operator's metrics: names, labels and what each call adds."""

from __future__ import annotations

import importlib.metadata

from prometheus_client.parser import text_string_to_metric_families

from xpyd_operator.kube.client.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(metrics.text().decode()) for sample in family.samples}


def test_a_round_counts_its_seconds_and_its_result() -> None:
    metrics = Metrics()
    metrics.reconcile(0.02, "changed")
    metrics.reconcile(0.002, "same")
    metrics.reconcile(0.002, "same")
    seen = samples(metrics)
    assert seen["xpyd_operator_reconcile_total", (("result", "changed"),)] == 1
    assert seen["xpyd_operator_reconcile_total", (("result", "same"),)] == 2
    assert seen["xpyd_operator_reconcile_seconds_count", ()] == 3
    assert seen["xpyd_operator_reconcile_seconds_bucket", (("le", "0.0025"),)] == 2


def test_a_request_counts_by_verb_resource_and_code() -> None:
    metrics = Metrics()
    metrics.request("patch", "disaggservices/status", 200, 0.004)
    metrics.request("patch", "disaggservices/status", 0, 10.0)
    seen = samples(metrics)
    for code in ("200", "0"):
        labelled = (("code", code), ("resource", "disaggservices/status"), ("verb", "patch"))
        assert seen["xpyd_operator_api_requests_total", labelled] == 1
    labels = (("resource", "disaggservices/status"), ("verb", "patch"))
    assert seen["xpyd_operator_api_request_seconds_sum", labels] == 10.004


def test_gauges_errors_events_and_the_build() -> None:
    metrics = Metrics()
    metrics.tasks.set(3)
    metrics.leader.set(1)
    metrics.waiting.inc()
    metrics.errors("ApiError")
    metrics.event_dropped(2)
    metrics.on_watched("Pod", "added")
    seen = samples(metrics)
    assert seen["xpyd_operator_tasks", ()] == 3
    assert seen["xpyd_operator_leader", ()] == 1
    assert seen["xpyd_operator_queue", ()] == 1
    assert seen["xpyd_operator_errors_total", (("kind", "ApiError"),)] == 1
    assert seen["xpyd_operator_events_dropped_total", ()] == 2
    assert seen["xpyd_operator_watch_events_total", (("kind", "Pod"), ("type", "added"))] == 1
    assert seen["xpyd_operator_build_info", (("version", importlib.metadata.version("xpyd-operator")),)] == 1
    assert seen["process_resident_memory_bytes", ()] > 0


def test_two_operators_in_one_process_do_not_share_series() -> None:
    one, other = Metrics(), Metrics()
    one.errors("Timeout")
    assert ("xpyd_operator_errors_total", (("kind", "Timeout"),)) not in samples(other)
