"""What is worth saying of a document: arguments by which engines judge requests and that differ by role, and a transport
by RDMA for which nothing seems to bring a device.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from api_documents import document
from render_service import service

from xpyd_operator.api import notes
from xpyd_operator.api.notes import JUDGING, judging, rdma
from xpyd_operator.api.rule import Target
from xpyd_operator.render.judge import judge

SPELLED = "transport rdma needs an RDMA device"


@pytest.mark.parametrize(("engine", "prefill", "decode", "expected"), [
    ([], [], ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
     [("spec.decode.args[0]", "--enable-auto-tool-choice is set for decode alone"),
      ("spec.decode.args[1]", "--tool-call-parser is set for decode alone")]),
    (["--tool-call-parser", "hermes"], [], [], []),
    ([], ["--tool-call-parser", "hermes"], ["--tool_call_parser=hermes"], []),
    ([], ["--max-model-len=1024"], ["--max-model-len", "2048"],
     [("spec.prefill.args[0]", "--max-model-len differs from the other role's")]),
    (["--max-model-len=1024"], [], ["--dtype", "float32", "--max-model-len", "2048"],
     [("spec.decode.args[2]", "--max-model-len differs from the other role's")]),
    (["--max-model-len=1024"], ["--max-model-len=1", "--max-model-len", "1024"], [], []),
    ([], ["--lora-modules", "a=/x", "b=/y"], ["--lora-modules", "a=/x"],
     [("spec.prefill.args[0]", "--lora-modules differs from the other role's")]),
    ([], ["--max-num-seqs", "8"], ["--max-num-seqs", "64"], []),
])
def test_arguments_that_judge_and_differ_are_named(engine: list[str], prefill: list[str], decode: list[str],
                              expected: list[tuple[str, str]]) -> None:
    found = judging(service(engine={"args": engine}, prefill={"args": prefill}, decode={"args": decode}))
    assert [(fault.path, fault.message.split(": ")[0]) for fault in found] == expected
    assert all("write it in spec.engine.args" in fault.message for fault in found)


def test_a_role_without_instances_judges_nothing() -> None:
    assert not judging(service(prefill={"replicas": 0}, decode={"args": ["--tool-call-parser", "hermes"]}))


def test_they_are_named_in_full() -> None:
    assert all(name.startswith("--") and name == name.lower() and "_" not in name for name in JUDGING)


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


def test_who_brings_no_device_is_told_for_each_role_and_not_on_one_host() -> None:
    assert said() == said(None) == ["spec.prefill.resources", "spec.decode.resources"]
    assert said(prefill={"resources": {"limits": {"memory": "8Gi"}}}) == ["spec.prefill.resources", "spec.decode.resources"]
    assert said(Target.LOCAL) == []


def test_who_has_told_ucx_what_to_take_is_told_what_that_means() -> None:
    seen = judge(document(kv={"transport": "rdma"}, engine={"env": [{"name": "A", "value": "b"},
                                                                    {"name": "UCX_TLS", "value": "tcp"}]}), None).service
    assert seen is not None
    [note] = rdma(seen)
    assert (note.path, "trusted networks" in note.message) == ("spec.engine.env[1]", True)


@pytest.mark.parametrize(("transport", "network", "told"), [
    ("rdma", {}, True), ("rdma", {"encryption": "disabled"}, True), ("rdma", {"encryption": "network"}, False),
    ("nccl", {}, True), ("nccl", {"encryption": "network"}, False), ("tcp", {}, False), ("shm", {}, False),
    ("auto", {"encryption": "enabled"}, False)])
def test_who_moves_kv_in_clear_past_the_network_of_pods_says_that_it_is_trusted(transport: str, network: dict[str, str], *,
                                                                                told: bool) -> None:
    role = {"resources": {"limits": {"rdma/ib": 1, "nvidia.com/gpu": 1}}}
    value = document(kv={"transport": transport} | network, prefill=role, decode=role)
    for target, wanted in ((Target.KUBERNETES, told), (None, told), (Target.LOCAL, False)):
        notes = [note for note in judge(value, target).notes if note.path == "spec.kv.encryption"]
        assert bool(notes) is wanted
        assert all("write encryption: network" in note.message for note in notes)


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm", "nccl"])
def test_other_transports_need_no_device(transport: str) -> None:
    seen = judge(document(kv={"transport": transport}), None).service
    assert seen is not None
    assert list(rdma(seen)) == []


def test_a_type_of_kv_for_one_role_alone_is_noted() -> None:
    def said(**spec: Any) -> list[str]:
        return [fault.path for fault in notes.values(service(**spec))]

    fp8 = {"args": ["--seed", "1", "--kv-cache-dtype", "fp8"]}
    assert said(prefill=fp8) == ["spec.prefill.args[2]"]
    assert said(decode={"args": ["--kv_cache_dtype=fp8"]}) == ["spec.decode.args[0]"]
    (fault,) = notes.values(service(prefill=fp8))
    assert fault.message.startswith("--kv-cache-dtype fp8 is set for prefill alone: decode takes what the model says")
    assert said(prefill=fp8, decode=fp8) == said(prefill=fp8, engine={"args": ["--kv-cache-dtype=auto"]}) == []
    assert said(prefill={"args": ["--kv-cache-dtype=auto"]}) == said(prefill={"replicas": 0, **fp8}) == said() == []


def test_a_queue_on_the_service_itself_is_noted() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "inference", "team": "a"}
    document = service()
    queued = msgspec.structs.replace(document, metadata=msgspec.structs.replace(document.metadata, labels=labels))
    (fault,) = notes.queue(queued)
    assert fault.path == 'metadata.labels["kueue.x-k8s.io/queue-name"]'
    assert list(notes.queue(document)) == []
