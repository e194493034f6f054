"""Pods of an instance of several members: what each has beside those of an instance that is one pod."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pod_security import violations
from render_service import service

from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import SpecError
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render import labels
from xpyd_operator.render.layout import FOLLOWING, digest, layout
from xpyd_operator.render.objects import children, manifests, unwanted_objects
from xpyd_operator.render.pod import engine_pods, pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.switch import pods_difference
from xpyd_operator.render.unsupported import kube_refusals
from xpyd_sidecar.config import faults
from xpyd_sidecar.contract.group import LEADER_HERE, LIFE_HERE, PORT_HERE
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import GroupConfig, SidecarConfig

SETTINGS = KubeSettings(sidecar_image="xpyd-sidecar:1", cluster_domain="example.org")
NAME = InstanceName("qwen-e3")
WIDE = {"decode": {"parallelism": {"tensor": 4, "pods": 2}}}
Body = dict[str, Any]


def make(**spec: Any) -> DisaggService:
    made = service(Target.KUBERNETES, **spec)
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, namespace="models", uid="u-1"))


def pods(role: Role = Role.DECODE, **spec: Any) -> list[Body]:
    made = engine_pods(make(**(WIDE | spec)), role, NAME, Revision("abc"), SETTINGS)
    assert json.loads(msgspec.json.encode(made)) == list(made), "plain data throughout"
    return list(made)


def main_of(pod: Body) -> Body:
    (main,) = pod["spec"]["containers"]
    return dict(main)


def config_of(pod: Body) -> SidecarConfig:
    sidecar = next(each for each in pod["spec"]["initContainers"] if each["name"] == "sidecar")
    text = sidecar["command"][-1].replace("$(XPYD_HOST)", "10.0.0.7")
    config = msgspec.json.decode(text, type=SidecarConfig)
    assert list(faults(config)) == []
    return config


def test_each_member_is_a_pod_with_a_name_among_the_others() -> None:
    leader, follower = pods()
    assert [pod["metadata"]["name"] for pod in (leader, follower)] == ["qwen-e3-0", "qwen-e3-1"]
    for index, pod in enumerate((leader, follower)):
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"qwen-e3-{index}", "qwen-engines")
        marks = pod["metadata"]["labels"]
        assert (marks["xpyd.dev/instance"], marks["xpyd.dev/member"]) == ("qwen-e3", str(index))
        assert pod["metadata"]["annotations"]["xpyd.dev/members"] == "2"
        assert main_of(pod)["resources"]["limits"] == {"nvidia.com/gpu": 2}
        assert not list(violations(pod["spec"]))
    one, other = (pod["metadata"]["annotations"]["xpyd.dev/layout"] for pod in (leader, follower))
    assert one == other == digest(layout(make(**WIDE), Role.DECODE, NAME, "Qwen/Qwen3-8B"), SETTINGS.sidecar_image)


def test_an_instance_of_one_pod_has_nothing_of_it() -> None:
    (pod,) = pods(Role.PREFILL)
    assert pod["metadata"]["name"] == "qwen-e3"
    assert pod["metadata"]["annotations"].keys() == {"kubectl.kubernetes.io/default-container"}
    assert not pod["metadata"]["labels"].keys() & {"xpyd.dev/instance", "xpyd.dev/member"}
    assert not pod["spec"].keys() & {"hostname", "subdomain"}
    assert config_of(pod).agent.group is None  # type: ignore[union-attr]


def test_agents_of_members_meet_at_the_leaders_by_its_name_and_only_it_speaks_to_routers() -> None:
    leader, follower = (config_of(pod) for pod in pods())
    assert (leader.instance, follower.instance) == ("qwen-e3", "qwen-e3")
    assert leader.agent is not None
    assert follower.agent is not None
    hashed = digest(layout(make(**WIDE), Role.DECODE, NAME, "Qwen/Qwen3-8B"), SETTINGS.sidecar_image)
    at = "qwen-e3-0.qwen-engines.models.svc.example.org.:8009"
    assert leader.agent.group == GroupConfig(0, 2, hashed)
    assert follower.agent.group == GroupConfig(1, 2, hashed, at)  # type: ignore[arg-type]
    assert (len(leader.agent.routers), follower.agent.routers) == (1, ())
    assert leader.agent.listen == follower.agent.listen == "[::]:8009", "kubelets ask both"
    assert (leader.router is not None, follower.router) == (True, None)
    assert leader.agent.assignment_file
    assert follower.agent.assignment_file is None


@pytest.mark.parametrize("placement", ["sidecar", "deployment"])
def test_a_follower_has_no_part_in_what_clients_reach(placement: str) -> None:
    given = {"placement": placement, "apiKeySecret": {"name": "s", "key": "k"}, "tls": {"secret": "t"}}
    leader, follower = pods(router=given)
    volumes = [{each["name"] for each in pod["spec"]["volumes"]} for pod in (leader, follower)]
    assert volumes[0] - volumes[1] == {"assignment"} | ({"clients", "tls"} if placement == "sidecar" else set())
    for pod, names in zip((leader, follower), volumes, strict=True):
        containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == names
    sidecar = next(each for each in follower["spec"]["initContainers"] if each["name"] == "sidecar")
    assert "ports" not in sidecar
    assert "readinessProbe" not in sidecar


def test_main_is_the_launcher_of_what_the_layout_says() -> None:
    members = layout(make(**WIDE), Role.DECODE, NAME, "Qwen/Qwen3-8B")
    leader, follower = (main_of(pod) for pod in pods(drain={"timeout": "90s"}))
    launcher = ["python3", "-m", "xpyd_sidecar.member", "--grace-s", "90", "--"]
    assert leader["command"] == [*launcher, "python3", "-m", "xpyd_sidecar.listening", members[0].module]
    assert follower["command"] == [*launcher, "python3", "-m", FOLLOWING]
    assert leader["args"][-2:] == ["--port", "8000"]
    assert "--port" not in follower["args"]
    assert "--headless" in follower["args"]
    for main in (leader, follower):
        words = " ".join(main["args"])
        assert all(mark in words for mark in (LIFE_HERE, LEADER_HERE, PORT_HERE))
        assert "TORCHINDUCTOR_CACHE_DIR" not in {each["name"] for each in main["env"]}, "the launcher has one for each life"
    assert "ports" not in follower


def test_members_with_ranks_of_their_own_all_serve() -> None:
    leader, follower = pods(decode={"parallelism": {"data": 4, "pods": 2}})
    for index, pod in enumerate((leader, follower)):
        main, agent = main_of(pod), config_of(pod).agent
        assert main["command"][-2] == "xpyd_sidecar.listening"
        assert main["args"][-2:] == ["--port", "8000"]
        assert main["args"][main["args"].index("--data-parallel-start-rank") + 1] == str(2 * index)
        assert main["ports"][0]["containerPort"] == 8000
        assert agent is not None
        assert (agent.advertised_address, agent.data_parallel) == ("10.0.0.7:8000", 4)
        assert main["resources"]["limits"] == {"nvidia.com/gpu": 2}


def test_memory_is_counted_for_the_ranks_of_one_pod() -> None:
    def refused(pods: int, memory: str) -> bool:
        role = {"parallelism": {"tensor": 4, "pods": pods}, "resources": {"limits": {"memory": memory}}}
        return bool(list(kube_refusals(make(decode=role))))

    assert [refused(1, "3Gi"), refused(2, "3Gi"), refused(2, "1Gi")] == [True, False, True]


def test_the_probes_of_main_ask_the_agent_whether_the_group_serves() -> None:
    for main in map(main_of, pods(engine={"startupTimeout": "10m"})):
        ready = {"path": "/group/ready", "port": 8009}
        assert [main[name]["httpGet"] for name in ("startupProbe", "readinessProbe")] == [ready, ready]
        live = main["livenessProbe"]
        assert live["exec"]["command"] == ["python3", "-m", "xpyd_sidecar.agent.ask", "live"]
        assert live["periodSeconds"] * live["failureThreshold"] == 120
        startup = main["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] == 600 + 600, "and the time to find places"


def made(**spec: Any) -> dict[tuple[str, str], Body]:
    found = children(make(**spec), {Role.PREFILL: 3, Role.DECODE: 4}, SETTINGS)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_a_headless_service_gives_them_names_before_they_are_ready() -> None:
    spec = made(**WIDE)["Service", "qwen-engines"]["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    for pod in pods():
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
    assert spec["selector"] == {labels.SERVICE: "qwen"}, "a label that nobody puts back would be a name lost for ever"
    assert ("Service", "qwen-engines") not in made()
    assert ("Service", "qwen-engines") in unwanted_objects(make())
    assert ("Service", "qwen-engines") not in unwanted_objects(make(), several=True), "while there are such instances"
    assert ("Service", "qwen-engines") not in unwanted_objects(make(**WIDE))


@pytest.mark.parametrize(("unavailable", "prefill", "decode"), [(0, 2, 7), (2, 1, 6)])
def test_budgets_count_the_pods_of_all_instances(unavailable: int, prefill: int, decode: int) -> None:
    found = made(**WIDE, rollout={"maxUnavailable": unavailable})
    least = {name: found["PodDisruptionBudget", f"qwen-{name}"]["spec"]["minAvailable"] for name in ("prefill", "decode")}
    assert least == {"prefill": prefill, "decode": decode}
    assert found["PodDisruptionBudget", "qwen-decode"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_members_reach_each_other_and_nobody_else_does() -> None:
    found = made(**WIDE)
    policy = found["NetworkPolicy", "qwen"]["spec"]
    among, operator = policy["ingress"]
    for pod in pods():
        (peer,) = among["from"]
        assert peer["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        clients = found["NetworkPolicy", "qwen-clients"]["spec"]["podSelector"]["matchLabels"]
        assert not clients.items() <= pod["metadata"]["labels"].items(), "before the operator says that it routes"
    assert "ports" not in among
    assert {each["port"] for each in operator["ports"]} == {8009, 10001, 10002}


def test_members_are_placed_together() -> None:
    assert "affinity" not in pods()[0]["spec"]
    key = "nvidia.com/gpu.clique"
    near = {"labelSelector": {"matchExpressions": [
        {"key": "xpyd.dev/instance", "operator": "In", "values": ["qwen-e3"]}]}, "topologyKey": key}
    for pod in pods(**WIDE, engine={"topology": key}):
        assert pod["spec"]["affinity"] == {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": key, "labelSelector": {"matchExpressions": [{"key": "xpyd.dev/instance", "operator": "Exists"}]},
         "mismatchLabelKeys": ["xpyd.dev/instance"]}]}}
    for pod in pods(decode=WIDE["decode"] | {"template": {"spec": {"affinity": apart}}}, engine={"topology": key}):
        assert pod["spec"]["affinity"] == apart | {
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}, "a template may keep others away"


def test_topology_is_part_of_the_revision_of_roles_that_have_several_pods() -> None:
    placed = make(**WIDE, engine={"topology": "zone"})
    assert pod_revision(placed, Role.DECODE, "key") != pod_revision(make(**WIDE), Role.DECODE, "key")
    assert pod_revision(placed, Role.PREFILL, "key") == pod_revision(make(**WIDE), Role.PREFILL, "key")


def test_pods_are_part_of_the_revision_and_one_pod_is_none() -> None:
    def revision(**parallelism: int) -> Revision:
        return pod_revision(make(decode={"parallelism": parallelism}), Role.DECODE, "key")

    assert revision(tensor=4, pods=2) != revision(tensor=4)
    assert revision(tensor=4, pods=1) == revision(tensor=4)


def test_roles_of_equal_members_can_switch() -> None:
    both = {"parallelism": {"tensor": 4, "pods": 2}}
    assert pods_difference(make(prefill=both, decode=both), SETTINGS) == ""
    assert "parallelism" in pods_difference(make(prefill={"parallelism": {"tensor": 4}}, decode=both), SETTINGS)


def test_manifests_have_the_pods_of_all_instances() -> None:
    both = make(prefill={"replicas": 1}, decode={"replicas": 2, "parallelism": {"tensor": 4, "pods": 2}})
    names = [each["metadata"]["name"] for each in manifests(both, SETTINGS) if each["kind"] == "Pod"]
    assert names == ["qwen-e0", "qwen-e1-0", "qwen-e1-1", "qwen-e2-0", "qwen-e2-1"]


@pytest.mark.parametrize(("spec", "path", "words"), [
    (WIDE | {"networkPolicy": {"enabled": False}}, "spec.networkPolicy.enabled", "policies of your own add to it"),
    ({"decode": {"parallelism": {"tensor": 4, "pods": 3}}}, "spec.decode.parallelism.pods", "write 1 or 2 or 4"),
    ({"engine": {"topology": "zone"}}, "spec.engine.topology", "parallelism.pods above 1"),
    (WIDE | {"engine": {"topology": "a b"}}, "spec.engine.topology", "key of a label"),
])
def test_what_cannot_be_is_refused_with_its_field_and_the_right_value(spec: Body, path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        make(**spec)
    assert [fault.path for fault in error.value.faults] == [path]
    assert words in str(error.value)


@pytest.mark.parametrize(("spec", "paths"), [
    (WIDE, []),
    (WIDE | {"kv": {"transport": "shm", "sharedMemory": {"hostPath": "/dev/shm"}}}, ["spec.kv.transport"]),
    (WIDE | {"kv": {"offload": {"memory": "1Gi"}}}, ["spec.kv.offload"]),
    ({"decode": {"parallelism": {"data": 4, "pods": 2}}}, []),
], ids=str)
def test_what_a_cluster_cannot_do_yet_is_refused_with_its_field(spec: Body, paths: list[str]) -> None:
    assert [path for path, _ in kube_refusals(make(**spec))] == paths
