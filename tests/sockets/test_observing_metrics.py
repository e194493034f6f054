from __future__ import annotations

import os
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from members import member
from prometheus_client.parser import text_string_to_metric_families
from records import D1, P1, leg, pair, record
from router_fleet import fleet

from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.intake import Disaggregation
from xpyd_sidecar.contract.membership import Drafts, Load
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.observing import metrics as me
from xpyd_sidecar.router.observing.batch import MAX_PAIRS, of_records
from xpyd_sidecar.router.observing.metrics import RouterMetrics, Vitals
from xpyd_sidecar.router.observing.record import Record

PAGE = Path(__file__).resolve().parents[2] / "docs/observability.md"


def close(metrics: RouterMetrics, of: Record) -> None:
    metrics.count_batch(of_records(of.api, [of]))


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(metrics.text().decode())
    return sum(s.value for family in families for s in family.samples
               if s.name == name and labels.items() <= s.labels.items())


def test_requests_are_counted_by_outcome_and_failures_apart() -> None:
    metrics = RouterMetrics(list)
    for outcome in ("ok", "client_error", "refused", "client_gone", "failed", "broken", "timeout", "unavailable"):
        close(metrics, record(P1, D1, outcome=outcome, retries=2 if outcome == "ok" else 0))
    metrics.count_outcome("chat", "refused")
    assert (metrics.requests_total, metrics.requests_failed) == (9, 4)
    assert value(metrics, "xpyd_router_requests_total", api="chat", outcome="ok") == 1
    assert value(metrics, "xpyd_router_requests_total") == 9
    assert value(metrics, "xpyd_router_retries_total") == 2
    metrics.in_flight = 3
    assert value(metrics, "xpyd_router_in_flight") == 3
    assert value(metrics, "xpyd_router_request_seconds_sum") == 8 * 2.5


def test_drafts_are_counted_by_instance_and_role_of_engines_that_speculate() -> None:
    here = [member("p1", Role.PREFILL, drafts=Drafts(6, 0, 2)), member("d1", drafts=Drafts(200, 75, 400)), member("d2")]
    metrics = RouterMetrics(lambda: here)
    assert value(metrics, "xpyd_router_engine_drafted_tokens_total", instance="d1", role="decode") == 200
    assert value(metrics, "xpyd_router_engine_accepted_tokens_total", role="decode") == 75
    assert value(metrics, "xpyd_router_engine_generated_tokens_total", role="decode") == 400
    assert value(metrics, "xpyd_router_engine_accepted_tokens_total", role="prefill") == 0
    assert 'tokens_total{instance="d2"' not in metrics.text().decode()


def test_what_a_request_took_is_in_its_histogram() -> None:
    metrics = RouterMetrics(list)
    close(metrics, record(P1, D1, queued_s=0.03, bytes=900, continued=1))
    assert value(metrics, "xpyd_router_ttft_seconds_sum", api="chat") == pytest.approx(0.5)
    assert value(metrics, "xpyd_router_tpot_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "xpyd_router_queue_seconds_sum") == pytest.approx(0.03)
    assert value(metrics, "xpyd_router_handover_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "xpyd_router_leg_seconds_sum", role="prefill") == pytest.approx(0.3)
    assert value(metrics, "xpyd_router_leg_seconds_count", role="decode") == 1
    assert value(metrics, "xpyd_router_tokens_total") == 11
    assert value(metrics, "xpyd_router_relayed_bytes_total") == 900
    assert value(metrics, "xpyd_router_continued_total") == 1
    assert value(metrics, "xpyd_router_pair_handovers_total", prefill="p1", decode="d1") == 1
    assert value(metrics, "xpyd_router_pair_handover_seconds_total") == pytest.approx(0.2)


def test_every_leg_is_counted_by_its_result() -> None:
    metrics = RouterMetrics(list)
    close(metrics, record(leg(Role.PREFILL, "p1", 1, 1.0, 2.0, 3.0, "lost"), leg(Role.PREFILL, "p2", 2, 1.0, 2.0, 3.0), D1))
    assert value(metrics, "xpyd_router_legs_total", role="prefill", result="lost") == 1
    assert value(metrics, "xpyd_router_legs_total", role="prefill") == 2
    assert value(metrics, "xpyd_router_legs_total", result="2xx") == 2


def test_requests_that_skip_prefill_are_counted_by_the_reason() -> None:
    metrics = RouterMetrics(list)
    for skips in ("short", "", "short", "n"):
        close(metrics, record(D1, skips=skips))
    assert value(metrics, "xpyd_router_skipped_prefill_total", by="short") == 2
    assert value(metrics, "xpyd_router_skipped_prefill_total") == 3


def test_what_was_believed_to_be_cached_stands_beside_what_was() -> None:
    metrics = RouterMetrics(list)
    metrics.count_cached_tokens(1000, 800)
    metrics.count_cached_tokens(0, 200)
    assert value(metrics, "xpyd_router_prefix_predicted_tokens_total") == 1000
    assert value(metrics, "xpyd_router_prefix_actual_tokens_total") == 1000
    metrics.count_skipped_rest(300)
    assert value(metrics, "xpyd_router_skipped_rest_tokens_sum") == 300
    assert value(metrics, "xpyd_router_skipped_rest_tokens_bucket", le="256") == 0
    assert value(metrics, "xpyd_router_skipped_rest_tokens_bucket", le="512") == 1


def test_tokens_that_wait_are_read_when_asked() -> None:
    one = member("p0", Role.PREFILL)
    one.uncached_tokens = 700
    metrics = RouterMetrics(lambda: [one])
    assert value(metrics, "xpyd_router_queued_prompt_tokens", instance="p0", role="prefill") == 700
    one.load, one.computed_per_s = Load(prompts=PromptWork(9000, 5)), 1000.0
    metrics.time = lambda: 2.0
    assert value(metrics, "xpyd_router_queued_prompt_tokens", instance="p0", role="prefill") == 7000


def test_pairs_beyond_the_bound_are_counted_as_other() -> None:
    here = [member("p1", Role.PREFILL)]
    metrics = RouterMetrics(lambda: here)
    for number in range(MAX_PAIRS + 7):
        close(metrics, record(*pair("p1", f"d{number}")))
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    cells = families["xpyd_router_pair_handovers"].samples
    assert len(cells) == MAX_PAIRS + 1
    assert {s.labels["prefill"]: s.value for s in cells if s.labels["decode"] == "other"} == {"other": 7}


def test_pairs_of_instances_that_are_gone_make_room() -> None:
    here = [member("p1", Role.PREFILL), member("d0")]
    metrics = RouterMetrics(lambda: here)
    for number in range(MAX_PAIRS):
        close(metrics, record(*pair("p1", f"d{number}")))
    assert value(metrics, "xpyd_router_pair_handovers_total") == MAX_PAIRS
    assert value(metrics, "xpyd_router_pair_handovers_total") == 1, "those of d0 alone, which is still there"
    close(metrics, record(*pair("p1", "new")))
    assert value(metrics, "xpyd_router_pair_handovers_total", decode="new") == 1
    assert value(metrics, "xpyd_router_pair_handovers_total", decode="other") == 0


def test_instances_and_open_legs_are_read_when_asked() -> None:
    members = [member("p0", Role.PREFILL, in_flight=3), member("d0"), member("d1"), member("d2")]
    members[2].suspended = "gone"
    metrics = RouterMetrics(lambda: members)
    assert value(metrics, "xpyd_router_instances", role="decode", state="suspended") == 1
    assert value(metrics, "xpyd_router_instances", role="decode", state=members[1].state.value) == 2
    assert value(metrics, "xpyd_router_instances") == 4
    assert value(metrics, "xpyd_router_legs_open", instance="p0", role="prefill") == 3
    members.clear()
    assert value(metrics, "xpyd_router_instances") == 0


def test_queue_and_budget_are_read_when_asked() -> None:
    metrics = RouterMetrics(list)
    left = [5.0]
    metrics.queued = lambda: 3
    metrics.retries_left = lambda: left[0]
    assert value(metrics, "xpyd_router_queued") == 3
    left[0] = 2.5
    assert value(metrics, "xpyd_router_retry_budget") == 2.5


def test_probes_and_changes_of_the_roster_are_counted() -> None:
    metrics = RouterMetrics(list)
    metrics.count("probes", "dead")
    metrics.count("roster_changes", "evicted")
    assert value(metrics, "xpyd_router_probes_total", result="dead") == 1
    assert value(metrics, "xpyd_router_roster_changes_total", change="evicted") == 1


def test_two_routers_in_one_process_do_not_share_counters() -> None:
    first, second = RouterMetrics(list), RouterMetrics(list)
    first.count("membership_messages", "taken")
    assert value(first, "xpyd_router_membership_messages_total", result="taken") == 1
    assert value(second, "xpyd_router_membership_messages_total") == 0


@pytest.mark.parametrize(("buckets", "low", "high"), [(me.TTFT, 0.001, 60.0), (me.TPOT, 0.001, 2.0)])
def test_buckets_fit_what_is_measured(buckets: tuple[float, ...], low: float, high: float) -> None:
    assert (buckets[0], buckets[-1]) == (low, high)
    assert list(buckets) == sorted(set(buckets))
    assert all(after / before <= 2.5 for before, after in pairwise(buckets)), "no gap is wider"


def documented() -> dict[str, tuple[str, ...]]:
    """Names and labels in the table of docs/observability.md."""
    rows = re.findall(r"^\| `((?:xpyd_router|process)_\w+)(?:\{([\w,]+)\})?` \|", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a name stands twice"
    return {name: tuple(sorted(labels.split(","))) if labels else () for name, labels in rows}


def test_the_process_is_shown_with_what_it_knows_of_itself() -> None:
    metrics = RouterMetrics(list)
    assert value(metrics, "xpyd_router_connections") == 0
    one = Vitals(connections=3, refused={"unavailable": 2}, accept_errors=3, held={"bodies": 70})
    for seconds in (-1.0, 0.0005, 0.3, 99.0):
        one.count_lag(seconds)
    metrics.vitals = lambda: one
    assert value(metrics, "xpyd_router_connections") == 3
    assert value(metrics, "xpyd_router_connections_refused_total", code="unavailable") == 2
    assert value(metrics, "xpyd_router_accept_errors_total") == 3
    assert value(metrics, "xpyd_router_held_bytes", kind="bodies") == 70
    assert value(metrics, "xpyd_router_loop_lag_seconds_sum") == pytest.approx(99.3005)
    les = ("0.001", "0.25", "0.5", "10.0", "+Inf")
    assert [value(metrics, "xpyd_router_loop_lag_seconds_bucket", le=le) for le in les] == [2, 2, 3, 3, 4]


def test_what_the_system_knows_of_the_process_is_shown() -> None:
    metrics = RouterMetrics(list)
    for name in ("resident_memory_bytes", "virtual_memory_bytes", "start_time_seconds", "max_fds", "cpu_seconds_total"):
        assert value(metrics, f"process_{name}") > 0, name
    assert abs(value(metrics, "process_open_fds") - len(os.listdir("/proc/self/fd"))) < 8


async def test_a_router_shows_its_connections_and_how_late_its_loop_is() -> None:
    async with fleet(heartbeat_s=0.1) as f:
        metrics: RouterMetrics = f.context.observer.metrics
        held = [await f.connect() for _ in range(3)]
        await f.wait(lambda: value(metrics, "xpyd_router_connections") == 3, "the connections")
        held[0][1].write(b"GET / HTTP/9.9\r\nhost: x\r\n\r\n")
        await held[0][0].read()
        await f.wait(lambda: value(metrics, "xpyd_router_connections") == 2, "its end")
        assert value(metrics, "xpyd_router_connections_refused_total") == 1
        before = value(metrics, "xpyd_router_loop_lag_seconds_sum")
        assert before < 10
        time.sleep(0.4)  # noqa: ASYNC251 (the loop stands still)
        await f.wait(lambda: value(metrics, "xpyd_router_loop_lag_seconds_sum") > before + 0.2, "the lag")
        for _, writer in held:
            writer.transport.abort()


async def test_the_documentation_names_every_metric_with_its_labels() -> None:
    async with fleet() as f:
        f.context.observer.on_passed("/v1/embeddings", "complete")
        metrics: RouterMetrics = f.context.observer.metrics
        close(metrics, record(P1, D1))
        close(metrics, record(D1, skips="short"))
        metrics.count("membership_messages", "taken")
        metrics.count("probes", "healthy")
        metrics.count("roster_changes", "joined")
        metrics.count("canaries", "answered")
        metrics.count("pulls", "ok")
        metrics.count("tenant_requests", "a", "ok")
        metrics.count("tenant_tokens", "a", "prompt")
        metrics.count_audit(P1.instance, D1.instance, "equal", 0.0)
        metrics.disaggregation = lambda: Disaggregation("True", "Receiving", share=1.0)
        f.router.server.count_refusal(HttpFault(408, "too slow", code="request_timeout"))
        f.context.roster.members()[0].load = Load(drafts=Drafts(1, 1, 1))
        metrics.disaggregation = lambda: Disaggregation("True", "Receiving", share=1.0)
        found: dict[str, tuple[str, ...]] = {}
        for family in metrics.registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            sample = next(s for s in family.samples if not s.name.endswith("_created"))
            found[name] = tuple(sorted(sample.labels.keys() - {"le"}))
    assert documented() == found
