from __future__ import annotations

from members import member
from prometheus_client.parser import text_string_to_metric_families

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.proxy.metrics import Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(metrics.text().decode())
    return sum(s.value for family in families for s in family.samples
               if s.name == name and labels.items() <= s.labels.items())


def test_requests_are_counted_by_outcome_and_failures_apart() -> None:
    metrics = Metrics(list)
    for outcome in ("ok", "client_error", "refused", "client_gone", "failed", "broken", "timeout", "unavailable"):
        metrics.opened()
        metrics.closed("chat", outcome, 0.5, 2 if outcome == "ok" else 0)
    assert (metrics.requests_total, metrics.requests_failed) == (8, 4)
    assert value(metrics, "xpyd_router_requests_total", api="chat", outcome="ok") == 1
    assert value(metrics, "xpyd_router_requests_total") == 8
    assert value(metrics, "xpyd_router_retries_total") == 2
    assert value(metrics, "xpyd_router_in_flight") == 0
    assert value(metrics, "xpyd_router_request_seconds_sum") == 4.0


def test_instances_and_open_legs_are_read_when_asked() -> None:
    members = [member("p0", Role.PREFILL, in_flight=3), member("d0"), member("d1")]
    members[2].suspended = "gone"
    metrics = Metrics(lambda: members)
    assert value(metrics, "xpyd_router_instances", role="decode", state="suspended") == 1
    assert value(metrics, "xpyd_router_instances") == 3
    assert value(metrics, "xpyd_router_legs_open", instance="p0", role="prefill") == 3
    members.clear()
    assert value(metrics, "xpyd_router_instances") == 0


def test_two_routers_in_one_process_do_not_share_counters() -> None:
    first, second = Metrics(list), Metrics(list)
    first.message("taken")
    assert value(first, "xpyd_router_membership_messages_total", result="taken") == 1
    assert value(second, "xpyd_router_membership_messages_total") == 0
