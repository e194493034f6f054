"""What Kubernetes pods can not do is refused with its field."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.render.unsupported import kube_refusals

SECRET = {"name": "s", "key": "k"}
GPUS = {"nvidia.com/gpu": 2}


def limit(memory: str) -> dict[str, Any]:
    return {"resources": {"limits": {"memory": memory}}}


CASES: list[tuple[dict[str, Any], str]] = [
    ({"kv": {"memory": "2Gi"}, "decode": limit("1Gi")}, "spec.decode.resources.limits.memory"),
    ({"kv": {"memory": "3Gi"}, "decode": limit("3Gi")}, "spec.decode.resources.limits.memory"),
    ({"kv": {"memory": "2Gi", "mode": "get"}, "decode": limit("3Gi")}, "spec.decode.resources.limits.memory"),
    ({"decode": {"parallelism": {"pipeline": 2}, "args": ["--enforce-eager"], "resources": {}}},
     "spec.decode.parallelism.pipeline"),
    ({"decode": {"resources": {"limits": {"memory": "319Mi"}}}}, "spec.decode.resources.limits.memory"),
    ({"prefill": {"template": {"spec": {"hostNetwork": True}}}}, "spec.prefill.template.spec.hostNetwork"),
    ({"kv": {"offload": {"memory": "1Gi"}}, "decode": limit("2047Mi")}, "spec.decode.resources.limits.memory"),
    ({"kv": {"offload": {"memory": "1Gi"}}, "decode": {"resources": {}}}, "spec.kv.offload.memory"),
    ({"kv": {"offload": {"disk": "1Gi"}}, "prefill": {"parallelism": {"device": "none"}}}, "spec.kv.offload.disk"),
    ({"kv": {"offload": {"disk": "1Gi"}}, "decode": {"parallelism": {"data": 2}}}, "spec.kv.offload.disk"),
    ({"router": {"ports": {"http": 8000}}}, "spec.router.ports.http"),
    ({"router": {"ports": {"members": 8000}}}, "spec.router.ports.members"),
    ({"router": {"ports": {"admin": 8009}}}, "spec.router.ports.admin"),
]


@pytest.mark.parametrize(("spec", "path"), CASES, ids=[path for _, path in CASES])
def test_refused_with_its_field(spec: dict[str, Any], path: str) -> None:
    assert [where for where, _ in kube_refusals(service(None, **spec))] == [path]


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"model": {"source": "a/b", "tokenSecret": SECRET, "cache": {"claim": "c"}}, "router": {"apiKeySecret": SECRET}},
        {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"tensor": 2}}},
        {"prefill": {"parallelism": {"tensor": 4}}, "decode": {"parallelism": {"tensor": 2}}},
        {"prefill": {"parallelism": {"data": 2}}, "decode": {"parallelism": {"data": 4}}},
        {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"pipeline": 2}}},
        {"decode": {"resources": {"limits": {"memory": "1Gi"}}}},
        {"decode": {"parallelism": {"device": "none"}, "resources": {"limits": {"memory": "320Mi"}}}},
        {"router": {"placement": "deployment", "ports": {"http": 8000}}},
        {"router": {"policy": "least_loaded", "replicas": 3, "maxInFlight": 64}},
        {"decode": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
        {"kv": {"offload": {"memory": "1Gi", "disk": "9Gi"}}, "decode": limit("2049Mi")},
        {"kv": {"offload": {"memory": "1Gi"}}, "decode": {"parallelism": {"data": 2}}},
        {"kv": {"offload": {"memory": "1Gi"}}, "prefill": {"replicas": 0, "resources": {}}},
        {"kv": {"offload": {"store": {"connector": "mine.store.Mine"}}}, "decode": {"resources": {}}},
        {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": SECRET}}]}},
    ],
    ids=str,
)
def test_accepted(spec: dict[str, Any]) -> None:
    assert list(kube_refusals(service(**spec, target=None))) == []


def test_memory_is_counted_per_rank_and_the_figures_are_given() -> None:
    two = {"parallelism": {"tensor": 2}, "resources": {"limits": {**GPUS, "memory": "2000Mi"}}}
    ((path, reason),) = kube_refusals(service(None, prefill={"parallelism": {"tensor": 2}}, decode=two))
    assert path == "spec.decode.resources.limits.memory"
    assert reason.startswith("must be above 2048Mi, not 2000Mi: each of 2 ranks keeps at least 512Mi of KV to send and ")
    more = service(None, decode={"resources": {"limits": {"memory": "1Gi"}}}, kv={"memory": "2Gi"})
    assert "must be above 2560Mi, not 1Gi: each of 1 ranks keeps up to 1024Mi" in next(iter(kube_refusals(more)))[1]
    odd = service(None, decode={"resources": {"limits": {"memory": "3Gi"}}}, kv={"memory": "3Gi"})
    assert "must be above 3584Mi, not 3Gi: each of 1 ranks keeps up to 1536Mi" in next(iter(kube_refusals(odd)))[1]
    read = service(None, decode={"resources": {"limits": {"memory": "1279Mi"}}}, kv={"transport": "rdma"})
    assert "of KV to send and 768Mi to receive" in next(iter(kube_refusals(read)))[1]
    less = service(None, decode={"resources": {"limits": {"memory": "1023Mi"}}}, kv={"memory": "2Mi"})
    assert "must be above 1025Mi, not 1023Mi: each of 1 ranks keeps up to 512Mi" in next(iter(kube_refusals(less)))[1]


@pytest.mark.parametrize(("kv", "device", "needed"), [
    ({}, True, 1024), ({"transport": "tcp"}, True, 1024), ({"transport": "shm"}, True, 512), ({}, False, 256),
    ({"transport": "rdma"}, True, 1280), ({"transport": "rdma"}, False, 512),
    ({"memory": "4Gi"}, True, 2048 + 2048 + 512), ({"memory": "512Mi"}, True, 1024 + 256),
    ({"memory": "512Mi"}, False, 512),
], ids=str)
def test_all_that_a_rank_takes_is_counted_and_no_more(kv: dict[str, Any], device: bool, needed: int) -> None:
    """As docs/operations.md has it, and an engine takes it (``test_engine_plane_sizes``)."""
    for most, refused in ((needed, False), (needed - 1, True)):
        role = {"parallelism": {} if device else {"device": "none"}, **limit(f"{most}Mi")}
        found = dict(kube_refusals(service(None, kv=kv, decode=role)))
        assert ("spec.decode.resources.limits.memory" in found) is refused


def test_memory_that_is_offloaded_to_is_in_the_limit_once_and_both_roles_without_gpus_are_named() -> None:
    spec = {"parallelism": {"tensor": 2}, "resources": {"limits": {**GPUS, "memory": "66Gi"}}}
    one = service(None, kv={"offload": {"memory": "64Gi"}}, prefill=spec, decode=spec)
    assert list(kube_refusals(one)) == []
    tight = {"parallelism": {"tensor": 2}, "resources": {"limits": {**GPUS, "memory": "65Gi"}}}
    ((path, reason),) = kube_refusals(service(None, kv={"offload": {"memory": "64Gi"}}, prefill=spec, decode=tight))
    assert path == "spec.decode.resources.limits.memory"
    assert reason.startswith(f"must be above {66 << 10}Mi, not 65Gi: each of 2 ranks")
    assert f"{64 << 10}Mi are those of kv.offload, beside what vLLM itself takes" in reason
    bare = service(None, kv={"offload": {"memory": "64Gi"}}, prefill={"resources": {}}, decode={"resources": {}})
    ((path, reason),) = kube_refusals(bare)
    assert path == "spec.kv.offload.memory"
    assert "prefill and decode have none: CPU Offloading is currently only supported on CUDA-alike and XPU GPUs" in reason


def test_every_refusal_is_found_not_only_the_first() -> None:
    template = {"spec": {"hostNetwork": True, "restartPolicy": "Never"}}
    one = service(None, kv={"memory": "2Gi"}, prefill={"resources": {"limits": {"nvidia.com/gpu": 1, "memory": "1Gi"}}},
                  decode={"template": template})
    found = [path for path, _ in kube_refusals(one)]
    pod = "spec.decode.template.spec"
    assert found == ["spec.prefill.resources.limits.memory", f"{pod}.restartPolicy", f"{pod}.hostNetwork"]
