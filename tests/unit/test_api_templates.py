"""``spec.template`` below the templates of roles and routers: what each pod has of it, and where a fault was written."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.api import templates
from xpyd_operator.api.devices import limits
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render import overlay
from xpyd_operator.render.judge import judge
from xpyd_operator.render.objects import router_pod
from xpyd_operator.render.pod import engine_pods, pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.switch import pods_difference
from xpyd_sidecar.contract.ids import InstanceName, Role

SETTINGS = KubeSettings(sidecar_image="xpyd-sidecar:0")
TAINT = {"key": "gpu", "operator": "Exists"}
COMMON: dict[str, Any] = {
    "metadata": {"annotations": {"team": "a"}},
    "spec": {
        "tolerations": [TAINT],
        "imagePullSecrets": [{"name": "corp"}],
        "serviceAccountName": "models",
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "one"}],
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}, {"name": "cache", "emptyDir": {"sizeLimit": "9Gi"}}],
        "containers": [
            {"name": "main", "env": [{"name": "A", "value": "common"}, {"name": "B", "value": "common"}],
             "volumeMounts": [{"name": "ca", "mountPath": "/ca"}]},
            {"name": "router", "resources": {"limits": {"memory": "2Gi"}}},
            {"name": "logs", "image": "fluentbit"},
        ],
    },
}


def made(**spec: Any) -> DisaggService:
    return service(Target.KUBERNETES, **{"template": COMMON, "router": {"placement": "deployment"}} | spec)


def engine(of: DisaggService, role: Role = Role.DECODE) -> dict[str, Any]:
    return engine_pods(of, role, InstanceName("qwen-e0"), Revision("r"), SETTINGS)[0]


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in pod["spec"]["containers"] if one["name"] == name)
    return found


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container(pod, "main")["env"]}


def names(pod: dict[str, Any], field: str) -> set[str]:
    return {one["name"] for one in pod["spec"].get(field, ())}


def test_every_pod_has_it() -> None:
    document = made()
    for pod in (engine(document), engine(document, Role.PREFILL), router_pod(document, "x", SETTINGS)):
        assert pod["spec"]["tolerations"] == [TAINT]
        assert pod["spec"]["imagePullSecrets"] == [{"name": "corp"}]
        assert pod["spec"]["serviceAccountName"] == "models"
        assert pod["metadata"]["annotations"]["team"] == "a"
        assert "logs" in names(pod, "containers")
        assert "ca" in names(pod, "volumes")


def test_engines_have_nothing_of_routers_and_routers_nothing_of_engines() -> None:
    document = made()
    assert names(engine(document), "containers") == {"main", "logs"}
    assert names(engine(document), "resourceClaims") == {"nic"}
    router = router_pod(document, "x", SETTINGS)
    assert names(router, "containers") == {"router", "logs"}
    assert container(router, "router")["resources"]["limits"]["memory"] == "2Gi"
    assert "resourceClaims" not in router["spec"]
    assert "cache" not in names(router, "volumes")


def test_the_words_for_both_are_those_of_the_pods() -> None:
    assert templates.ENGINES_ALONE["containers"] == {overlay.ENGINE_POD.main}
    assert templates.ENGINES_ALONE["initContainers"] == overlay.ENGINE_POD.own
    assert templates.ROUTERS_ALONE["containers"] == {overlay.ROUTER_POD.main}


def test_a_roles_own_template_is_laid_over_it() -> None:
    own = {"metadata": {"annotations": {"mine": "x"}}, "spec": {
        "tolerations": [], "serviceAccountName": None, "nodeSelector": {"a": "b"},
        "containers": [{"name": "main", "env": [{"name": "B", "value": "own"}, {"name": "C", "value": "own"}]}]}}
    document = made(decode={"template": own})
    pod = engine(document)
    assert {name: variables(pod)[name] for name in "ABC"} == {"A": "common", "B": "own", "C": "own"}
    assert (pod["spec"]["tolerations"], pod["spec"]["nodeSelector"]) == ([], {"a": "b"})
    assert "serviceAccountName" not in pod["spec"]
    assert pod["metadata"]["annotations"] | {"team": "a", "mine": "x"} == pod["metadata"]["annotations"]
    assert engine(document, Role.PREFILL)["spec"]["serviceAccountName"] == "models"


def test_a_field_of_xpyds_own_that_is_taken_away_for_all_is_away() -> None:
    common = {"spec": {"topologySpreadConstraints": None}}
    for own in (None, {"spec": {"nodeSelector": {"a": "b"}}}):
        assert "topologySpreadConstraints" not in engine(made(template=common, decode={"template": own}))["spec"]


def test_what_is_said_once_instead_of_twice_restarts_nothing() -> None:
    common = {"spec": {"tolerations": [TAINT], "containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}}
    twice = service(Target.KUBERNETES, prefill={"template": common}, decode={"template": common})
    once = service(Target.KUBERNETES, template=common)
    for role in Role:
        assert pod_revision(once, role, "k") == pod_revision(twice, role, "k")
        assert engine(once, role) == engine(twice, role)
        assert pod_revision(once, role, "k") != pod_revision(service(Target.KUBERNETES), role, "k")
    assert pods_difference(once, SETTINGS) == ""


def test_devices_that_it_names_are_devices() -> None:
    common = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"amd.com/gpu": 1}}}]}}
    document = service(Target.KUBERNETES, template=common)
    assert limits(document.spec.role(Role.DECODE)) == {"amd.com/gpu": 1}
    assert container(engine(document), "main")["resources"]["limits"] == {"amd.com/gpu": 1}


def refusals(**spec: Any) -> dict[str, str]:
    document = {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": "qwen"},
                "spec": {"model": {"source": "Qwen/Qwen3-8B"}, **spec}}
    return {fault.path: fault.message for fault in judge(document, Target.KUBERNETES).refusals}


def in_main(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "logs", "image": "x"}, {"name": "main", **fields}]}}


@pytest.mark.parametrize(("spec", "path", "words"), [
    ({"template": {"spec": {"hostNetwork": True}}}, "spec.template.spec.hostNetwork", "the ports of two engines"),
    ({"template": {"spec": {"nodeselector": {}}}}, "spec.template.spec.nodeselector", "is no field of PodSpec; write node"),
    ({"template": in_main(image="x")}, "spec.template.spec.containers[1].image", "xpyd starts the container main"),
    ({"template": in_main(resources={"limits": {"nvidia.com/gpu": 4}})},
     'spec.template.spec.containers[1].resources.limits["nvidia.com/gpu"]', "must be 1, not 4"),
    ({"template": {"spec": {"containers": [{"name": "router", "args": ["x"]}]}}},
     "spec.template.spec.containers[0].args", "xpyd starts the router"),
    ({"template": {"spec": {"containers": {"name": "main"}}}}, "spec.template.spec.containers", "must be a list"),
    ({"template": []}, "spec.template", "an object (key: value)"),
    ({"template": in_main(env=[]), "decode": {"template": {"spec": {"containers": [
        {"name": "main", "resources": {"limits": {"nvidia.com/gpu": 4}}}]}}}},
     'spec.decode.template.spec.containers[0].resources.limits["nvidia.com/gpu"]', "must be 1, not 4"),
], ids=str)
def test_a_fault_is_said_where_it_was_written(spec: dict[str, Any], path: str, words: str) -> None:
    found = refusals(**spec)
    assert words in found[path]
    assert len(found) == 1


def test_lists_that_cannot_be_merged_are_refused_and_break_nothing() -> None:
    found = refusals(template={"spec": {"volumes": [{"emptyDir": {}}]}},
                     decode={"template": {"spec": {"volumes": [{"name": "a"}]}}})
    assert found == {"spec.template.spec.volumes[0]": "must be an object with name"}
