"""What the structs say of themselves."""

from __future__ import annotations

import msgspec
import pytest
from api_documents import document

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.kv import Kv
from xpyd_operator.api.roles import Parallelism, RoleSpec, Scaling
from xpyd_operator.api.router import HEARTBEAT_S, Router
from xpyd_operator.api.service import DisaggService
from xpyd_sidecar.contract.ids import Role


def service(changes: dict[str, object] | None = None, **spec: object) -> DisaggService:
    return decode_service(document(changes, **spec)).service


def test_counts() -> None:
    made = service(prefill={"scaling": {"min": 2, "max": 4}})
    assert (made.spec.replicas(Role.PREFILL), made.spec.replicas(Role.DECODE)) == (2, 3)
    assert made.spec.role(Role.PREFILL).max_instances == 4
    assert made.shape == "2P3D"


@pytest.mark.parametrize(
    ("role", "least", "most"),
    [
        (RoleSpec(), 1, 1),
        (RoleSpec(replicas=0), 0, 0),
        (RoleSpec(replicas=3), 3, 3),
        (RoleSpec(scaling=Scaling(min=0, max=5)), 0, 5),
    ],
)
def test_bounds_of_a_role(role: RoleSpec, least: int, most: int) -> None:
    assert (role.min_instances, role.max_instances) == (least, most)


@pytest.mark.parametrize(
    ("source", "served", "name"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("/models/x", None, "qwen"),
        ("pvc://claim/x", None, "qwen"),
        ("../weights", None, "qwen"),
        ("/models/x", "mine", "mine"),
    ],
)
def test_served_name(source: str, served: str | None, name: str) -> None:
    assert service({"spec.model": {"source": source, "servedName": served}}).served_name == name


def test_devices() -> None:
    assert Parallelism(tensor=2, pipeline=3, data=4).devices == 24


@pytest.mark.parametrize(("memory", "keep", "buffer"), [
    (None, None, None), ("2Gi", 1 << 30, 1 << 30), (7, 4, 3), (1, 1, 0), ("1Ki", 512, 512)])
def test_half_of_the_memory_is_for_what_leaves_and_half_for_what_comes(
    memory: str | int | None, keep: int | None, buffer: int | None
) -> None:
    kv = Kv(memory=memory)
    assert (kv.keep_bytes, kv.buffer_bytes) == (keep, buffer)


def test_times_are_seconds_and_sizes_bytes() -> None:
    changes = {"spec.drain": {"timeout": "1h30m"}, "spec.rollout": {"switchWindow": "0s"}}
    made = service(changes, planner={"interval": "45s"})
    assert made.spec.drain.timeout_s == 5400
    assert made.spec.planner.interval_s == 45
    assert made.spec.rollout.switch_window_s == 0
    assert made.spec.engine.startup_timeout_s == 1800
    router = Router()
    assert (HEARTBEAT_S, router.request_timeout_s, router.pair_timeout_s) == (3, 3600, 60)
    assert (router.max_body_bytes, router.replicas) == (32 << 20, None)


def test_defaults_are_those_of_the_contract() -> None:
    """What the operator renders by default and what a sidecar assumes by default must not differ."""
    from xpyd_sidecar.contract.launch import AgentConfig, KvOptions, RouterConfig

    router, spec = Router(), service().spec
    ours = {
        "port": router.ports.http, "members_port": router.ports.members, "policy": router.policy,
        "on_no_prefill": router.on_no_prefill, "failover": router.failover, "heartbeat_s": HEARTBEAT_S,
        "max_body_bytes": router.max_body_bytes,
        "max_in_flight": router.max_in_flight, "queue_size": router.queue_size, "queue_timeout_s": router.queue_timeout_s,
        "hold_s": router.hold_s,
        "skip_prefill_below": router.skip_prefill.below_tokens, "skip_prefill_rest": router.skip_prefill.below_tokens,
        "first_token": router.first_token,
        "tls_cert_file": router.tls.secret, "tls_key_file": router.tls.secret,
        "otlp_endpoint": router.tracing.endpoint or "",
        "body_budget_bytes": router.body_budget_bytes, "hosts": router.hosts, "cors_origins": router.cors.origins,
        "request_timeout_s": router.request_timeout_s, "pair_timeout_s": router.pair_timeout_s,
    }  # fmt: skip
    theirs = RouterConfig()
    assert ours == {name: getattr(theirs, name) for name in ours}
    options = KvOptions()
    assert (spec.kv.transport, spec.kv.encryption) == (options.transport, options.encryption)
    assert theirs.load_limit_s == options.load_limit_s
    agent = {field.name: field.default for field in msgspec.structs.fields(AgentConfig)}
    assert (spec.drain.timeout_s, spec.engine.startup_timeout_s) == (agent["drain_timeout_s"], agent["startup_timeout_s"])


def test_every_policy_of_the_router_can_be_asked_for() -> None:
    """A policy that is added to the router is added to the API, too."""
    from typing import get_args, get_type_hints

    from xpyd_sidecar.router.balance.policies import names

    assert set(names()) <= set(get_args(get_type_hints(Router)["policy"]))
