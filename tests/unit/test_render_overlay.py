"""The user's template laid over a pod."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from xpyd_operator.api.templates import merge
from xpyd_operator.errors import UnsupportedField
from xpyd_operator.render.overlay import ROUTER_POD, faults, forms, overlay

POD: dict[str, Any] = {
    "metadata": {"name": "q-e0", "labels": {"xpyd.dev/service": "q"}, "annotations": {"a": "1"}},
    "spec": {
        "securityContext": {"runAsUser": 65532, "runAsNonRoot": True},
        "topologySpreadConstraints": [{"maxSkew": 1}],
        "initContainers": [{"name": "xpyd-install", "image": "x"}, {"name": "sidecar", "image": "x", "resources": {}}],
        "containers": [
            {
                "name": "main",
                "image": "vllm",
                "command": ["python3"],
                "env": [{"name": "HOME", "value": "/home/xpyd"}, {"name": "PYTHONPATH", "value": "/xpyd"}],
                "volumeMounts": [{"name": "xpyd", "mountPath": "/xpyd"}, {"name": "cache", "mountPath": "/cache"}],
                "ports": [{"name": "engine", "containerPort": 8000}],
                "livenessProbe": {"periodSeconds": 10, "timeoutSeconds": 5},
            }
        ],
        "volumes": [{"name": "xpyd", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}},
                    {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}],
    },
}


def laid(**spec: Any) -> dict[str, Any]:
    before = copy.deepcopy(POD)
    result = overlay(POD, {"spec": spec})["spec"]
    assert before == POD
    return dict(result)


def main(**parts: Any) -> dict[str, Any]:
    return dict(laid(containers=[{"name": "main", **parts}])["containers"][0])


def test_an_empty_template_changes_nothing() -> None:
    assert overlay(POD, {}) == POD
    assert overlay(POD, {"metadata": None, "spec": {"containers": [{"name": "main"}], "volumes": []}}) == POD


def test_maps_are_merged_null_deletes_and_other_lists_are_replaced() -> None:
    spec = laid(securityContext={"runAsUser": 1000, "runAsNonRoot": None}, topologySpreadConstraints=[{"maxSkew": 5}],
                tolerations=[{"operator": "Exists"}], nodeSelector={"disk": "fast"})
    assert spec["securityContext"] == {"runAsUser": 1000}
    assert spec["topologySpreadConstraints"] == [{"maxSkew": 5}]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["nodeSelector"] == {"disk": "fast"}


def test_labels_and_annotations_are_added() -> None:
    template = {"metadata": {"labels": {"team": "a"}, "annotations": {"a": None, "b": "2"}}}
    metadata = overlay(POD, template)["metadata"]
    assert metadata == {"name": "q-e0", "labels": {"xpyd.dev/service": "q", "team": "a"}, "annotations": {"b": "2"}}


def test_containers_are_merged_by_name_and_new_ones_come_last() -> None:
    spec = laid(containers=[{"name": "logs", "image": "l"}, {"name": "main", "tty": True}],
                initContainers=[{"name": "fetch", "image": "f"}, {"name": "sidecar", "resources": {"limits": {"cpu": 1}}}])
    assert [one["name"] for one in spec["containers"]] == ["main", "logs"]
    assert spec["containers"][0]["tty"] is True
    assert spec["containers"][0]["command"] == ["python3"]
    assert [one["name"] for one in spec["initContainers"]] == ["xpyd-install", "sidecar", "fetch"]
    assert spec["initContainers"][1] == {"name": "sidecar", "image": "x", "resources": {"limits": {"cpu": 1}}}


def test_environment_by_name_another_source_replaces() -> None:
    reference = {"configMapKeyRef": {"name": "c", "key": "k"}}
    env = main(env=[{"name": "HOME", "valueFrom": reference}, {"name": "A", "value": "$(XPYD_HOST)"}])["env"]
    assert env == [{"name": "HOME", "valueFrom": reference}, {"name": "PYTHONPATH", "value": "/xpyd"},
                   {"name": "A", "value": "$(XPYD_HOST)"}]


def test_volumes_are_merged_unless_their_source_is_another() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "c"}}
    volumes = laid(volumes=[{"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}, {"name": "cache", **claim},
                            {"name": "data", **claim}])["volumes"]
    assert volumes == [
        {"name": "xpyd", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "cache", **claim},
        {"name": "data", **claim},
    ]


def test_mounts_by_path_and_probes_by_field() -> None:
    made = main(volumeMounts=[{"name": "data", "mountPath": "/cache"}, {"name": "data", "mountPath": "/data"}],
                livenessProbe={"periodSeconds": 30}, ports=[{"name": "debug", "containerPort": 5678}])
    assert [(one["name"], one["mountPath"]) for one in made["volumeMounts"]] == [
        ("xpyd", "/xpyd"), ("data", "/cache"), ("data", "/data")]
    assert made["livenessProbe"] == {"periodSeconds": 30, "timeoutSeconds": 5}
    assert [one["containerPort"] for one in made["ports"]] == [8000, 5678]


def test_another_way_of_asking_replaces_the_one_there() -> None:
    base = {"livenessProbe": {"exec": {"command": ["a"]}, "periodSeconds": 10}, "other": {"exec": {"command": ["a"]}}}
    given = {"livenessProbe": {"httpGet": {"port": 1}}, "other": {"httpGet": {"port": 1}}}
    made = merge(base, given, {})
    assert made["livenessProbe"] == {"httpGet": {"port": 1}, "periodSeconds": 10}
    assert made["other"] == {"exec": {"command": ["a"]}, "httpGet": {"port": 1}}, "it is no probe"
    same = merge(base, {"livenessProbe": {"exec": {"command": ["b"]}}}, {})
    assert same["livenessProbe"] == {"exec": {"command": ["b"]}, "periodSeconds": 10}


MAIN = "t.spec.containers[0]"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "Pod"}, "t.kind"),
    ({"metadata": "x"}, "t.metadata"),
    ({"metadata": {"name": "x"}}, "t.metadata.name"),
    ({"metadata": {"ownerReferences": []}}, "t.metadata.ownerReferences"),
    ({"metadata": {"labels": None}}, "t.metadata.labels"),
    ({"metadata": {"labels": {"xpyd.dev/role": "x"}}}, 't.metadata.labels["xpyd.dev/role"]'),
    ({"metadata": {"labels": {"app.kubernetes.io/name": None}}}, 't.metadata.labels["app.kubernetes.io/name"]'),
    ({"spec": []}, "t.spec"),
    ({"spec": {"hostNetwork": True}}, "t.spec.hostNetwork"),
    ({"spec": {"restartPolicy": "Never"}}, "t.spec.restartPolicy"),
    ({"spec": {"enableServiceLinks": True}}, "t.spec.enableServiceLinks"),
    ({"spec": {"terminationGracePeriodSeconds": 1}}, "t.spec.terminationGracePeriodSeconds"),
    ({"spec": {"containers": None}}, "t.spec.containers"),
    ({"spec": {"volumes": None}}, "t.spec.volumes"),
    ({"spec": {"initContainers": {}}}, "t.spec.initContainers"),
    ({"spec": {"containers": ["main"]}}, "t.spec.containers[0]"),
    ({"spec": {"containers": [{"image": "x"}]}}, "t.spec.containers[0]"),
    ({"spec": {"containers": [{"name": "sidecar"}]}}, "t.spec.containers[0].name"),
    ({"spec": {"initContainers": [{"name": "main"}]}}, "t.spec.initContainers[0].name"),
    ({"spec": {"initContainers": [{"name": "sidecar", "command": ["x"]}]}}, "t.spec.initContainers[0].command"),
    ({"spec": {"initContainers": [{"name": "xpyd-install", "image": "x"}]}}, "t.spec.initContainers[0].image"),
    ({"spec": {"volumes": [{"name": "key", "emptyDir": {}}]}}, "t.spec.volumes[0].name"),
    ({"spec": {"containers": [{"name": "main", "command": None}]}}, f"{MAIN}.command"),
    ({"spec": {"containers": [{"name": "main", "args": []}]}}, f"{MAIN}.args"),
    ({"spec": {"containers": [{"name": "main", "image": "x"}]}}, f"{MAIN}.image"),
    ({"spec": {"containers": [{"name": "main", "lifecycle": None}]}}, f"{MAIN}.lifecycle"),
    ({"spec": {"containers": [{"name": "main", "env": None}]}}, f"{MAIN}.env"),
    ({"spec": {"containers": [{"name": "main", "env": [{"name": "XPYD_HOST"}]}]}}, f"{MAIN}.env[0].name"),
    ({"spec": {"containers": [{"name": "main", "env": [{"name": "VLLM_API_KEY"}]}]}}, f"{MAIN}.env[0].name"),
    ({"spec": {"containers": [{"name": "main", "env": [{"name": "A"}, {"name": "PYTHONPATH"}]}]}}, f"{MAIN}.env[1].name"),
    ({"spec": {"containers": [{"name": "main", "volumeMounts": [{"mountPath": "/xpyd/"}]}]}},
     f"{MAIN}.volumeMounts[0].mountPath"),
    ({"spec": {"containers": [{"name": "main", "volumeMounts": [{"mountPath": "/run/xpyd/deep"}]}]}},
     f"{MAIN}.volumeMounts[0].mountPath"),
    ({"spec": {"containers": [{"name": "main", "volumeMounts": [{"name": "x"}]}]}}, f"{MAIN}.volumeMounts[0]"),
    ({"spec": {"containers": [{"name": "main", "ports": [{"name": "x", "containerPort": 8000}]}]}}, f"{MAIN}.ports[0]"),
    ({"spec": {"containers": [{"name": "main", "$patch": "delete"}]}}, f"{MAIN}.$patch"),
    ({"spec": {"containers": [{"name": "main", "securityContext": {"runAsUser": 1}}]}},
     f"{MAIN}.securityContext.runAsUser"),
    ({"spec": {"initContainers": [{"name": "sidecar", "securityContext": {"runAsGroup": 1}}]}},
     "t.spec.initContainers[0].securityContext.runAsGroup"),
    ({"spec": {"securityContext": {"$retainKeys": []}}}, "t.spec.securityContext.$retainKeys"),
]


@pytest.mark.parametrize(("template", "path"), REFUSED, ids=[path for _, path in REFUSED])
def test_what_is_needed_is_not_taken_away(template: dict[str, Any], path: str) -> None:
    found = list(faults(template, "t"))
    assert [where for where, _ in found] == [path]
    formless = list(forms(template, "t"))
    if formless:
        with pytest.raises(UnsupportedField) as caught:
            overlay(POD, template, "t")
        assert (caught.value.path, formless) == (path, found)
        assert str(caught.value) == f"{path}: {found[0][1]}"
    else:  # it was judged before: what was accepted once goes on as it is
        assert overlay(POD, template, "t").keys() == POD.keys()


def test_some_of_it_is_no_template_at_all() -> None:
    assert sum(bool(list(forms(template, "t"))) for template, _ in REFUSED) >= 5


def test_labels_and_selectors_may_be_called_like_lists() -> None:
    made = overlay(POD, {"metadata": {"labels": {"env": "prod"}}, "spec": {"nodeSelector": {"env": "prod", "ports": "x"}}})
    assert made["metadata"]["labels"]["env"] == "prod"
    assert made["spec"]["nodeSelector"] == {"env": "prod", "ports": "x"}


def test_mounts_beside_what_is_needed_are_allowed() -> None:
    assert len(main(volumeMounts=[{"name": "d", "mountPath": "/xpyd2"}])["volumeMounts"]) == 3


ROUTER = "t.spec.containers[0]"
REFUSED_OF_ROUTERS: list[tuple[dict[str, Any], str, str]] = [
    ({"metadata": {"labels": {"xpyd.dev/router": "x"}}}, 't.metadata.labels["xpyd.dev/router"]', "set by xpyd"),
    ({"spec": {"hostNetwork": True}}, "t.spec.hostNetwork", "two routers on one node"),
    ({"spec": {"terminationGracePeriodSeconds": 1}}, "t.spec.terminationGracePeriodSeconds", "spec.drain.timeout"),
    ({"spec": {"containers": [{"name": "router", "image": "x"}]}}, f"{ROUTER}.image", "XPYD_SIDECAR_IMAGE"),
    ({"spec": {"containers": [{"name": "router", "command": []}]}}, f"{ROUTER}.command", "fields of spec.router"),
    ({"spec": {"containers": [{"name": "router", "env": [{"name": "XPYD_INSTANCE"}]}]}},
     f"{ROUTER}.env[0].name", "XPYD_INSTANCE"),
    ({"spec": {"containers": [{"name": "router", "ports": [{"name": "http"}]}]}},
     f"{ROUTER}.ports[0]", "http is the router's own"),
    ({"spec": {"containers": [{"name": "router", "volumeMounts": [{"mountPath": "/etc/xpyd/tls/"}]}]}},
     f"{ROUTER}.volumeMounts[0].mountPath", "/etc/xpyd/tls is used by xpyd"),
    ({"spec": {"volumes": [{"name": "tls", "emptyDir": {}}]}}, "t.spec.volumes[0].name", "a volume of xpyd"),
    ({"spec": {"initContainers": [{"name": "router"}]}}, "t.spec.initContainers[0].name", "router is among containers"),
]


@pytest.mark.parametrize(("template", "path", "words"), REFUSED_OF_ROUTERS, ids=[path for _, path, _ in REFUSED_OF_ROUTERS])
def test_what_a_router_needs_is_not_taken_away(template: dict[str, Any], path: str, words: str) -> None:
    ((where, reason),) = faults(template, "t", ROUTER_POD)
    assert (where, words in reason) == (path, True), reason


def test_a_routers_container_is_free_in_all_else() -> None:
    """Also in what only engines and agents share: there is one container, and no PACKAGE."""
    template = {"spec": {"containers": [
        {"name": "router", "securityContext": {"runAsUser": 1}, "volumeMounts": [{"name": "x", "mountPath": "/xpyd"}],
         "ports": [{"name": "engine", "containerPort": 8000}]},
        {"name": "main", "image": "m"}]}}
    assert list(faults(template, "t", ROUTER_POD)) == []
