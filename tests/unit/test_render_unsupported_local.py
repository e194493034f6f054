"""What local processes can not do is refused with its field."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.render.unsupported import local_refusals

SECRET = {"name": "s", "key": "k"}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"kv": {"transport": "nccl"}}, "spec.kv.transport"),
    ({"model": {"source": "a/b", "cache": {"claim": "c"}}}, "spec.model.cache"),
    ({"model": {"source": "a/b", "tokenSecret": SECRET}}, "spec.model.tokenSecret"),
    ({"prefill": {"parallelism": {"pipeline": 2}, "args": ["--enforce-eager"]}}, "spec.prefill.parallelism.pipeline"),
    ({"kv": {"offload": {"memory": "1Gi"}}}, "spec.kv.offload.memory"),
    ({"router": {"apiKeySecret": SECRET}}, "spec.router.apiKeySecret"),
    ({"router": {"tls": {"secret": "cert"}}}, "spec.router.tls.secret"),
    ({"suspend": True}, "spec.suspend"),
]


@pytest.mark.parametrize(("spec", "path"), CASES, ids=[path for _, path in CASES])
def test_refused_with_its_field(spec: dict[str, Any], path: str) -> None:
    assert [where for where, _ in local_refusals(service(**spec), gpus=0)] == [path]


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"prefill": {"parallelism": {"tensor": 2}}},
        {"decode": {"parallelism": {"pipeline": 2}}},
        {"prefill": {"parallelism": {"data": 2}}, "decode": {"parallelism": {"data": 4}}},
        {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"pipeline": 2}}},
        {"kv": {"transport": "tcp"}},
        {"kv": {"transport": "shm"}},
        {"kv": {"offload": {"store": {"connector": "mine.store.Mine"}}}},
        {"kv": {"transport": "auto", "sharedMemory": {"hostPath": "/dev/shm"}}},
        {"router": {"policy": "least_loaded", "placement": "deployment"}},
        {"router": {"policy": "cost", "hold": "1m", "skipPrefill": {"belowTokens": 5}}},
        {"decode": {"scaling": {"min": 1, "max": 3}}, "prefill": {"replicas": 2}},
        {"networkPolicy": {"enabled": False}},
        {"prefill": {"replicas": 0, "parallelism": {"tensor": 2}}},
    ],
)
def test_accepted(spec: dict[str, Any]) -> None:
    assert list(local_refusals(service(**spec), gpus=0)) == []


def test_memory_is_offloaded_to_where_there_are_gpus_and_disk_never() -> None:
    assert list(local_refusals(service(kv={"offload": {"memory": "1Gi"}}), gpus=2)) == []
    ((path, reason),) = local_refusals(service(kv={"offload": {"disk": "1Gi"}}), gpus=2)
    assert (path, "write memory" in reason) == ("spec.kv.offload.disk", True)


def test_every_refusal_is_found_not_only_the_first() -> None:
    one = service(kv={"transport": "nccl"}, router={"tls": {"secret": "cert"}})
    assert {path for path, _ in local_refusals(one, 0)} == {"spec.kv.transport", "spec.router.tls.secret"}


def test_what_an_instance_of_several_members_cannot_do_is_refused_by_name() -> None:
    wide = {"parallelism": {"tensor": 4, "pods": 2}}
    assert list(local_refusals(service(decode=wide, prefill=wide), 8)) == []
    ranks = {"parallelism": {"data": 4, "pods": 2}}
    assert list(local_refusals(service(prefill=ranks, decode=ranks), 8)) == []
    assert [path for path, _ in local_refusals(service(decode=wide, kv={"transport": "shm"}), 8)] == ["spec.kv.transport"]
