"""An instance's members: what both backends bind to a place."""

from __future__ import annotations

import pytest
from render_service import service

from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.engine import MODULE, engine_args, shutdown_args
from xpyd_operator.render.layout import Member, layout
from xpyd_operator.render.pod import engine_pod
from xpyd_operator.render.process import EngineBinding, Place, engine_process
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
    pod = engine_pod(one, Role.DECODE, NAME, Revision("r"), KubeSettings(sidecar_image="x"))
    (member,) = layout(one, Role.DECODE, NAME, "Qwen/Qwen3-8B")
    (main,) = pod["spec"]["containers"]
    command = ["python3", "-m", "xpyd_sidecar.listening", member.module]
    assert (pod["metadata"]["name"], main["command"]) == (member.name, command)
    assert main["args"] == [*member.args, "--port", "8000"]
    assert {"name": "XPYD_DP_SYNC", "value": "auto"} in main["env"]
    (member,) = layout(one, Role.DECODE, NAME, "Qwen/Qwen3-8B", "/dev/shm")
    process = engine_process(one, Place("py", "/key", "/run", "::1"), EngineBinding(NAME, Role.DECODE))
    assert process.argv == ("py", "-m", member.module, *member.args, "--host", "::1")
    assert process.env["XPYD_DP_SYNC"] == "auto"
