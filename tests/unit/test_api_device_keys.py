"""Keys that are known, and what a document says with those that are not; the clouds' own documents among them."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.api import device_keys
from xpyd_operator.api.decode import examine
from xpyd_operator.api.device_keys import BESIDE, DEVICES, NETWORKS, SHARES, Meaning, meaning
from xpyd_operator.api.devices import devices, limits, notes, warnings
from xpyd_operator.api.rule import Target
from xpyd_operator.render.judge import judge

GPU = "nvidia.com/gpu"


def document(**prefill: Any) -> dict[str, Any]:
    sizes = {"parallelism": prefill.get("parallelism", {})}
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": "v"},
            "spec": {"model": {"source": "Qwen/Qwen3-8B"}, "prefill": prefill, "decode": sizes}}


def prefill_limits(tensor: int, given: dict[str, Any]) -> dict[str, Any]:
    found = examine(document(parallelism={"tensor": tensor}, resources={"limits": given}), target=Target.KUBERNETES)
    assert (found.faults, found.service is None) == ((), False)
    assert found.service is not None
    return limits(found.service.spec.prefill)


@pytest.mark.parametrize(("tensor", "given", "added"), [
    (8, {"nvidia.com/sriov-rdma-vf": 8}, {GPU: 8}),
    (8, {"aliyun/erdma": 4}, {GPU: 8}),
    (8, {"rdma/shared_ib": 1}, {GPU: 8}),
    (8, {"networking.gke.io.networks/rdma-0": 1, "networking.gke.io.networks/rdma-1": 1}, {GPU: 8}),
    (8, {"openshift.io/mlx5_vf": 8}, {GPU: 8}),
    (8, {GPU: 8, "nvidia.com/mlnxnics": 8}, {}),
    (1, {"nvidia.com/gdrcopy": 1}, {GPU: 1}),
    (1, {"smarter-devices/fuse": 1}, {GPU: 1}),
    (1, {"devices.kubevirt.io/kvm": 1}, {GPU: 1}),
    (1, {GPU: 1, "nvidia.com/gpucores": 50}, {}),
    (1, {"nvidia.com/gpumem": 20000}, {GPU: 1}),
    (8, {"aws.amazon.com/neuroncore": 8}, {}),
    (8, {"aws.amazon.com/neuron": 4}, {}),
    (4, {"volcano.sh/vgpu-number": 4, "volcano.sh/vgpu-memory": 8000}, {}),
    (1, {"aliyun.com/gpu-mem": 24}, {}),
    (8, {"huawei.com/Ascend910": 8}, {}),
    (8, {"google.com/tpu": 8}, {}),
    (2, {"amd.com/cpx_nps4": 2}, {}),
    (2, {"nvidia.com/mig-3g.40gb": 2}, {}),
], ids=str)
def test_a_nic_takes_no_gpu_away_and_a_device_is_not_doubled(
    tensor: int, given: dict[str, Any], added: dict[str, int]
) -> None:
    assert prefill_limits(tensor, given) == given | added


@pytest.mark.parametrize("where", ["limits", "requests", "template"])
def test_a_key_that_nobody_knows_is_a_question_with_two_answers(where: str) -> None:
    key = "rdma.example.com/hca_shared"
    given: dict[str, Any] = {"resources": {where: {key: 1}}}
    path = f'spec.prefill.resources.{where}["{key}"]'
    if where == "template":
        given = {"template": {"spec": {"containers": [{"name": "main", "resources": {"limits": {key: 1}}}]}}}
        path = f'spec.prefill.template.spec.containers[0].resources.limits["{key}"]'
    (fault,) = judge(document(**given), Target.KUBERNETES).refusals
    assert fault.path == path
    assert f"Write parallelism.device: {key} if they do, else parallelism.device: {GPU}" in fault.message
    for answer, wanted in ((key, {key: 1}), (GPU, {key: 1, GPU: 1}), ("none", {key: 1})):
        answered = judge(document(**given, parallelism={"device": answer}), Target.KUBERNETES)
        assert answered.refusals == ()
        assert answered.service is not None
        assert limits(answered.service.spec.prefill) | {key: 1} == wanted


@pytest.mark.parametrize("beside", [
    {"resources": {"limits": {"example.com/x": 1, GPU: 1}}},
    {"resources": {"limits": {"example.com/x": 1, "google.com/tpu": 1}}},
    {"resources": {"limits": {"example.com/x": 1}, "claims": [{"name": "gpu"}]}},
    {"resources": {"limits": {"example.com/x": 1}}, "template": {"spec": {"resourceClaims": [
        {"name": "gpu", "resourceClaimTemplateName": "one"}]}}},
], ids=str)
def test_nothing_is_asked_where_something_else_says_what_computes(beside: dict[str, Any]) -> None:
    assert judge(document(**beside), Target.KUBERNETES).refusals == ()


def test_of_an_unknown_key_its_number_is_not_judged_before_it_is_known() -> None:
    wrong = document(parallelism={"tensor": 2}, resources={"limits": {"example.com/x": 7}})
    (fault,) = judge(wrong, Target.KUBERNETES).refusals
    assert fault.message.startswith("is example.com/x what engines compute on?")


def test_what_was_accepted_before_there_were_lists_keeps_its_device() -> None:
    """A document that is followed until it changes: no GPU comes to its pods."""
    spec = examine(document(resources={"limits": {"example.com/npu": 1}})).service
    assert spec is not None
    assert limits(spec.spec.prefill) == {"example.com/npu": 1}
    assert devices(spec.spec.prefill).keys == ("example.com/npu",)


def test_no_key_means_two_things() -> None:
    every = [*DEVICES, *SHARES, *NETWORKS, *BESIDE]
    assert len(every) == len(set(every))
    lists = ((DEVICES, Meaning.DEVICE), (SHARES, Meaning.SHARE), (NETWORKS, Meaning.NETWORK), (BESIDE, Meaning.BESIDE))
    for keys, found in lists:
        assert {meaning(key.replace("*", "x")) for key in keys} == {found}
    assert (meaning("memory"), meaning("a.b/c")) == (Meaning.BESIDE, Meaning.UNKNOWN)


def test_what_is_not_known_to_work_is_said() -> None:
    efa = {"limits": {GPU: 8, device_keys.EFA: 32}}
    role = {"parallelism": {"tensor": 8}, "resources": efa}
    by_rdma = service(Target.KUBERNETES, prefill=role, decode=role, kv={"transport": "rdma"})
    assert [fault.path for fault in warnings(by_rdma)] == ["spec.prefill.resources", "spec.decode.resources"]
    assert all("write kv.transport: tcp" in fault.message for fault in warnings(by_rdma))
    assert list(warnings(service(Target.KUBERNETES, prefill=role, decode=role, kv={"transport": "tcp"}))) == []
    tpu = service(Target.KUBERNETES, decode={"resources": {"limits": {device_keys.TPU: 1}}})
    assert [fault.message[:39] for fault in warnings(tpu)] == ["xpyd has not run on google.com/tpu: it "]


@pytest.mark.parametrize(("size", "said"), [({"tensor": 8}, []), ({"tensor": 16, "pods": 2}, []),
                                            ({"tensor": 16}, ["16 devices in one pod: most nodes have 8, and a pod "])])
def test_more_devices_than_a_node_has_are_said(size: dict[str, int], said: list[str]) -> None:
    found = notes(service(Target.KUBERNETES, decode={"parallelism": size}, prefill={"parallelism": size}))
    words = [fault.message for fault in found if fault.path == "spec.decode.parallelism"]
    assert [one[:50] for one in words] == [one[:50] for one in said]
