"""What the document asks for on this host."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from render_service import service

from xpyd_operator.errors import LocalError
from xpyd_operator.local import store
from xpyd_operator.local.blueprint import LocalBlueprint
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.store import PlannedCounts, StopRequest
from xpyd_operator.plan.actions import Create
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import GroupConfig


@pytest.fixture
def blueprint(tmp_path: Path) -> LocalBlueprint:
    folder = ServiceFolder("qwen", tmp_path)
    folder.make()
    write(folder)
    return LocalBlueprint(folder, store.settings_for(folder, "127.0.0.1"))


def write(folder: ServiceFolder, stamp: int = 1, **spec: object) -> None:
    store.save_desired(folder, service(**spec))
    os.utime(folder.desired, ns=(stamp, stamp))


def test_counts_revisions_and_times_follow_the_document(blueprint: LocalBlueprint) -> None:
    before = blueprint.desired_service()
    assert (before.shape, before.stopping, before.drain_timeout_s) == ("1P1D", False, 600.0)
    write(blueprint.folder, 2, decode={"replicas": 3}, drain={"timeout": "5s"}, router={"policy": "least_loaded"})
    after = blueprint.desired_service()
    assert (after.shape, after.drain_timeout_s) == ("1P3D", 5.0)
    assert after.decode.revision == before.decode.revision
    assert after.router != before.router


def test_scaling_starts_with_its_lower_bound(blueprint: LocalBlueprint) -> None:
    write(blueprint.folder, 2, decode={"scaling": {"min": 2, "max": 5}})
    assert blueprint.desired_service().shape == "1P2D"


def test_shares_of_a_rollout_are_of_each_roles_count(blueprint: LocalBlueprint) -> None:
    write(blueprint.folder, 2, decode={"replicas": 12}, rollout={"maxSurge": "25%", "maxUnavailable": "10%"})
    prefill, decode = blueprint.desired_service().prefill, blueprint.desired_service().decode
    assert (prefill.max_surge, prefill.max_unavailable) == (1, 0)
    assert (decode.max_surge, decode.max_unavailable) == (3, 1)


def test_a_wish_to_end_stops_also_when_it_is_damaged(blueprint: LocalBlueprint) -> None:
    store.save(blueprint.folder.stop, StopRequest())
    assert blueprint.desired_service().stopping
    blueprint.folder.stop.write_text("{")
    assert blueprint.desired_service().stopping
    blueprint.folder.stop.unlink()
    assert not blueprint.desired_service().stopping


def test_a_document_that_is_gone_is_a_clear_error(blueprint: LocalBlueprint) -> None:
    blueprint.folder.desired.unlink()
    with pytest.raises(LocalError, match=r"cannot read .*desired\.yaml"):
        blueprint.desired_service()


def test_new_instances_have_ports_of_their_own_and_agents_that_know_them(blueprint: LocalBlueprint) -> None:
    revision = blueprint.desired_service().decode.revision
    records = []
    for ordinal in range(3):
        name = InstanceName(f"qwen-e{ordinal}")
        records.append(blueprint.instance(Create(name, ordinal, Role.DECODE, revision), records, Random(0)))
    assert len({record.port for record in records}) == 3
    agents = blueprint.agents(records)
    for record in records:
        (config,) = agents[record.name]
        agent = config.agent
        assert agent is not None
        assert agent.engine == f"127.0.0.1:{record.port}"
        assert agent.routers == ("127.0.0.1:30001",)
        assert config.run_dir.endswith(f"/e{record.ordinal}")
        assert "--port" not in record.process.argv
        assert (record.followers, record.meeting) == ((), 0)


def test_members_of_an_instance_have_ports_devices_folders_and_agents_of_their_own(
        blueprint: LocalBlueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_operator.local.gpus.count", lambda: 4)
    before = blueprint.desired_service().decode.revision
    parallelism = {"tensor": 4, "pods": 2}
    write(blueprint.folder, 2, decode={"parallelism": parallelism})
    assert blueprint.desired_service().decode.revision != before
    name = InstanceName("qwen-e0")
    record = blueprint.instance(Create(name, 0, Role.DECODE, blueprint.desired_service().decode.revision), [], Random(0))
    (follower,) = record.followers
    assert (record.devices, follower.devices, record.all_devices) == ((0, 1), (2, 3), (0, 1, 2, 3))
    assert len(set(record.ports)) == 3
    assert record.process.argv[1:4] == follower.process.argv[1:4] == ("-m", "xpyd_sidecar.member", "--grace-s")
    assert record.process.argv[5:9] == ("--", record.process.argv[0], "-m", "vllm.entrypoints.launchers.api_server.entry")
    assert "--host" in record.process.argv
    assert "--host" not in follower.process.argv
    assert follower.process.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    leader, other = (config.agent for config in blueprint.agents([record])[name])
    assert leader is not None
    assert other is not None
    assert isinstance(leader.group, GroupConfig)
    assert isinstance(other.group, GroupConfig)
    assert (leader.listen, leader.routers) == (f"127.0.0.1:{record.meeting}", ("127.0.0.1:30001",))
    assert (other.listen, other.routers, other.group.leader) == (None, (), leader.listen)
    assert (leader.group.layout, leader.group.size) == (other.group.layout, 2)
    assert [config.run_dir.rpartition("/")[2] for config in blueprint.agents([record])[name]] == ["e0", "e0-1"]
    assert (leader.group.host, record.process.env["VLLM_HOST_IP"]) == ("127.0.0.1", "127.0.0.1")
    assert follower.process.env["XPYD_RUN_DIR"].endswith("/e0-1")


def test_members_with_ranks_of_their_own_have_a_server_each(blueprint: LocalBlueprint) -> None:
    write(blueprint.folder, 2, prefill={"parallelism": {"data": 4, "pods": 2}})
    name = InstanceName("qwen-e0")
    record = blueprint.instance(Create(name, 0, Role.PREFILL, blueprint.desired_service().prefill.revision), [], Random(0))
    for index, member in enumerate((record.member(0), record.member(1))):
        argv, place = member.process.argv, member.process.argv.index
        assert argv[place("--") + 3] == "vllm.entrypoints.launchers.api_server.entry"
        assert (argv[place("--data-parallel-start-rank") + 1], argv[place("--host") + 1]) == (str(2 * index), "127.0.0.1")
        assert "--data-parallel-hybrid-lb" in argv
        assert "--headless" not in argv
        assert (member.process.env["XPYD_DP_SYNC"], member.process.env["VLLM_HOST_IP"]) == ("auto", "127.0.0.1")
    agents = [config.agent for config in blueprint.agents([record])[name]]
    assert [(agent.engine, agent.advertised_address, agent.data_parallel) for agent in agents if agent is not None] == [
        (f"127.0.0.1:{port}", f"127.0.0.1:{port}", 4) for port in record.ports[:2]]


def test_agents_of_an_old_revision_keep_their_settings(blueprint: LocalBlueprint) -> None:
    create = Create(InstanceName("qwen-e0"), 0, Role.DECODE, blueprint.desired_service().decode.revision)
    record = blueprint.instance(create, [], Random(0))
    write(blueprint.folder, 2, engine={"args": ["--enforce-eager"]})
    blueprint.desired_service()
    assert blueprint.agents([record]) == {}


def test_the_planner_sets_counts_and_limits_hold_whoever_asks(blueprint: LocalBlueprint) -> None:
    scaling = {"scaling": {"min": 1, "max": 3}}
    planner = {"mode": "auto", "slo": {"ttftP95": "2s"}}
    write(blueprint.folder, 2, prefill=scaling, decode=scaling, limits={"maxInstances": 4}, planner=planner)
    assert blueprint.desired_service().shape == "1P1D"
    store.save(blueprint.folder.planned, PlannedCounts(2, 2, "why"))
    assert blueprint.desired_service().shape == "2P2D"
    store.save(blueprint.folder.planned, PlannedCounts(3, 2, "why"))
    assert blueprint.desired_service().shape == "2P2D"
    assert "maxInstances" in blueprint.desired_service().held
    blueprint.folder.planned.write_text("{")
    assert blueprint.desired_service().shape == "1P1D"
