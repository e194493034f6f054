"""What is said of a document for RDMA that seems to bring no device for it."""

from __future__ import annotations

from typing import Any

import pytest
from api_documents import document

from xpyd_operator.api.fabric import notes
from xpyd_operator.api.rule import Target
from xpyd_operator.render.judge import judge

SPELLED = "transport rdma needs an RDMA device"


def said(target: Target | None = Target.KUBERNETES, **spec: Any) -> list[str]:
    judged = judge(document(**{"kv": {"transport": "rdma"}} | spec), target)
    assert judged.refusals == ()
    return [str(note.path) for note in judged.notes if SPELLED in note.message or "UCX" in note.message]


@pytest.mark.parametrize("role", [
    {"resources": {"limits": {"rdma/ib": 1}}},
    {"resources": {"limits": {"vpc.amazonaws.com/efa": 4}}},
    {"resources": {"claims": [{"name": "nic"}]}, "template": {"spec": {"resourceClaims": [
        {"name": "nic", "resourceClaimTemplateName": "nic"}]}}},
    {"template": {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "infiniband"}}}},
])
def test_who_brings_a_device_is_told_nothing(role: dict[str, Any]) -> None:
    assert said(prefill=role, decode=role) == []
    assert said(prefill=role) == ["spec.decode.resources"]


def test_who_brings_none_is_told_for_each_role_and_not_on_one_host() -> None:
    assert said() == said(None) == ["spec.prefill.resources", "spec.decode.resources"]
    assert said(prefill={"resources": {"limits": {"memory": "8Gi"}}}) == ["spec.prefill.resources", "spec.decode.resources"]
    assert said(Target.LOCAL) == []


def test_who_has_told_ucx_what_to_take_is_told_what_that_means() -> None:
    service = judge(document(kv={"transport": "rdma"}, engine={"env": [{"name": "A", "value": "b"},
                                                                       {"name": "UCX_TLS", "value": "tcp"}]}), None).service
    assert service is not None
    [note] = notes(service)
    assert (note.path, "trusted networks" in note.message) == ("spec.engine.env[1]", True)


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm", "nccl"])
def test_other_transports_need_none(transport: str) -> None:
    service = judge(document(kv={"transport": transport}), None).service
    assert service is not None
    assert list(notes(service)) == []
