"""What is made of ``model.prefetch``: images by DaemonSets where instances may run, weights by a Job elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kube_documents import service
from pod_security import violations

from xpyd_operator.api import notes
from xpyd_operator.render import labels
from xpyd_operator.render.objects import manifests
from xpyd_operator.render.pod import pod_revision
from xpyd_operator.render.prefetch import prefetch_objects
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import NAME_MAX, Role

SETTINGS = KubeSettings(sidecar_image="sidecar:1")
MODEL = {"source": "org/model", "revision": "v1", "cache": {"claim": "hub"}, "prefetch": True}
GPUS = {"metadata": {}, "spec": {"nodeSelector": {"pool": "gpus"}, "tolerations": [{"key": "pool", "operator": "Exists"}]}}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}
FAST = {"spec": {"nodeSelector": {"pool": "fast"}}}


def made(model: dict[str, Any] | None = None, **spec: Any) -> dict[tuple[str, str], dict[str, Any]]:
    asked = service(model=MODEL | (model or {}), **spec)
    found = prefetch_objects(asked, SETTINGS)
    return {(each["kind"], each["metadata"]["name"].rpartition("-")[0]): each for each in found}


def pod(found: dict[str, Any]) -> dict[str, Any]:
    spec = found["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


@pytest.mark.parametrize("spec", [{"model": {"source": "org/model"}}, {"model": MODEL, "suspend": True}])
def test_who_does_not_ask_or_is_suspended_has_nothing_fetched(spec: dict[str, Any]) -> None:
    assert prefetch_objects(service(**spec), SETTINGS) == ()
    assert {each["kind"] for each in manifests(service(**spec), SETTINGS)}.isdisjoint({"DaemonSet", "Job"})


def test_images_are_on_the_nodes_of_each_role_and_cost_them_next_to_nothing() -> None:
    found = made(prefill={"template": GPUS}, decode={"template": FAST})
    assert set(found) == {("DaemonSet", "qwen-decode"), ("DaemonSet", "qwen-prefill"), ("Job", "qwen-weights")}
    prefill, decode = pod(found["DaemonSet", "qwen-prefill"]), pod(found["DaemonSet", "qwen-decode"])
    assert prefill["nodeSelector"] == {"pool": "gpus"}
    assert [each["key"] for each in prefill["tolerations"]] == ["pool", "nvidia.com/gpu"]
    assert decode["nodeSelector"] == {"pool": "fast"}
    for each in (prefill, decode):
        images = {one["image"] for one in (*each["initContainers"], *each["containers"])}
        assert images == {"sidecar:1", "vllm/vllm-openai:v0.32.0"}
        assert not any("nvidia.com/gpu" in one["resources"].get("limits", {}) for one in each["containers"])
        assert list(violations(each)) == []


def test_pods_that_keep_apart_from_each_other_are_not_kept_off_these_nodes() -> None:
    """A required term of a pod that runs is held against every pod that comes."""
    apart = [{"labelSelector": {"matchLabels": {"xpyd.dev/role": "decode"}}, "topologyKey": "kubernetes.io/hostname"}]
    nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": []}]}}
    among = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}
    router = {"placement": "deployment", "template": {"spec": {"affinity": among}}}
    found = made(decode={"template": {"spec": {"affinity": {**among, "nodeAffinity": nodes}}}}, router=router)
    assert pod(found["DaemonSet", "qwen-decode"])["affinity"] == {"nodeAffinity": nodes}
    assert "podAntiAffinity" not in pod(found["Job", "qwen-weights"]).get("affinity", {})


def test_no_image_that_is_made_for_it_takes_the_devices_of_a_node() -> None:
    for each in made(template=GPUS).values():
        env = {one["name"]: one["value"] for one in pod(each)["containers"][0]["env"]}
        assert env["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_roles_on_the_same_nodes_have_one_daemon_set() -> None:
    assert set(made(template=GPUS)) == {("DaemonSet", "qwen-decode"), ("Job", "qwen-weights")}
    alone = made(prefill={"replicas": 0, "template": FAST}, decode={"template": GPUS})
    assert {kind for kind in alone if kind[0] == "DaemonSet"} == {("DaemonSet", "qwen-decode")}


def test_without_devices_none_is_tolerated() -> None:
    none = {"parallelism": {"device": "none"}}
    assert "tolerations" not in pod(made(prefill=none, decode=none)["DaemonSet", "qwen-decode"])


def test_an_image_with_the_model_is_mounted_so_that_it_is_pulled_and_kept() -> None:
    found = made({"source": "oci://registry.example/team/qwen:v1/weights", "revision": None, "cache": {}})
    assert set(found) == {("DaemonSet", "qwen-decode")}
    each = pod(found["DaemonSet", "qwen-decode"])
    assert {"name": "model", "image": {"reference": "registry.example/team/qwen:v1"}} in each["volumes"]
    assert each["containers"][0]["volumeMounts"] == [{"name": "model", "mountPath": "/models/claim", "readOnly": True}]


def test_the_operator_takes_none_of_these_pods_for_its_own() -> None:
    for each in made(template=GPUS).values():
        assert labels.SERVICE not in each["spec"]["template"]["metadata"]["labels"]
        assert each["metadata"]["labels"][labels.SERVICE] == "qwen", "but the objects are the service's"
        assert each["metadata"]["ownerReferences"][0]["name"] == "qwen"


def test_weights_are_fetched_where_routers_run_with_what_an_engine_has_of_the_hub() -> None:
    token, router = {"name": "hub", "key": "token"}, {"placement": "deployment", "template": FAST}
    found = made({"tokenSecret": token}, decode={"template": GPUS}, router=router,
                 engine={"env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128/$(X)"}], "startupTimeout": "2h"})
    job = found["Job", "qwen-weights"]
    assert (job["spec"]["activeDeadlineSeconds"], pod(job)["restartPolicy"]) == (7200, "Never")
    assert pod(job)["nodeSelector"] == {"pool": "fast"}, "no node with devices is started for it"
    main, = pod(job)["containers"]
    assert (main["command"][-1], main["args"]) == ("xpyd_sidecar.engine.model_download", ["org/model", "v1"])
    env = {each["name"]: each for each in main["env"]}
    assert env["HF_HOME"]["value"] == "/cache"
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": token}
    assert env["HTTPS_PROXY"]["value"] == "http://proxy:3128/$$(X)", "as written"
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "hub"}} in pod(job)["volumes"]
    assert list(violations(pod(job))) == []


def test_all_else_of_the_fetch_is_as_decode_has_it() -> None:
    main = {"name": "main", "env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}],
            "volumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/certs"}, {"name": "shm", "mountPath": "/dev/shm"}]}
    theirs = {"imagePullSecrets": [{"name": "registry"}], "securityContext": {"fsGroup": 7}, "containers": [main],
              "volumes": [{"name": "ca", "configMap": {"name": "ca"}}]}
    router = {"placement": "deployment", "template": {"spec": {"imagePullSecrets": [{"name": "other"}]}}}
    job = pod(made(decode={"template": {"spec": theirs}}, router=router)["Job", "qwen-weights"])
    assert job["imagePullSecrets"] == [{"name": "registry"}], "it is the engine's image"
    assert job["securityContext"]["fsGroup"] == 7, "engines can write what it has written"
    fetch, = job["containers"]
    assert {"name": "HF_ENDPOINT", "value": "https://mirror"} in fetch["env"]
    mounts = {each["name"] for each in fetch["volumeMounts"]}
    assert mounts <= {each["name"] for each in job["volumes"]}
    assert mounts >= {"ca", "cache", "xpyd"}
    assert "shm" not in mounts, "it has no such volume"


def test_names_fit_into_a_label_of_kubernetes() -> None:
    longest = msgspec.structs.replace(service(model=MODEL), metadata=msgspec.structs.replace(
        service().metadata, name="q" * NAME_MAX))
    assert max(len(each["metadata"]["name"]) for each in prefetch_objects(longest, SETTINGS)) <= 63


def test_another_revision_is_another_job_since_none_can_be_changed() -> None:
    names = {made({"revision": each})["Job", "qwen-weights"]["metadata"]["name"] for each in ("v1", "v2", "v1")}
    assert len(names) == 2


@pytest.mark.parametrize("model", [{"cache": {}}, {"source": "/models/x", "revision": None, "cache": {}}])
def test_without_a_hub_or_a_volume_no_weights_are_fetched(model: dict[str, Any]) -> None:
    assert ("Job", "qwen-weights") not in made(model)


def test_no_engine_is_replaced_for_it() -> None:
    before, after = (service(model=MODEL | {"prefetch": each}) for each in (False, True))
    assert pod_revision(before, Role.DECODE, "k") == pod_revision(after, Role.DECODE, "k")


@pytest.mark.parametrize(("spec", "paths"), [
    ({"template": GPUS}, []),
    ({"prefill": {"template": GPUS}}, ["spec.model.prefetch"]),
    ({"decode": {"template": GPUS}, "prefill": {"replicas": 0}}, []),
    ({"template": {"spec": {"affinity": {"nodeAffinity": REQUIRED}}}}, []),
    ({"template": {"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}}}}},
     ["spec.model.prefetch"]),
    ({"template": {"spec": {"affinity": None, "nodeSelector": None}}}, ["spec.model.prefetch"]),
    ({"template": GPUS, "model": MODEL | {"cache": {}}}, ["spec.model.cache.claim"]),
    ({"model": {"source": "org/model"}}, []),
])
def test_a_check_says_where_more_is_fetched_than_is_meant_or_less(spec: dict[str, Any], paths: list[str]) -> None:
    assert [each.path for each in notes.prefetch(service(**{"model": MODEL} | spec))] == paths
