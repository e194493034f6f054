"""Processes of one host with every address bound."""

from __future__ import annotations

import pytest
from render_service import service

from xpyd_operator.api.router import HEARTBEAT_S
from xpyd_operator.errors import UnsupportedField
from xpyd_operator.render import process as processes
from xpyd_operator.render.engine import CPU_ENV
from xpyd_operator.render.process import EngineBinding, ProcessPlace
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role

PLACE = ProcessPlace("/usr/bin/python", "/state/key", "/tmp/run/e0", "127.0.0.1")
BINDING = EngineBinding(InstanceName("qwen-e0"), Role.DECODE)


def test_what_members_say_to_each_other_stays_on_the_host_wherever_they_are_reached() -> None:
    wide = service(decode={"parallelism": {"tensor": 2, "pods": 2}})
    place = ProcessPlace("/usr/bin/python", "/state/key", "/tmp/run/e0", "10.0.0.7")
    for index in (0, 1):
        binding = EngineBinding(InstanceName("qwen-e0"), Role.DECODE, index=index, meeting=HostPort("10.0.0.7:20009"))
        process = processes.engine_process(wide, place, binding)
        assert (process.env["VLLM_HOST_IP"], process.env[launch.ENV_HOST]) == ("127.0.0.1", "10.0.0.7")
        agent = processes.agent_config(wide, place, binding, 20001, (HostPort("10.0.0.7:30001"),)).agent
        assert agent is not None
        assert isinstance(agent.group, launch.GroupConfig)
        assert agent.group.host == "127.0.0.1"


def test_an_engine_listens_where_it_is_told_and_reads_the_connectors_environment() -> None:
    process = processes.engine_process(service(), PLACE, BINDING)
    assert process.argv[:3] == ("/usr/bin/python", "-m", "vllm.entrypoints.launchers.api_server.entry")
    assert process.argv[-2:] == ("--host", "127.0.0.1")
    assert processes.port_args(process, 8000) == ("--port", "8000")
    assert process.env[launch.ENV_RUN_DIR] == process.env["TMPDIR"] == process.env["VLLM_RPC_BASE_PATH"] == "/tmp/run/e0"
    assert process.env[launch.ENV_KEY_FILE] == "/state/key"
    assert process.env[launch.ENV_INSTANCE] == "qwen-e0"
    assert process.env[launch.ENV_HOST] == "127.0.0.1"
    assert process.env[launch.ENV_API_KEY] == "", "a key of whoever calls xpyd is no key of the engine"


def test_cpu_defaults_give_way_to_the_user() -> None:
    assert CPU_ENV.items() <= processes.engine_process(service(), PLACE, BINDING).env.items()
    env = [{"name": "OMP_NUM_THREADS", "value": "8"}]
    assert processes.engine_process(service(engine={"env": env}), PLACE, BINDING).env["OMP_NUM_THREADS"] == "8"


def test_with_gpus_the_engine_sees_its_own_and_no_cpu_defaults() -> None:
    binding = EngineBinding(InstanceName("qwen-e0"), Role.DECODE, (1, 3))
    env = processes.engine_process(service(), PLACE, binding).env
    assert env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env


@pytest.mark.parametrize(("source", "offline"), [("Qwen/Qwen3-8B", False), ("/models/qwen", True), ("s3://b/qwen", True)])
def test_the_hub_is_asked_only_for_models_of_the_hub(source: str, offline: bool) -> None:
    process = processes.engine_process(service(model={"source": source}), PLACE, BINDING)
    assert ("HF_HUB_OFFLINE" in process.env) is offline
    assert process.argv[process.argv.index("--model") + 1] == source


@pytest.mark.parametrize("source", ["pvc://weights/qwen", "oci://host/qwen:v1"])
def test_a_cluster_volume_is_no_local_model(source: str) -> None:
    with pytest.raises(UnsupportedField, match=r"spec\.model\.source"):
        processes.model_of(service(None, model={"source": source}))


def test_agent_and_router_agree() -> None:
    one = service(router={"ports": {"http": 12001, "members": 12002}, "policy": "least_loaded"})
    agent = processes.agent_config(one, PLACE, BINDING, 8000, (HostPort("127.0.0.1:12002"),))
    router = processes.router_config(one, PLACE, "0.0.0.0")
    assert agent.agent is not None
    assert router.router is not None
    assert agent.agent.engine == agent.agent.advertised_address == "127.0.0.1:8000"
    assert agent.agent.heartbeat_s == router.router.heartbeat_s == HEARTBEAT_S
    assert agent.agent.model == router.router.model == "Qwen/Qwen3-8B"
    assert agent.service == router.service == "qwen"
    assert (router.router.host, router.router.port, router.router.members_port) == ("0.0.0.0", 12001, 12002)
    assert router.instance == "qwen-router"


@pytest.mark.parametrize(("ports", "admin"), [
    ({}, 10002), ({"http": 10002}, 10003), ({"members": 10002}, 10003), ({"http": 10003, "members": 10002}, 10004),
    ({"http": 10002, "admin": 9000}, 9000)])
def test_a_service_that_had_the_admin_port_for_something_else_before_there_was_one_keeps_it(
        ports: dict[str, int], admin: int) -> None:
    router = processes.router_config(service(router={"ports": ports}), PLACE, "127.0.0.1").router
    assert router is not None
    assert router.admin_port == admin
    assert len({router.port, router.members_port, router.admin_port}) == 3


def test_a_routers_revision_changes_with_its_settings() -> None:
    def revision(**spec: object) -> str:
        return processes.sidecar_revision(processes.router_config(service(**spec), PLACE, "127.0.0.1"))

    assert revision() == revision(decode={"replicas": 4})
    assert revision() != revision(router={"failover": "error"})


def test_a_sidecar_is_started_with_its_configuration() -> None:
    process = processes.sidecar_process("/usr/bin/python", "/state/agent.json")
    assert process.argv == ("/usr/bin/python", "-m", "xpyd_sidecar", "--config", "/state/agent.json")
