"""What of ``spec.router`` a router gets to know."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from render_service import service

from xpyd_operator.render.sections import router_section
from xpyd_sidecar.contract.launch import RouterConfig

WRITTEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"policy": "least_loaded"}, {"policy": "least_loaded"}),
    ({"skipPrefill": {"belowTokens": 64}}, {"skip_prefill_below": 64, "skip_prefill_rest": 64}),
    ({"hold": "2m"}, {"hold_s": 120.0}),
    ({"hold": "2s"}, {"hold_s": 2.0, "queue_timeout_s": 2.0}),
    ({"firstToken": "prefill"}, {"first_token": "prefill"}),
    ({"resources": {"limits": {"memory": "3Gi"}}}, {"body_budget_bytes": 5 << 29}),
    ({"resources": {"limits": {"memory": "256Mi"}}}, {"body_budget_bytes": 1}),
    ({"hosts": ["models.home"], "cors": {"origins": ["https://app.example"]}},
     {"hosts": ("models.home",), "cors_origins": ("https://app.example",)}),
    ({"tracing": {"endpoint": "http://collector:4318"}}, {"otlp_endpoint": "http://collector:4318"}),
    ({"maxInFlight": 9, "maxBodySize": "1Mi", "onNoPrefill": "reject", "failover": "error", "requestTimeout": "20s",
      "ports": {"http": 9001, "members": 9002}},
     {"max_in_flight": 9, "queue_size": 2, "max_body_bytes": 1 << 20, "on_no_prefill": "reject", "failover": "error",
      "request_timeout_s": 20.0, "pair_timeout_s": 20.0, "queue_timeout_s": 20.0, "port": 9001, "members_port": 9002}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "expected"), WRITTEN, ids=[next(iter(spec)) for spec, _ in WRITTEN])
def test_what_is_written_reaches_the_router_and_nothing_else(spec: dict[str, Any], expected: dict[str, Any]) -> None:
    usual = msgspec.to_builtins(router_section(service(), "::"))
    made = msgspec.to_builtins(router_section(service(router=spec), "::"))
    assert {name: value for name, value in made.items() if value != usual[name]} == expected


def test_nothing_but_the_model_differs_from_a_routers_own_defaults() -> None:
    made = router_section(service(), "::")
    assert made == RouterConfig(model=made.model)
