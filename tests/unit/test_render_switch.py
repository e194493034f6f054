"""What keeps instances of one role from being those of the other, by its field."""

from __future__ import annotations

from typing import Any

import pytest
from kube_documents import service

from xpyd_operator.plan.desired import Revision
from xpyd_operator.render import labels, switch
from xpyd_operator.render.pod import engine_pods, pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.switch import NEVER, local_difference, pods_difference, same_places
from xpyd_sidecar.contract.ids import InstanceName, Role

SETTINGS = KubeSettings(sidecar_image="sidecar:1")


def roles(**decode: Any) -> dict[str, Any]:
    return {"prefill": {"replicas": 1, "resources": {}}, "decode": {"replicas": 2, "resources": {}, **decode}}


@pytest.mark.parametrize("more", [
    {}, roles(), {"router": {"placement": "deployment"}}, {"router": {"apiKeySecret": {"name": "a", "key": "k"}}},
    {"prefill": {"scaling": {"min": 0, "max": 3}, "resources": {}}},
])
def test_roles_that_say_the_same_can_switch(more: dict[str, Any]) -> None:
    made = service(**more)
    assert (pods_difference(made, SETTINGS), local_difference(made)) == ("", "")
    assert pod_revision(made, Role.PREFILL, "key") == pod_revision(made, Role.DECODE, "key")


@pytest.mark.parametrize(("decode", "field"), [
    ({"args": ["--max-num-seqs", "8"]}, "args"),
    ({"resources": {"limits": {"memory": "9Gi"}}}, "resources"),
    ({"template": {"spec": {"nodeSelector": {"pool": "d"}}}}, "template"),
])
def test_the_field_that_differs_is_named(decode: dict[str, Any], field: str) -> None:
    made = service(**roles(**decode))
    assert pods_difference(made, SETTINGS).startswith(f"spec.prefill and spec.decode differ in {field}")
    assert bool(local_difference(made)) == (field != "template"), "local processes use no template"
    assert pod_revision(made, Role.PREFILL, "key") != pod_revision(made, Role.DECODE, "key")


def test_no_window_no_switch() -> None:
    made = service(rollout={"switchWindow": "0s"})
    assert pods_difference(made, SETTINGS) == local_difference(made) == NEVER


def test_the_pods_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rendered otherwise for a role, though the document says the same of both."""
    def other(service: Any, role: Role, *rest: Any) -> tuple[dict[str, Any], ...]:
        pod = engine_pods(service, role, *rest)[0]
        pod["spec"]["containers"][0]["args"] += ["--of", role.value]
        return (pod,)

    monkeypatch.setattr(switch, "engine_pods", other)
    found = pods_difference(service(), SETTINGS)
    assert found.startswith("the pods of prefill and decode differ in spec.containers[main].args")


def test_a_pod_shows_its_agent_what_it_is_told() -> None:
    pod = engine_pods(service(), Role.DECODE, InstanceName("qwen-e0"), Revision("r"), SETTINGS)[0]
    [volume] = [one for one in pod["spec"]["volumes"] if one["name"] == "assignment"]
    item = {"path": "role", "fieldRef": {"fieldPath": f"metadata.annotations['{labels.ASSIGNMENT}']"}}
    assert volume["downwardAPI"] == {"items": [item]}
    sidecar = next(one for one in pod["spec"]["initContainers"] if one["name"] == labels.SIDECAR)
    assert {"name": "assignment", "mountPath": "/etc/xpyd/assignment", "readOnly": True} in sidecar["volumeMounts"]
    assert '"assignment_file":"/etc/xpyd/assignment/role"' in sidecar["command"][-1]

@pytest.mark.parametrize(("decode", "same"), [
    ({}, True),
    ({"args": ["--max-num-seqs", "8"]}, True),
    ({"template": {"metadata": {"labels": {"team": "a"}}}}, True),
    ({"resources": {"limits": {"memory": "9Gi"}}}, False),
    ({"parallelism": {"tensor": 2}}, True),  # on processors, as resources {} says
    ({"parallelism": {"tensor": 2, "device": "nvidia.com/gpu"}}, False),
    ({"template": {"spec": {"nodeSelector": {"pool": "d"}}}}, False),
    ({"template": {"spec": {"tolerations": [{"key": "d", "operator": "Exists"}]}}}, False),
])
def test_whether_a_node_for_one_role_is_one_for_the_other(decode: dict[str, Any], same: bool) -> None:
    assert same_places(service(**roles(**decode)), SETTINGS) is same
