"""What goes with a service."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pod_security import violations
from render_service import service

from xpyd_operator.api.decode import decode_pool
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.compare import differs
from xpyd_operator.render.labels import owner_reference
from xpyd_operator.render.objects import children, key_secret, manifests, pool, router_pod, unwanted_objects
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.config import faults
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import SidecarConfig

SETTINGS = KubeSettings(sidecar_image="xpyd-sidecar:1", operator_namespace="ops")
COUNTS = {Role.PREFILL: 1, Role.DECODE: 3}


def make(**spec: Any) -> DisaggService:
    made = service(Target.KUBERNETES, **spec)
    metadata = msgspec.structs.replace(made.metadata, namespace="models", uid="u-1")
    return msgspec.structs.replace(made, metadata=metadata)


def made(counts: dict[Role, int] | None = None, **spec: Any) -> dict[tuple[str, str], dict[str, Any]]:
    found = children(make(**spec), counts or COUNTS, SETTINGS)
    assert json.loads(msgspec.json.encode(found)) == list(found)  # plain data throughout
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def chosen(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


APART = {"router": {"placement": "deployment", "replicas": 4}}


def test_all_of_them_belong_to_the_service() -> None:
    owner = owner_reference(make())
    assert (owner["controller"], owner["blockOwnerDeletion"], owner["uid"]) == (True, False, "u-1")
    others = [key_secret(make(), "ab"), pool(make(), Role.DECODE, 2)]
    for one in [*made(**APART).values(), *others]:
        lasts = one["kind"] in ("Service", "NetworkPolicy")
        assert one["metadata"]["ownerReferences"] == ([] if lasts else [owner]), "these outlive the service's last pod"
        assert one["metadata"]["labels"]["xpyd.dev/service-uid"] == "u-1"
        assert one["metadata"]["namespace"] == "models"
        assert one["metadata"]["labels"]["xpyd.dev/service"] == "qwen"
    with pytest.raises(ValueError, match="qwen has no uid"):
        owner_reference(service())


def test_clients_reach_routers_and_heartbeats_reach_those_that_are_not_ready_too() -> None:
    found = made(router={"ports": {"http": 9001, "members": 9002, "admin": 9003}})
    clients, members = found["Service", "qwen"]["spec"], found["Service", "qwen-members"]["spec"]
    assert clients["selector"] == {"xpyd.dev/service": "qwen", "xpyd.dev/router": "true"}
    assert clients["ports"] == [
        {"name": "http", "port": 9001, "targetPort": 9001, "protocol": "TCP", "appProtocol": "http"}]
    assert members["selector"] == {"xpyd.dev/service": "qwen", "xpyd.dev/roster": "true"}
    assert (members["clusterIP"], members["publishNotReadyAddresses"]) == ("None", True)
    assert [(each["name"], each["port"]) for each in members["ports"]] == [("members", 9002), ("admin", 9003)]


def router(**spec: Any) -> dict[str, Any]:
    """The pod template of routers."""
    found = made(**APART | {"router": APART["router"] | spec})
    return dict(found["Deployment", "qwen-router"]["spec"]["template"])


def test_routers_in_pods_of_their_own_have_a_template() -> None:
    template = {
        "metadata": {"labels": {"team": "chat"}, "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {
            "imagePullSecrets": [{"name": "registry"}], "tolerations": [{"operator": "Exists"}],
            "priorityClassName": "high", "securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
            "containers": [{"name": "router", "env": [{"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}],
                            "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                            "resources": {"limits": {"cpu": 2}}}],
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        },
    }
    before, pod = router(), router(template=template)
    assert pod["metadata"] == {"labels": before["metadata"]["labels"] | {"team": "chat"},
                               "annotations": {"sidecar.istio.io/inject": "false"}}
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert "runAsUser" not in pod["spec"]["securityContext"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (container,), (was,) = pod["spec"]["containers"], before["spec"]["containers"]
    assert {"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"} in container["env"]
    assert container["resources"]["limits"] == {"memory": "1Gi", "cpu": 2}
    assert (container["command"], container["image"]) == (was["command"], was["image"])
    assert list(violations(pod["spec"])) == []


def test_the_pod_of_a_dry_run_is_the_deployments() -> None:
    one = make(router=APART["router"] | {"template": {"spec": {"priorityClassName": "high"}}})
    pod = router_pod(one, "qwen-check-router", SETTINGS)
    template = router(template={"spec": {"priorityClassName": "high"}})
    assert (pod["metadata"]["name"], pod["metadata"]["namespace"]) == ("qwen-check-router", "models")
    assert (pod["metadata"]["labels"], pod["spec"]) == (template["metadata"]["labels"], template["spec"])


RESOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}),
    "large bodies": ({"maxBodySize": "1Gi"},
                     {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "6656Mi"}}),
    "none": ({"resources": {}}, {}),
    "a limit": ({"resources": {"limits": {"cpu": 2, "memory": "3Gi"}}},
                {"requests": {"cpu": 2, "memory": "3Gi"}, "limits": {"cpu": 2, "memory": "3Gi"}}),
    "a request": ({"resources": {"requests": {"cpu": "100m"}}},
                  {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}),
    "more than the default limit": ({"resources": {"requests": {"memory": "4Gi"}}},
                                    {"requests": {"cpu": "250m", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}),
}


@pytest.mark.parametrize("case", RESOURCES)
def test_a_routers_resources_follow_its_settings(case: str) -> None:
    written, resources = RESOURCES[case]
    (container,) = router(**written)["spec"]["containers"]
    assert container["resources"] == resources
    beside = engine_pods(make(router=written), Role.DECODE, InstanceName("qwen-e0"), Revision("r"), SETTINGS)[0]
    sidecar = next(one for one in beside["spec"]["initContainers"] if one["name"] == "sidecar")
    assert sidecar["resources"] == resources
    apart = make(router=APART["router"] | written)
    alone = engine_pods(apart, Role.DECODE, InstanceName("qwen-e0"), Revision("r"), SETTINGS)[0]
    agent = next(one for one in alone["spec"]["initContainers"] if one["name"] == "sidecar")
    assert agent["resources"] == RESOURCES["nothing"][1], "an agent alone needs what it always needed"


def test_services_have_addresses_of_both_families_where_the_cluster_has_both() -> None:
    found = made()
    assert {found["Service", name]["spec"]["ipFamilyPolicy"] for name in ("qwen", "qwen-members")} == {"PreferDualStack"}


@pytest.mark.parametrize("spec", [{}, APART], ids=["beside", "apart"])
def test_selectors_find_the_pods_that_they_mean(spec: dict[str, Any]) -> None:
    one = make(**spec)
    found = made(**spec)
    prefill, decode = (
        engine_pods(one, role, InstanceName("qwen-e0"), Revision("r"), SETTINGS)[0]["metadata"]["labels"] for role in Role
    )
    routes = {"xpyd.dev/router": "true", "xpyd.dev/roster": "true"}
    for name in ("qwen", "qwen-members"):
        selector = found["Service", name]["spec"]["selector"]
        assert chosen(selector, decode | routes)
        assert not chosen(selector, decode)
    budgets = {name: one["spec"]["selector"]["matchLabels"] for (kind, name), one in found.items()
               if kind == "PodDisruptionBudget"}
    pods = [("qwen-prefill", prefill), ("qwen-decode", decode | routes)]
    if spec:
        template = found["Deployment", "qwen-router"]["spec"]["template"]["metadata"]["labels"]
        assert chosen(found["Service", "qwen"]["spec"]["selector"], template)
        assert chosen(found["Service", "qwen-members"]["spec"]["selector"], template)
        pods.append(("qwen-router", template))
    for name, labels in pods:  # a pod under two budgets could not be evicted
        assert [other for other, selector in budgets.items() if chosen(selector, labels)] == [name]


def test_one_pod_may_be_evicted_at_a_time() -> None:
    found = made({Role.PREFILL: 0, Role.DECODE: 3}, **APART)
    least = {name: one["spec"]["minAvailable"] for (kind, name), one in found.items() if kind == "PodDisruptionBudget"}
    assert least == {"qwen-prefill": 0, "qwen-decode": 2, "qwen-router": 3}
    assert found["PodDisruptionBudget", "qwen-decode"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize(
    ("rollout", "least"),
    [
        ({}, (95, 143)),
        ({"maxUnavailable": 4}, (92, 140)),
        ({"maxUnavailable": "10%"}, (87, 130)),
        ({"maxSurge": "10%", "maxUnavailable": "1%"}, (95, 143)),
        ({"maxSurge": 0, "maxUnavailable": "100%"}, (0, 0)),
        ({"maxUnavailable": 120}, (0, 24)),
    ],
    ids=str,
)
def test_so_many_may_be_evicted_as_a_rollout_lets_be_missing(rollout: dict[str, Any], least: tuple[int, int]) -> None:
    """One at least: a budget of none would hold up drains of nodes for ever. Routers keep theirs."""
    found = made({Role.PREFILL: 96, Role.DECODE: 144}, **APART, rollout=rollout)
    budgets = {name: one["spec"]["minAvailable"] for (kind, name), one in found.items() if kind == "PodDisruptionBudget"}
    assert budgets == {"qwen-prefill": least[0], "qwen-decode": least[1], "qwen-router": 3}


def test_who_may_reach_the_pods() -> None:
    found = made()
    pods, clients = found["NetworkPolicy", "qwen"]["spec"], found["NetworkPolicy", "qwen-clients"]["spec"]
    own = {"podSelector": {"matchLabels": {"xpyd.dev/service": "qwen"}}}
    assert pods["podSelector"] == own["podSelector"]
    assert pods["policyTypes"] == ["Ingress", "Egress"]
    among, operator = pods["ingress"]
    assert among == {"from": [own]}
    assert operator == {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ops"}},
                  "podSelector": {"matchLabels": {"app.kubernetes.io/name": "xpyd-operator"}}}],
        "ports": [{"protocol": "TCP", "port": port} for port in (10001, 10002, 8009)],
    }
    assert pods["egress"] == [
        {"to": [own]},
        {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
        {"ports": [{"protocol": "TCP", "port": 443}]},
    ]
    assert clients["podSelector"]["matchLabels"] == {"xpyd.dev/service": "qwen", "xpyd.dev/router": "true"}
    assert clients["policyTypes"] == ["Ingress"]
    assert clients["ingress"] == [{"ports": [{"protocol": "TCP", "port": 10001}]}]


def test_the_users_clients_and_egress() -> None:
    client, out = {"podSelector": {"matchLabels": {"a": "b"}}}, {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    found = made(networkPolicy={"clients": [client], "egress": [out]})
    assert found["NetworkPolicy", "qwen-clients"]["spec"]["ingress"][0]["from"] == [client]
    assert found["NetworkPolicy", "qwen"]["spec"]["egress"][-1] == out


@pytest.mark.parametrize("spec", [{}, APART, {"networkPolicy": {"enabled": False}}], ids=str)
def test_what_other_settings_make_is_unwanted(spec: dict[str, Any]) -> None:
    everything = made(**APART, decode={"parallelism": {"tensor": 2, "pods": 2}}).keys()
    wanted = made(**spec).keys()
    assert set(unwanted_objects(make(**spec))) == everything - wanted


def test_https_for_clients() -> None:
    found = made(router={**APART["router"], "tls": {"secret": "cert"}})
    (port,) = found["Service", "qwen"]["spec"]["ports"]
    assert port["appProtocol"] == "https"
    pod = found["Deployment", "qwen-router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (volume,) = [each["secret"] for each in pod["volumes"] if each["name"] == "tls"]
    assert (volume["secretName"], [item["key"] for item in volume["items"]]) == ("cert", ["tls.crt", "tls.key"])
    config = msgspec.json.decode(container["command"][4].replace("$(XPYD_INSTANCE)", "r-1"), type=SidecarConfig)
    assert config.router is not None
    assert (config.router.tls_cert_file, config.router.tls_key_file) == ("/etc/xpyd/tls/tls.crt", "/etc/xpyd/tls/tls.key")
    assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")} == {"HTTPS"}


def test_without_a_count_of_routers_the_deployment_has_none_and_the_budget_counts_what_there_is() -> None:
    found = made(router={"placement": "deployment"})
    assert "replicas" not in found["Deployment", "qwen-router"]["spec"]
    assert found["PodDisruptionBudget", "qwen-router"]["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in found["PodDisruptionBudget", "qwen-router"]["spec"]
    shown = manifests(make(router={"placement": "deployment"}), SETTINGS)
    assert [one["spec"]["replicas"] for one in shown if one["kind"] == "Deployment"] == [2], "as it is made at first"
    assert made(**APART)["PodDisruptionBudget", "qwen-router"]["spec"]["minAvailable"] == 3


def test_the_deployment_of_routers() -> None:
    found = made(router={**APART["router"], "apiKeySecret": {"name": "s", "key": "k"}}, drain={"timeout": "1m"})
    spec = found["Deployment", "qwen-router"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 4
    assert chosen(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert list(violations(pod)) == []
    assert pod["terminationGracePeriodSeconds"] == 90
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    config = msgspec.json.decode(container["command"][4].replace("$(XPYD_INSTANCE)", "r-1"), type=SidecarConfig)
    assert list(faults(config)) == []
    assert (config.instance, config.agent) == ("r-1", None)
    assert config.router is not None
    assert not config.router.beside_engine
    assert config.router.api_key_file == "/etc/xpyd/clients/keys"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_key_and_the_pools() -> None:
    secret = key_secret(make(), "ab" * 32)
    assert (secret["metadata"]["name"], secret["immutable"], secret["stringData"]) == ("qwen-key", True, {"key": "ab" * 32})
    one = decode_pool(json.loads(msgspec.json.encode(pool(make(), Role.PREFILL, 2)))).pool
    assert (one.metadata.name, one.spec.service, one.spec.role, one.spec.replicas) == ("qwen-prefill", "qwen", "prefill", 2)


def test_what_is_no_longer_rendered_shows_as_a_difference() -> None:
    """Else a field that others might have added would stay for ever."""
    secret = {"name": "s", "key": "k"}
    before = made(router={**APART["router"], "apiKeySecret": secret})
    after = made(**APART)
    key = ("Deployment", "qwen-router")
    assert differs(after[key], before[key]) != ""
    bare = [json.loads(json.dumps(one[key]["spec"]["template"]["spec"])) for one in (after, before)]
    bare[1]["containers"][0]["command"] = bare[0]["containers"][0]["command"]
    assert differs(*bare) == ""  # the rest of it only the mark shows
    for one in made(**APART).values():
        assert differs(one, one) == ""
