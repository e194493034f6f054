from typing import Any

import pytest
from render_service import service

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render.engine import dp_env, engine_args, queue_env, step_sync
from xpyd_operator.render.keys import unknown
from xpyd_operator.render.layout import layout
from xpyd_operator.render.pod import engine_variables
from xpyd_operator.render.sections import agent_section
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role

RANKS: dict[str, Any] = {"decode": {"parallelism": {"data": 2}}}


def test_ranks_are_kept_in_step() -> None:
    assert dp_env(service(None, **RANKS), Role.DECODE) == {"XPYD_DP_SYNC": "auto"}
    assert dp_env(service(None, **RANKS), Role.PREFILL) == {}


def test_pods_get_the_ranks_and_the_variable() -> None:
    asked = service(None, **RANKS)
    args = engine_args(asked, Role.DECODE, "m")
    assert args[args.index("--data-parallel-size") + 1] == "2"
    assert variables(asked, Role.DECODE)["XPYD_DP_SYNC"] == "auto"
    assert "XPYD_DP_SYNC" not in variables(asked, Role.PREFILL)


def variables(asked: DisaggService, role: Role) -> dict[str, Any]:
    (member,) = layout(asked, role, InstanceName("s-e0"), "m")
    return {one["name"]: one.get("value") for one in engine_variables(asked, role, member, unknown("s"))}


def test_the_agent_waits_for_the_record_of_each_rank() -> None:
    engine = HostPort("127.0.0.1:8000")
    assert agent_section(service(None, **RANKS), Role.DECODE, engine, ("127.0.0.1", 8000), ()).data_parallel == 2
    assert agent_section(service(None, **RANKS), Role.PREFILL, engine, ("127.0.0.1", 8000), ()).data_parallel == 1


@pytest.mark.parametrize(("spec", "said"), [
    ({}, None), (RANKS, "auto")])
def test_the_way_is_known_where_a_role_has_several_ranks(spec: dict[str, Any], said: str | None) -> None:
    assert step_sync(service(None, **spec)) == said


TWO: dict[str, Any] = {"tensor": 2}


@pytest.mark.parametrize(("parallel", "asked"), [
    (TWO, False), (TWO | {"pods": 2}, True), ({"tensor": 2, "data": 2, "pods": 2}, True), ({"data": 2, "pods": 2}, False),
    ({"pipeline": 2}, False), ({}, False)])
def test_engines_use_the_queue_of_xpyd_between_pods(parallel: dict[str, Any], asked: bool) -> None:
    one = service(None, decode={"parallelism": parallel}, prefill={"parallelism": TWO})
    assert queue_env(one, Role.DECODE) == ({"XPYD_QUEUE": "xpyd"} if asked else {})
    members = layout(one, Role.DECODE, InstanceName("s-e0"), "m")
    assert [member.env.get("XPYD_QUEUE") for member in members] == ["xpyd" if asked else None] * len(members)
