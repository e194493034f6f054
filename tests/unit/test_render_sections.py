"""What of ``spec.router`` a router gets to know."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from render_service import service

from xpyd_operator.render.sections import router_section
from xpyd_sidecar.contract.launch import RouterConfig

WRITTEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"policy": "least_loaded", "policyOptions": {"choices": 4}},
     {"policy": "least_loaded", "policy_options": {"choices": 4}}),
    ({"skipPrefill": {"belowTokens": 64, "restTokens": 512}}, {"skip_prefill_below": 64, "skip_prefill_rest": 512}),
    ({"queue": {"size": 8, "timeout": "5s", "perInstance": 3}},
     {"queue_size": 8, "queue_timeout_s": 5.0, "max_per_instance": 3}),
    ({"hold": "2m"}, {"hold_s": 120.0}),
    ({"retryBudget": 0.5, "firstToken": "prefill", "dashboard": False},
     {"retry_budget": 0.5, "first_token": "prefill", "dashboard": False}),
    ({"hosts": ["models.home"], "cors": {"origins": ["https://app.example"]}},
     {"hosts": ("models.home",), "cors_origins": ("https://app.example",)}),
    ({"tracing": {"endpoint": "http://collector:4318"}}, {"otlp_endpoint": "http://collector:4318"}),
    ({"heartbeat": {"interval": "1s", "missed": 5}, "maxInFlight": 9, "maxBodySize": "1Mi", "bodyBudget": "1Gi",
      "onNoPrefill": "reject",
      "failover": "error", "requestTimeout": "2m", "pairTimeout": "20s", "ports": {"http": 9001, "members": 9002}},
     {"heartbeat_s": 1.0, "missed_beats": 5, "max_in_flight": 9, "max_body_bytes": 1 << 20, "body_budget_bytes": 1 << 30,
      "on_no_prefill": "reject",
      "failover": "error", "request_timeout_s": 120.0, "pair_timeout_s": 20.0, "port": 9001, "members_port": 9002}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "expected"), WRITTEN, ids=[next(iter(spec)) for spec, _ in WRITTEN])
def test_what_is_written_reaches_the_router_and_nothing_else(spec: dict[str, Any], expected: dict[str, Any]) -> None:
    usual = msgspec.to_builtins(router_section(service(), "::"))
    made = msgspec.to_builtins(router_section(service(router=spec), "::"))
    assert {name: value for name, value in made.items() if value != usual[name]} == expected


def test_nothing_but_the_model_differs_from_a_routers_own_defaults() -> None:
    made = router_section(service(), "::")
    assert made == RouterConfig(model=made.model)


def test_how_long_a_load_may_take_reaches_the_router() -> None:
    assert router_section(service(), "::").load_limit_s == 600.0
    assert router_section(service(kv={"loadLimit": "90s"}), "::").load_limit_s == 90.0
