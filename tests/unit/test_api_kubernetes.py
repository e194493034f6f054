"""Fields of templates that Kubernetes does not have, and values that are not of their kind."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from xpyd_operator.api import kubernetes, tables
from xpyd_operator.api.rule import Target
from xpyd_operator.render.judge import judge

SCRIPT = Path(__file__).parents[2] / "scripts/kubernetes_fields.py"


def found(spec: dict[str, Any]) -> list[str]:
    return [f"{path}: {words}" for path, words in kubernetes.faults("PodTemplateSpec", {"spec": spec}, "t")]


def main(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "main", **fields}]}


RIGHT: list[dict[str, Any]] = [
    {},
    {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 30}]},
    main(resources={"limits": {"memory": "9Gi", "nvidia.com/gpu": 8, "cpu": 0.5}}, env=[{"name": "A", "value": "1"}]),
    main(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}], volumeMounts=None),
    {"volumes": [{"name": "w", "image": {"reference": "quay.io/a:1", "pullPolicy": "IfNotPresent"}},
                 {"name": "d", "emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}},
                 {"name": "c", "csi": {"driver": "x", "volumeAttributes": {"a": "b"}}}]},
    main(livenessProbe={"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 5}),
    main(readinessProbe={"tcpSocket": {"port": 80}}),
    {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}], "priorityClassName": "high",
     "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
         {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}]}}}},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"nodeselector": {}}, "t.spec.nodeselector: is no field of PodSpec; write nodeSelector"),
    ({"toleration": []}, "t.spec.toleration: is no field of PodSpec; write tolerations"),
    ({"priorityClass": "high"}, "t.spec.priorityClass: is no field of PodSpec; write priorityClassName"),
    ({"node_selector": {}}, "t.spec.node_selector: is no field of PodSpec; write nodeSelector"),
    (main(volumeMount=[]), "t.spec.containers[0].volumeMount: is no field of Container; write volumeMounts"),
    (main(resource={}), "t.spec.containers[0].resource: is no field of Container; write resources"),
    (main(resources={"limit": {}}),
     "t.spec.containers[0].resources.limit: is no field of ResourceRequirements; write limits"),
    (main(env=[{"name": "A", "value": 1}]),
     't.spec.containers[0].env[0].value: must be text, not the number 1; put it in quotes: "1"'),
    (main(env=[{"name": "A", "value": True}]),
     't.spec.containers[0].env[0].value: must be text, not true; put it in quotes: "true"'),
    ({"nodeSelector": {"gpu": True}}, 't.spec.nodeSelector["gpu"]: must be text, not true; put it in quotes: "true"'),
    ({"tolerations": {"key": "x"}}, "t.spec.tolerations: must be a list"),
    ({"hostUsers": "no"}, "t.spec.hostUsers: must be true or false, not the text 'no'; write it without quotes"),
    ({"priority": "1"}, "t.spec.priority: must be a whole number, not the text '1'; write it without quotes"),
    ({"securityContext": []}, "t.spec.securityContext: must be an object with appArmorProfile, fsGroup, "),
    ({"volumes": [{"name": "a", "zzz": {}}]}, "t.spec.volumes[0].zzz: is no field of Volume; there are "),
]


@pytest.mark.parametrize("spec", RIGHT, ids=str)
def test_what_kubernetes_has_is_taken(spec: dict[str, Any]) -> None:
    assert found(spec) == []


@pytest.mark.parametrize(("spec", "words"), WRONG, ids=str)
def test_what_it_has_not_is_named_with_what_to_write(spec: dict[str, Any], words: str) -> None:
    (said,) = found(spec)
    assert said.startswith(words)


def test_the_table_is_that_of_the_models_that_are_installed() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["TARGET"].read_text() == script["text"](), "run `python scripts/kubernetes_fields.py`"
    parts = tables.kubernetes().parts
    kinds = {kind.strip("[]{}") for fields in parts.values() for kind in fields.values()}
    assert kinds - parts.keys() == {"text", "int", "number", "bool", "quantity", "any"} & kinds


def document(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": "typo"},
            "spec": {"model": {"source": "Qwen/Qwen3-8B"}, "prefill": {"template": template},
                     "engine": {"env": [{"name": "A", "valueFrom": {"secretKeyref": {}}}]}}}


def test_check_refuses_it_and_an_operator_that_may_be_older_asks_the_api_server() -> None:
    """As with fields of xpyd's own: a newer Kubernetes may have a field that the table has not."""
    paths = ["spec.prefill.template.spec.nodeselector", "spec.engine.env[0].valueFrom.secretKeyref"]
    written = document({"spec": {"nodeselector": {}}})
    strict, lenient = (judge(written, Target.KUBERNETES, strict=strict) for strict in (True, False))
    assert sorted(fault.path for fault in strict.refusals) == sorted(paths)
    assert sorted(fault.path for fault in lenient.ignored) == sorted(paths)
    assert lenient.refusals == ()


def test_one_mistake_is_said_once() -> None:
    for spec in ({"containers": {}}, {"hostNetwork": "yes"}, {"volumes": [1]}):
        said = judge(document({"spec": spec}), Target.KUBERNETES).refusals
        paths = [fault.path for fault in said if "template" in fault.path]
        assert len(paths) == 1
