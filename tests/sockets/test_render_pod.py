"""Pods of engines: what is in them, and when they must be replaced."""

from __future__ import annotations

import functools
import http.server
import json
import os
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pod_security import violations
from render_service import service

from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import UnsupportedField
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.engine import CPU_ENV
from xpyd_operator.render.objects import children
from xpyd_operator.render.paths import ENGINE_PORT, OFFLOAD
from xpyd_operator.render.pod import engine_pods, pod_revision
from xpyd_operator.render.settings import KubeSettings, PodUser
from xpyd_sidecar.agent import ask
from xpyd_sidecar.config import faults
from xpyd_sidecar.contract.ids import InstanceName, Role, split_host_port
from xpyd_sidecar.contract.launch import AGENT_SOCKET, SidecarConfig

SETTINGS = KubeSettings(sidecar_image="registry/xpyd-sidecar:1", cluster_domain="example.org")
SECRET = {"name": "s", "key": "k"}


def make(**spec: Any) -> DisaggService:
    made = service(Target.KUBERNETES, **spec)
    metadata = msgspec.structs.replace(made.metadata, namespace="models", uid="u-1")
    return msgspec.structs.replace(made, metadata=metadata)


def pod_of(one: DisaggService, role: Role = Role.DECODE, settings: KubeSettings = SETTINGS) -> dict[str, Any]:
    pod = engine_pods(one, role, InstanceName("qwen-e0"), Revision("abc"), settings)[0]
    plain: dict[str, Any] = json.loads(msgspec.json.encode(pod))
    assert plain == pod  # plain data throughout
    return plain


def main_of(pod: dict[str, Any]) -> dict[str, Any]:
    (main,) = pod["spec"]["containers"]
    return dict(main)


def sidecar_of(pod: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in pod["spec"]["initContainers"] if one["name"] == "sidecar")


def config_of(pod: dict[str, Any], host: str = "10.0.0.7") -> SidecarConfig:
    command = sidecar_of(pod)["command"]
    assert command[:4] == ["python3", "-m", "xpyd_sidecar", "--config-json"]
    return msgspec.json.decode(expand(command[4], {"XPYD_HOST": host}), type=SidecarConfig)


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names))
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def expand(text: str, known: dict[str, str]) -> str:
    """Kubernetes' own rules (third_party/forked/golang/expansion), one character after the other."""
    result, at = "", 0
    while at < len(text):
        here, after = text[at], text[at + 1 : at + 2]
        if here != "$" or not after:
            result, at = result + here, at + 1
        elif after == "$":
            result, at = result + "$", at + 2
        elif after == "(" and (end := text.find(")", at)) >= 0:
            name = text[at + 2 : end]
            result, at = result + known.get(name, f"$({name})"), end + 1
        else:
            result, at = result + here + after, at + 2
    return result


EVERYTHING: list[dict[str, Any]] = [
    {},
    {"model": {"source": "pvc://models/qwen"}, "router": {"placement": "deployment", "apiKeySecret": SECRET}},
    {"model": {"source": "/models/qwen"}, "router": {"apiKeySecret": SECRET}, "decode": {"resources": {}}},
    {"model": {"source": "a/b", "cache": {"claim": "hub"}, "tokenSecret": SECRET}},
    {"model": {"source": "a/b"}, "decode": {"parallelism": {"tensor": 2, "data": 2}}},
]


@pytest.mark.parametrize("spec", EVERYTHING, ids=str)
def test_pods_pass_the_restricted_profile_and_every_mount_has_its_volume(spec: dict[str, Any]) -> None:
    for role in Role:
        pod = pod_of(make(**spec), role)["spec"]
        assert list(violations(pod)) == []
        volumes = [volume["name"] for volume in pod["volumes"]]
        mounts = [mount for one in [*pod["initContainers"], *pod["containers"]] for mount in one["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert len(volumes) == len(set(volumes))
        assert all(one["resources"] or one["name"] == "main" for one in [*pod["initContainers"], *pod["containers"]])


@pytest.mark.parametrize("spec", EVERYTHING, ids=str)
def test_the_sidecars_configuration_is_right(spec: dict[str, Any]) -> None:
    one = make(**spec)
    config = config_of(pod_of(one))
    assert list(faults(config)) == []
    assert config.agent is not None
    assert config.agent.advertised_address == f"10.0.0.7:{ENGINE_PORT}"
    assert config.agent.engine == f"127.0.0.1:{ENGINE_PORT}"
    assert config.agent.routers == ("qwen-members.models.svc.example.org.:30001",)
    if one.spec.router.placement == "deployment":
        assert config.router is None
    else:
        assert config.router is not None
        assert config.router.beside_engine
        assert config.router.listen_on_s == 5
        assert (config.router.api_key_file is None) == (one.spec.router.api_key_secret is None)


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::5"])
def test_the_pods_address_may_be_of_either_family(host: str) -> None:
    one = make()
    config = config_of(pod_of(one), host)
    assert list(faults(config)) == []
    assert config.agent is not None
    assert config.router is not None
    assert split_host_port(config.agent.advertised_address) == (host, ENGINE_PORT)
    assert split_host_port(config.agent.listen or "") == ("::", 8009)
    assert config.router.host == "::"
    assert "0.0.0.0" not in json.dumps(pod_of(one))


def test_who_it_is_and_whose() -> None:
    metadata = pod_of(make(), Role.PREFILL)["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("qwen-e0", "models")
    (owner,) = metadata["ownerReferences"]
    assert owner == {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "name": "qwen", "uid": "u-1",
                     "controller": True, "blockOwnerDeletion": False}
    labels = metadata["labels"]
    assert (labels["xpyd.dev/service"], labels["xpyd.dev/role"], labels["xpyd.dev/revision"]) == ("qwen", "prefill", "abc")
    assert "xpyd.dev/router" not in labels
    assert "xpyd.dev/roster" not in labels


def test_a_pod_drains_before_it_ends() -> None:
    pod = pod_of(make(drain={"timeout": "90500ms"}))
    hook = main_of(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["python3", "-m", "xpyd_sidecar.agent.ask", "drain"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 91 + 30
    args = main_of(pod)["args"]
    assert args[args.index("--shutdown-timeout") + 1] == "91"
    config = config_of(pod)
    assert config.agent is not None
    assert config.router is not None
    assert config.agent.drain_timeout_s == config.router.drain_timeout_s == 90.5


def test_the_engine_is_probed_for_as_long_as_it_may_take() -> None:
    main = main_of(pod_of(make(engine={"startupTimeout": "7s"})))
    assert main["startupProbe"]["periodSeconds"] * main["startupProbe"]["failureThreshold"] >= 7
    assert main["livenessProbe"]["periodSeconds"] * main["livenessProbe"]["failureThreshold"] == 120
    assert all(main[probe]["httpGet"] == {"path": "/health", "port": 8000} for probe in ("startupProbe", "readinessProbe"))
    assert main["livenessProbe"]["exec"]["command"] == ["python3", "-m", "xpyd_sidecar.agent.ask", "live"]
    assert main["livenessProbe"]["timeoutSeconds"] > 2 * ask.PROBE_S, "it tells a silent agent from a bad word itself"
    assert main["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.parametrize("placement", ["sidecar", "deployment"])
def test_what_hangs_is_ended_without_the_time_of_a_drain(placement: str) -> None:
    pod = pod_of(make(router={"placement": placement}))
    assert pod["spec"]["terminationGracePeriodSeconds"] == 630
    for container in (main_of(pod), sidecar_of(pod)):
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["terminationGracePeriodSeconds"] == 30
        assert "terminationGracePeriodSeconds" not in container.get("readinessProbe", {})


def test_an_engine_that_starts_again_in_its_pod_takes_its_drain_back(tmp_path: Path) -> None:
    """Whether or not an agent answers, since a hook that fails would end the container."""
    command = main_of(pod_of(make()))["lifecycle"]["postStart"]["exec"]["command"]
    assert command[0] == "python3"
    asked: list[str] = []

    class Agent(http.server.BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "engine"

        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

    env = os.environ | {"XPYD_RUN_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = functools.partial(subprocess.run, [sys.executable, *command[1:]], env=env, check=True, timeout=30)
    run()
    with socketserver.UnixStreamServer(str(tmp_path / AGENT_SOCKET), Agent) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        run()
        thread.join(10)
    assert asked == ["/undrain"]


def test_the_sidecar_ends_after_the_engine_and_says_when_its_router_is_ready() -> None:
    sidecar = sidecar_of(pod_of(make(router={"ports": {"http": 9001, "members": 9002, "admin": 9003}})))
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 9003}
    assert [port["containerPort"] for port in sidecar["ports"]] == [9001, 9002, 9003]
    apart = sidecar_of(pod_of(make(router={"placement": "deployment"})))
    assert "readinessProbe" not in apart
    assert apart["startupProbe"]["exec"]["command"][-2:] == ["xpyd_sidecar.agent.ask", "status"]


@pytest.mark.parametrize(
    ("source", "model", "offline"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", False),
        ("/models/qwen", "/models/qwen", True),
        ("pvc://models", "/models/claim", True),
        ("pvc://models/a/b", "/models/claim/a/b", True),
        ("oci://registry.example/team/qwen:v1", "/models/claim", True),
        ("oci://registry.example/team/qwen:v1/models", "/models/claim/models", True),
        ("s3://bucket/models/qwen", "s3://bucket/models/qwen", True),
    ],
)
def test_where_the_model_comes_from(source: str, model: str, offline: bool) -> None:
    pod = pod_of(make(model={"source": source}))
    main = main_of(pod)
    assert main["args"][:2] == ["--model", model]
    env = env_of(main)
    assert env.get("HF_HUB_OFFLINE") == ("1" if offline else None)
    assert env.get("HF_HOME") == (None if offline else "/cache")
    claims = [one["persistentVolumeClaim"] for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one]
    assert claims == ([{"claimName": "models", "readOnly": True}] if source.startswith("pvc:") else [])
    images = [one["image"] for one in pod["spec"]["volumes"] if "image" in one]
    assert images == ([{"reference": "registry.example/team/qwen:v1"}] if source.startswith("oci:") else [])
    mounts = [one for one in main["volumeMounts"] if one["name"] == "model"]
    assert [(one["mountPath"], one["readOnly"]) for one in mounts] == [("/models/claim", True)] * bool(claims or images)


def test_a_model_beside_the_document_is_refused() -> None:
    with pytest.raises(UnsupportedField, match=r"^spec\.model\.source: \./weights lies beside the document"):
        pod_of(service(None, model={"source": "./weights"}))


def test_cache_and_token() -> None:
    claim = pod_of(make(model={"source": "a/b", "cache": {"claim": "hub"}, "tokenSecret": SECRET}))
    plain = pod_of(make(model={"source": "a/b"}))
    cache = [next(one for one in pod["spec"]["volumes"] if one["name"] == "cache") for pod in (claim, plain)]
    assert cache[0]["persistentVolumeClaim"] == {"claimName": "hub"}
    assert cache[1]["emptyDir"] == {}
    assert env_of(main_of(claim))["HF_TOKEN"] == {"secretKeyRef": {"name": "s", "key": "k"}}


def test_pods_of_a_node_share_a_folder_where_the_document_names_one() -> None:
    def folders(**kv: Any) -> tuple[list[Any], list[str], str]:
        pod = pod_of(make(kv=kv))
        spec, main = pod["spec"], main_of(pod)
        config = json.loads(main["args"][main["args"].index("--kv-transfer-config") + 1])
        return ([volume["hostPath"] for volume in spec["volumes"] if volume["name"] == "kv"],
                [mount["mountPath"] for mount in main["volumeMounts"] if mount["name"] == "kv"],
                config["kv_connector_extra_config"]["xpyd"]["shared_folder"])

    assert folders() == ([], [], "")
    assert folders(transport="tcp", sharedMemory={"hostPath": "/dev/shm"}) == ([], [], ""), "tcp does not go through memory"
    there = {"path": "/dev/shm", "type": "Directory"}
    assert folders(transport="shm", sharedMemory={"hostPath": "/dev/shm"}) == ([there], ["/run/xpyd-kv"], "/run/xpyd-kv")


USERS = {"runAsUser", "runAsGroup", "fsGroup"}


def test_what_is_offloaded_to_disk_has_a_volume_of_its_size() -> None:
    pod = pod_of(make(kv={"offload": {"disk": "500Gi"}}))
    assert {"name": "offload", "emptyDir": {"sizeLimit": "500Gi"}} in pod["spec"]["volumes"]
    assert {"name": "offload", "mountPath": OFFLOAD} in main_of(pod)["volumeMounts"]
    without = pod_of(make(kv={"offload": {"memory": "1Gi"}}))
    assert "offload" not in {volume["name"] for volume in without["spec"]["volumes"]}


def test_an_audit_replaces_pods_with_routers_alone() -> None:
    for placement, same in (("deployment", True), ("sidecar", False)):
        one = revision(router={"placement": placement})
        assert (revision(router={"placement": placement}, kv={"audit": 0.5}) == one) is same
    assert revision(kv={"offload": {"memory": "1Gi"}}) != revision()


@pytest.mark.parametrize("placement", ["sidecar", "deployment"])
def test_where_the_cluster_assigns_users_no_pod_names_one(placement: str) -> None:
    """OpenShift refuses pods that do; what it fills in is then the pod's."""
    one = make(router={"placement": placement})
    assigned = msgspec.structs.replace(SETTINGS, pod_user="assigned")
    named: dict[str, list[set[str]]] = {}
    for settings in (SETTINGS, assigned):
        specs = [pod_of(one, role, settings)["spec"] for role in Role]
        specs += [each["spec"]["template"]["spec"] for each in children(one, dict.fromkeys(Role, 1), settings)
                  if each["kind"] == "Deployment"]
        assert [list(violations(spec)) for spec in specs] == [[]] * len(specs)
        contexts = [owner["securityContext"] for spec in specs for owner in (spec, *spec["containers"],
                                                                             *spec.get("initContainers", ()))]
        named[settings.pod_user] = [found for found in (USERS & context.keys() for context in contexts) if found]
    assert named == {"fixed": [USERS] * (2 + (placement == "deployment")), "assigned": []}


@pytest.mark.parametrize("user", ["fixed", "assigned"])
def test_whoever_it_runs_as_finds_folders_that_it_may_write(user: PodUser) -> None:
    """A user that stands in no list of users has no home and no name of its own, and owns nothing in the image."""
    settings = msgspec.structs.replace(SETTINGS, pod_user=user)
    main = main_of(pod_of(make(), settings=settings))
    writable = [mount["mountPath"] for mount in main["volumeMounts"] if not mount.get("readOnly")]
    env = env_of(main)
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
                 "HF_HOME", "VLLM_RPC_BASE_PATH", "XPYD_RUN_DIR"):
        assert any(env[name] == path or env[name].startswith(f"{path}/") for path in writable), name
    assert env["USER"] == env["LOGNAME"] == "xpyd", "asked for by torch, which else looks for the user's number"
    volumes = {volume["name"]: volume for volume in pod_of(make(), settings=settings)["spec"]["volumes"]}
    assert volumes["key"]["secret"]["defaultMode"] == 0o440, "read by the group, which is the pod's fsGroup, or root's"


def test_what_is_compiled_outlives_a_pod_where_there_is_a_claim_for_it() -> None:
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    kept, lost = (env_of(main_of(pod_of(make(model={"source": "a/b", "cache": cache})))) for cache in ({"claim": "c"}, {}))
    assert all(kept[name].startswith(f"{kept['HF_HOME']}/compiled/") for name in names)
    assert all(lost[name].startswith(f"{lost['HOME']}/") for name in names)
    assert kept["XDG_CACHE_HOME"].startswith(kept["HOME"])


def test_resources_default_to_a_gpu_per_device_and_requests_to_limits() -> None:
    assert main_of(pod_of(make()))["resources"] == {"limits": {"nvidia.com/gpu": 1}, "requests": {"nvidia.com/gpu": 1}}
    sizes = {"parallelism": {"tensor": 2}}
    assert main_of(pod_of(make(prefill=sizes, decode=sizes)))["resources"]["limits"] == {"nvidia.com/gpu": 2}
    given = {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}, "requests": {"memory": "32Gi", "cpu": 4}}
    assert main_of(pod_of(make(decode={"resources": given})))["resources"] == {
        "limits": given["limits"], "requests": {"nvidia.com/gpu": 1, "memory": "32Gi", "cpu": 4}}
    assert main_of(pod_of(make(decode={"resources": {}})))["resources"] == {}


def test_a_limit_of_memory_takes_no_gpu_away_and_a_template_names_devices_as_resources_do() -> None:
    given = {"limits": {"memory": "64Gi"}, "requests": {"cpu": 8}}
    assert main_of(pod_of(make(decode={"resources": given})))["resources"] == {
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 1}, "requests": {"memory": "64Gi", "nvidia.com/gpu": 1, "cpu": 8}}
    laid = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"amd.com/gpu": 1}}}]}}
    amd = {"memory": "64Gi", "amd.com/gpu": 1}
    assert main_of(pod_of(make(decode={"resources": given, "template": laid})))["resources"] == {
        "limits": amd, "requests": {**amd, "cpu": 8}}


def test_claims_are_devices_of_the_container() -> None:
    claims = [{"name": "gpu", "request": "one"}, {"name": "nic"}]
    pod = pod_of(make(decode={"resources": {"limits": {"memory": "9Gi"}, "claims": claims},
                              "template": {"spec": {"resourceClaims": [{"name": "gpu"}, {"name": "nic"}]}}}))
    assert main_of(pod)["resources"] == {"limits": {"memory": "9Gi"}, "requests": {"memory": "9Gi"}, "claims": claims}
    assert not CPU_ENV.keys() & env_of(main_of(pod)).keys()


def test_cpu_settings_only_without_devices_and_the_users_come_before_them() -> None:
    assert CPU_ENV.items() <= env_of(main_of(pod_of(make(decode={"resources": {}})))).items()
    cores = {"parallelism": {"device": "none"}, "resources": {"limits": {"memory": "4Gi"}}}
    assert CPU_ENV.items() <= env_of(main_of(pod_of(make(decode=cores)))).items()
    assert main_of(pod_of(make(decode=cores)))["resources"] == {"limits": {"memory": "4Gi"}, "requests": {"memory": "4Gi"}}
    assert not CPU_ENV.keys() & env_of(main_of(pod_of(make(decode={"resources": {"limits": {"memory": "4Gi"}}})))).keys()
    assert not CPU_ENV.keys() & env_of(main_of(pod_of(make()))).keys()
    assert not CPU_ENV.keys() & env_of(main_of(pod_of(make(decode={"resources": {"limits": {"amd.com/gpu": 1}}})))).keys()
    own = {"env": [{"name": "OMP_NUM_THREADS", "value": "3"}]}
    assert env_of(main_of(pod_of(make(engine=own, decode={"resources": {}}))))["OMP_NUM_THREADS"] == "3"


def test_environment_of_the_connector_and_of_the_user() -> None:
    variables = [{"name": "A", "value": "x"}, {"name": "B"}, {"name": "C", "valueFrom": {"secretKeyRef": SECRET}},
                 {"name": "TMPDIR", "value": "/elsewhere"}]
    main = main_of(pod_of(make(engine={"env": variables})))
    env = env_of(main)
    assert main["env"][0] == {"name": "XPYD_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert env["VLLM_HOST_IP"] == "$(XPYD_HOST)"
    assert (env["XPYD_INSTANCE"], env["PYTHONPATH"]) == ("qwen-e0", "/xpyd")
    assert env["XPYD_KEY_FILE"] == "/etc/xpyd/key/key"
    assert (env["A"], env["B"], env["TMPDIR"]) == ("x", "", "/elsewhere")
    assert env["C"] == {"secretKeyRef": SECRET}


def test_what_the_user_writes_arrives_as_written() -> None:
    text = "$(XPYD_HOST) $$(X) $(NO $X $"
    one = make(model={"source": "a/b", "servedName": text}, engine={"args": [text], "env": [{"name": "A", "value": text}]})
    pod = pod_of(one)
    known = {"XPYD_HOST": "10.0.0.7"}
    args = [expand(argument, known) for argument in main_of(pod)["args"]]
    assert args.count(text) == 2
    assert expand(env_of(main_of(pod))["A"], known) == text
    config = config_of(pod)
    assert config.agent is not None
    assert config.router is not None
    assert config.agent.model == config.router.model == text
    assert config.agent.advertised_address == "10.0.0.7:8000"


def test_equal_roles_have_pods_that_differ_in_the_role_alone() -> None:
    one = make(engine={"args": ["--enforce-eager"]})
    prefill, decode = (pod_of(one, role) for role in Role)
    assert prefill["metadata"]["labels"].pop("xpyd.dev/role") == "prefill"
    assert decode["metadata"]["labels"].pop("xpyd.dev/role") == "decode"
    for pod, role in ((prefill, "prefill"), (decode, "decode")):
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"].pop("xpyd.dev/role") == role
        command = sidecar_of(pod)["command"]
        assert command[4].count(f'"role":"{role}"') == 1
        command[4] = command[4].replace(f'"role":"{role}"', "")
    assert prefill == decode


def test_a_template_is_laid_over_the_pod_of_its_role() -> None:
    one = make(decode={"template": {"spec": {"nodeSelector": {"disk": "fast"}}}})
    assert pod_of(one)["spec"]["nodeSelector"] == {"disk": "fast"}
    assert "nodeSelector" not in pod_of(one, Role.PREFILL)["spec"]
    with pytest.raises(UnsupportedField, match=r"^spec\.decode\.template\.spec\.volumes: must be a list"):
        pod_of(make(decode={"template": {"spec": {"volumes": {"name": "x"}}}}))


def revision(role: Role = Role.DECODE, key: str = "k", **spec: Any) -> str:
    return pod_revision(make(**spec), role, key)


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"source": "Qwen/Qwen3-8B", "revision": "v2"}},
        {"model": {"source": "Qwen/Qwen3-8B", "cache": {"claim": "c"}}},
        {"engine": {"image": "other:1"}},
        {"engine": {"args": ["--enforce-eager"]}},
        {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": SECRET}}]}},
        {"kv": {"memory": "2Gi"}},
        {"kv": {"encryption": "enabled"}},
        {"decode": {"args": ["--max-num-seqs", "8"]}},
        {"decode": {"resources": {}}},
        {"decode": {"parallelism": {"device": "none"}}},
        {"decode": {"parallelism": {"device": "amd.com/gpu"}}},
        {"decode": {"parallelism": {"tensor": 2}}},
        {"decode": {"template": {"metadata": {"labels": {"a": "b"}}}}},
        {"router": {"policy": "least_loaded"}},
        {"router": {"ports": {"http": 9001}}},
        {"router": {"apiKeySecret": SECRET}},
        {"router": {"placement": "deployment"}},
    ],
    ids=str,
)
def test_what_a_pod_is_made_of_changes_its_revision(spec: dict[str, Any]) -> None:
    assert revision(**spec) != revision()


@pytest.mark.parametrize(
    "spec",
    [
        {"decode": {"replicas": 3}},
        {"decode": {"scaling": {"min": 1, "max": 3}}},
        {"prefill": {"args": ["--max-num-seqs", "8"]}},
        {"engine": {"startupTimeout": "1h"}},
        {"drain": {"timeout": "1m"}},
        {"rollout": {"maxSurge": 2}},
        {"limits": {"maxInstances": 9}},
        {"networkPolicy": {"enabled": False}},
        {"router": {"replicas": 3}},
        {"router": {"gateway": {"parentRefs": [{"name": "public"}], "hostnames": ["chat.example.com"]}}},
        {"kv": {"encryption": "network"}},
        {"decode": {"parallelism": {"device": "nvidia.com/gpu"}}},
        {"router": {"policy": "cost", "ports": {"http": 10001}, "maxBodySize": "32Mi"}},
        {"engine": {"image": "vllm/vllm-openai:v0.32.0", "args": []}, "decode": {"parallelism": {"tensor": 1}}},
    ],
    ids=str,
)
def test_what_a_pod_is_not_made_of_keeps_its_revision(spec: dict[str, Any]) -> None:
    assert revision(**spec) == revision()


def test_the_routers_own_settings_replace_no_engine_where_routers_are_elsewhere() -> None:
    apart = {"placement": "deployment"}
    before = revision(router=apart)
    assert revision(router={**apart, "policy": "least_loaded", "replicas": 5, "ports": {"http": 9001}}) == before
    assert revision(router={**apart, "apiKeySecret": SECRET}) == before
    assert revision(router={**apart, "ports": {"members": 9001}}) != before


def test_the_key_counts_and_the_role_does_not() -> None:
    assert revision(key="other") != revision()
    assert revision(Role.PREFILL) == revision(Role.DECODE)


def test_an_upgrade_of_xpyd_changes_no_revision() -> None:
    """Fixed for ever: whatever pods are rendered to, the same document keeps its revision."""
    assert revision() == "725c40c23636"
    spec = {"engine": {"args": ["--enforce-eager"]}, "router": {"policy": "least_loaded", "maxBodySize": "1Mi"}}
    assert revision(**spec) == "3c6335c26059"
    decode = {"resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}}, "parallelism": {"tensor": 2}}
    assert revision(decode=decode) == "09613e857151"
    assert revision(decode={"resources": {}}) == "d7735cb01062"


def test_a_device_beside_resources_is_another_revision_than_without_one() -> None:
    cores = {"limits": {"memory": "4Gi"}}
    assert revision(decode={"resources": cores, "parallelism": {"device": "none"}}) != revision(decode={"resources": cores})
    stated = {"resources": cores, "parallelism": {"device": "nvidia.com/gpu"}}
    assert revision(decode={"resources": cores}) == revision(decode=stated)
