"""An instance's members: what both backends bind to a place."""

from __future__ import annotations

import pytest
from member_lines import sizes
from render_service import service

from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.engine import MODULE, engine_args, shutdown_args
from xpyd_operator.render.layout import FOLLOWING, Member, layout
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.process import EngineBinding, ProcessPlace, engine_process
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role

NAME = InstanceName("qwen-e3")
WIDE = {"decode": {"parallelism": {"tensor": 2, "data": 2}}}


@pytest.mark.parametrize("role", Role)
def test_an_instance_has_one_member_of_its_own_name(role: Role) -> None:
    one = service(None, **WIDE)
    args = (*engine_args(one, role, "m", "/shared"), *shutdown_args(one))
    devices, env = (4, {"XPYD_DP_SYNC": "auto"}) if role is Role.DECODE else (1, {})
    assert layout(one, role, NAME, "m", "/shared") == (Member(NAME, 0, "qwen-e3", devices, MODULE, args, env),)


def test_both_backends_start_what_the_layout_says_and_add_where_it_listens() -> None:
    one = service(None, **WIDE)
    pod = engine_pods(one, Role.DECODE, NAME, Revision("r"), KubeSettings(sidecar_image="x"))[0]
    (member,) = layout(one, Role.DECODE, NAME, "Qwen/Qwen3-8B")
    (main,) = pod["spec"]["containers"]
    command = ["python3", "-m", "xpyd_sidecar.listening", member.module]
    assert (pod["metadata"]["name"], main["command"]) == (member.name, command)
    assert main["args"] == [*member.args, "--port", "8000"]
    assert {"name": "XPYD_DP_SYNC", "value": "auto"} in main["env"]
    process = engine_process(one, ProcessPlace("py", "/key", "/run", "::1"), EngineBinding(NAME, Role.DECODE))
    assert process.argv == ("py", "-m", member.module, *member.args, "--host", "::1")
    assert process.env["XPYD_DP_SYNC"] == "auto"


def value(args: tuple[str, ...], option: str) -> str:
    assert args.count(option) == 1, (option, args)
    return args[args.index(option) + 1]


@pytest.mark.parametrize("pods", range(2, 17))
def test_members_share_devices_and_ranks_equally_and_the_leader_serves(pods: int) -> None:
    for tensor, pipeline, data in sizes(pods):
        check_share(tensor, pipeline, data, pods)


def check_share(tensor: int, pipeline: int, data: int, pods: int) -> None:
    one = service(None, decode={"parallelism": {"tensor": tensor, "pipeline": pipeline, "data": data, "pods": pods}})
    members = layout(one, Role.DECODE, NAME, "m")
    assert [member.name for member in members] == [f"qwen-e3-{index}" for index in range(pods)]
    assert sum(member.devices for member in members) == tensor * pipeline * data
    assert len({member.devices for member in members}) == 1
    assert members[0].serves
    for index, member in enumerate(members):
        assert (member.index, member.size) == (index, pods)
        assert '"engine_id":"{xpyd:life}"' in value(member.args, "--kv-transfer-config")
        if data > 1:
            start, each = int(value(member.args, "--data-parallel-start-rank")), data // pods
            assert member.ranks == tuple(range(start, start + each))
            assert value(member.args, "--data-parallel-size-local") == str(each)
            assert (member.serves, member.module) == (True, MODULE)
        else:
            assert (value(member.args, "--nnodes"), value(member.args, "--node-rank")) == (str(pods), str(index))
            assert member.serves == (index == 0) == ("--headless" not in member.args)
            assert member.module == (MODULE if index == 0 else FOLLOWING)
    ranks = [rank for member in members for rank in member.ranks]
    assert ranks == (list(range(data)) if data > 1 else [])


def test_members_of_one_engine_differ_in_nothing_but_their_place() -> None:
    one = service(None, decode={"parallelism": {"tensor": 4, "pods": 4}})
    leader, second, third, _ = layout(one, Role.DECODE, NAME, "m")
    assert [*leader.args[:leader.args.index("--node-rank")]] == [*second.args[:second.args.index("--node-rank")]]
    assert third.args == tuple("2" if second.args[at - 1] == "--node-rank" else argument
                               for at, argument in enumerate(second.args))
