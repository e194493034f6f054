from typing import Any

import pytest
from render_service import service

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render.engine import dp_env, engine_args, engine_revision, queue_env, step_sync
from xpyd_operator.render.keys import unknown
from xpyd_operator.render.layout import layout
from xpyd_operator.render.pod import engine_variables
from xpyd_operator.render.sections import agent_section
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role

RANKS: dict[str, Any] = {"decode": {"parallelism": {"data": 2}}}


def test_ranks_are_kept_in_step_as_the_document_says() -> None:
    assert dp_env(service(None, **RANKS), Role.DECODE) == {"XPYD_DP_SYNC": "auto"}
    assert dp_env(service(None, **RANKS), Role.PREFILL) == {}
    assert dp_env(service(None, **RANKS, engine={"dpStepSync": "rpc"}), Role.DECODE) == {"XPYD_DP_SYNC": "rpc"}


def test_pods_get_the_ranks_and_the_variable() -> None:
    asked = service(None, **RANKS, engine={"dpStepSync": "shm"})
    args = engine_args(asked, Role.DECODE, "m")
    assert args[args.index("--data-parallel-size") + 1] == "2"
    assert variables(asked, Role.DECODE)["XPYD_DP_SYNC"] == "shm"
    assert "XPYD_DP_SYNC" not in variables(asked, Role.PREFILL)


def variables(asked: DisaggService, role: Role) -> dict[str, Any]:
    (member,) = layout(asked, role, InstanceName("s-e0"), "m")
    return {one["name"]: one.get("value") for one in engine_variables(asked, role, member, unknown("s"))}


def test_the_agent_waits_for_the_record_of_each_rank() -> None:
    engine = HostPort("127.0.0.1:8000")
    assert agent_section(service(None, **RANKS), Role.DECODE, engine, ("127.0.0.1", 8000), ()).data_parallel == 2
    assert agent_section(service(None, **RANKS), Role.PREFILL, engine, ("127.0.0.1", 8000), ()).data_parallel == 1


def test_another_way_is_another_revision_but_only_of_roles_with_several_ranks() -> None:
    one, other = service(None, **RANKS), service(None, **RANKS, engine={"dpStepSync": "rpc"})
    assert engine_revision(one, Role.DECODE, "m") != engine_revision(other, Role.DECODE, "m")
    assert engine_revision(one, Role.PREFILL, "m") == engine_revision(other, Role.PREFILL, "m")


@pytest.mark.parametrize(("spec", "said"), [
    ({}, None), (RANKS, "auto"), ({**RANKS, "engine": {"dpStepSync": "disabled"}}, "disabled")])
def test_the_way_is_known_where_a_role_has_several_ranks(spec: dict[str, Any], said: str | None) -> None:
    assert step_sync(service(None, **spec)) == said


TWO: dict[str, Any] = {"tensor": 2}


@pytest.mark.parametrize(("word", "parallel", "asked"), [
    ("auto", TWO, False), ("auto", TWO | {"pods": 2}, True), ("auto", {"tensor": 2, "data": 2, "pods": 2}, True),
    ("auto", {"data": 2, "pods": 2}, False), ("vllm", TWO, False), ("xpyd", TWO, True), ("xpyd", {"pipeline": 2}, True),
    ("xpyd", {}, False), ("xpyd", {"data": 2}, False)])
def test_engines_use_the_queue_of_xpyd_between_pods_and_where_it_is_asked_for(
        word: str, parallel: dict[str, Any], asked: bool) -> None:
    one = service(None, decode={"parallelism": parallel}, prefill={"parallelism": TWO}, engine={"queue": word})
    assert queue_env(one, Role.DECODE) == ({"XPYD_QUEUE": "xpyd"} if asked else {})
    members = layout(one, Role.DECODE, InstanceName("s-e0"), "m")
    assert [member.env.get("XPYD_QUEUE") for member in members] == ["xpyd" if asked else None] * len(members)


def test_another_queue_is_another_revision_and_the_one_that_was_there_is_none() -> None:
    spec: dict[str, Any] = {"decode": {"parallelism": TWO}}
    before, same, other = (engine_revision(service(None, **spec, engine=engine), Role.DECODE, "m")
                           for engine in ({}, {"queue": "vllm"}, {"queue": "xpyd"}))
    assert before == same != other


def test_pods_that_may_be_open_are_told_so_and_none_is_replaced_for_it() -> None:
    spec: dict[str, Any] = {"decode": {"parallelism": TWO | {"pods": 2}}, "prefill": {"parallelism": TWO}}
    closed, opened = service(None, **spec), service(None, **spec, networkPolicy={"allowOpenPods": True})
    told = [[member.env.get("XPYD_OPEN_PODS") for member in layout(one, role, InstanceName("s-e0"), "m")]
            for one in (closed, opened) for role in (Role.PREFILL, Role.DECODE)]
    assert told == [[None], [None, None], [None], ["1", "1"]]
    assert engine_revision(closed, Role.DECODE, "m") == engine_revision(opened, Role.DECODE, "m")
