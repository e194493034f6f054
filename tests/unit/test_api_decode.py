"""Decoding: what is right passes, what is wrong is named with its path and what would be right."""

from __future__ import annotations

import msgspec
import pytest
from api_documents import BASE, MALFORMED, Bad, document

from xpyd_operator.api.decode import decode_pool, decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.errors import SpecError

POOL = {
    "apiVersion": "xpyd.dev/v1beta1",
    "kind": "DisaggPool",
    "metadata": {"name": "qwen-decode"},
    "spec": {"service": "qwen", "role": "decode", "replicas": 3},
}


def test_the_smallest_document_is_right() -> None:
    decoded = decode_service(BASE)
    assert decoded.service.shape == "1P3D"
    assert decoded.warnings == decoded.notes == ()


def test_roles_may_be_left_out() -> None:
    assert decode_service(document({"spec.prefill": None, "spec.decode": None})).service.shape == "1P1D"


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_document_is_refused_with_path_and_remedy(case: Bad) -> None:
    """And one mistake gives no second fault elsewhere."""
    with pytest.raises(SpecError) as caught:
        decode_service(case.obj)
    faults = caught.value.faults
    assert any(fault.path == case.path and case.tells in fault.message for fault in faults), str(caught.value)
    assert case.obj in ({}, "DisaggService", [1, 2]) or {fault.path for fault in faults} == {case.path}, str(caught.value)


def test_all_faults_are_reported_at_once() -> None:
    wrong = document(
        {"metadata.name": "Q", "spec.decode.replicas": "3", "spec.engine.args": ["--port", 7, "-tp=2"], "spec.x": 1},
        router={"ports": {"members": 10001}},
    )
    with pytest.raises(SpecError) as caught:
        decode_service(wrong)
    assert {fault.path for fault in caught.value.faults} == {
        "metadata.name",
        "spec.decode.replicas",
        "spec.engine.args[0]",
        "spec.engine.args[1]",
        "spec.engine.args[2]",
        "spec.x",
        "spec.router.ports.members",
    }


def test_a_rule_is_not_asked_about_a_faulty_field() -> None:
    with pytest.raises(SpecError) as caught:
        decode_service(document(router={"ports": {"http": "30001"}}))
    assert [fault.path for fault in caught.value.faults] == ["spec.router.ports.http"]


def test_lenient_decoding_warns_about_unknown_fields_and_goes_on() -> None:
    newer = document({"spec.kv": {"rdma": True, "encryption": "network"}, "spec.future": {"a": 1}})
    decoded = decode_service(newer, strict=False)
    assert decoded.service.spec.kv.encryption == "network"
    assert [str(warning.path) for warning in decoded.warnings] == ["spec.kv.rdma", "spec.future"]
    assert "ignored" in decoded.warnings[0].message


def test_lenient_decoding_still_refuses_what_is_wrong() -> None:
    with pytest.raises(SpecError, match=r"spec\.decode\.replicas"):
        decode_service(document({"spec.decode.replicas": -1, "spec.future": 1}), strict=False)


def test_null_is_the_same_as_absent() -> None:
    with_null = document({"spec.prefill.replicas": None})
    with_null["spec"]["prefill"] = {"replicas": None, "args": None}
    with_null["spec"]["router"] = None
    assert decode_service(with_null).service == decode_service(document(prefill={})).service


def test_metadata_of_a_live_object_is_accepted() -> None:
    live = document(
        {
            "metadata.uid": "4c", "metadata.resourceVersion": "7", "metadata.generation": 2,
            "metadata.creationTimestamp": "2026-01-01T00:00:00Z", "metadata.managedFields": [{"manager": "kubectl"}],
            "metadata.labels": {"a": "b"}, "metadata.annotations": {"c": "d"},
            "status": {"ready": "1P2D", "conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}]},
        }
    )  # fmt: skip
    service = decode_service(live).service
    assert service.metadata.generation == 2
    assert service.status.conditions[0].reason == "Serving"


ONLY_LOCAL = document({"spec.model.source": "../weights"})
ONLY_KUBERNETES = document({"spec.model.source": "pvc://claim/x"})
SHM = document(kv={"transport": "shm"})
OPEN_PODS = document({"spec.prefill.parallelism": {"tensor": 2, "pods": 2}}, networkPolicy={"enabled": False})


@pytest.mark.parametrize(
    ("obj", "fits", "path"),
    [
        (ONLY_LOCAL, Target.LOCAL, "spec.model.source"),
        (SHM, Target.LOCAL, "spec.kv.sharedMemory"),
        (OPEN_PODS, Target.LOCAL, "spec.networkPolicy.enabled"),
        (ONLY_KUBERNETES, Target.KUBERNETES, "spec.model.source"),
        (
            document({"spec.engine.env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]}),
            Target.KUBERNETES,
            "spec.engine.env[0].valueFrom",
        ),
    ],
)
def test_what_one_target_cannot_do_is_a_fault_there_and_a_note_otherwise(obj: object, fits: Target, path: str) -> None:
    other = next(target for target in Target if target is not fits)
    assert decode_service(obj, target=fits).notes == ()
    assert [(target, fault.path) for target, fault in decode_service(obj).notes] == [(other, path)]
    with pytest.raises(SpecError) as caught:
        decode_service(obj, target=other)
    assert [fault.path for fault in caught.value.faults] == [path]


def test_what_no_target_can_do_is_a_fault() -> None:
    nowhere = document({"spec.model.source": "pvc://claim/x"}, kv={"transport": "shm"})
    with pytest.raises(SpecError) as caught:
        decode_service(nowhere)
    assert {fault.path for fault in caught.value.faults} == {"spec.model.source", "spec.kv.sharedMemory"}


def test_pool() -> None:
    decoded = decode_pool(POOL)
    assert decoded.pool.spec.replicas == 3
    assert msgspec.to_builtins(decoded.pool)["spec"] == POOL["spec"]


@pytest.mark.parametrize(
    ("changes", "path", "tells"),
    [
        ({"metadata": {"name": "qwen"}}, "metadata.name", "must be qwen-decode"),
        ({"spec": {"service": "qwen", "role": "encode"}}, "spec.role", "did you mean decode?"),
        ({"spec": {"service": "qwen"}}, "spec.role", "required (decode or prefill)"),
        ({"spec": {"service": "qwen", "role": "decode", "replicas": -1}}, "spec.replicas", "from 0 to 1000"),
        ({"kind": "DisaggService"}, "kind", "must be DisaggPool"),
    ],
)
def test_a_malformed_pool_is_refused(changes: dict[str, object], path: str, tells: str) -> None:
    with pytest.raises(SpecError) as caught:
        decode_pool(POOL | changes)
    assert [fault.path for fault in caught.value.faults] == [path]
    assert tells in caught.value.faults[0].message
