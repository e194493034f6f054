"""Which devices a role gets: a device is the default of one key."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.api.devices import devices, implies_device, limits, notes
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.rule import Target

GPU = "nvidia.com/gpu"
CLAIMS = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}


def role(**spec: Any) -> RoleSpec:
    return service(Target.KUBERNETES, decode=spec).spec.decode


def main(name: str = "main", **resources: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name, "resources": resources}]}}


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({}, {GPU: 1}),
        ({"parallelism": {"tensor": 2, "pipeline": 2}}, {GPU: 4}),
        ({"resources": {}}, {}),
        ({"resources": {"limits": {}, "requests": {}}}, {}),  # as the API server defaults it
        ({"resources": {"limits": {"memory": "64Gi"}}}, {"memory": "64Gi", GPU: 1}),
        ({"resources": {"requests": {"cpu": 8}}}, {GPU: 1}),
        ({"resources": {"limits": {"rdma/ib": 1, "hugepages-2Mi": "4Gi"}}}, {"rdma/ib": 1, "hugepages-2Mi": "4Gi", GPU: 1}),
        ({"resources": {"limits": {"vpc.amazonaws.com/efa": 4}}}, {"vpc.amazonaws.com/efa": 4, GPU: 1}),
        ({"resources": {"limits": {"amd.com/gpu": 1}}}, {"amd.com/gpu": 1}),
        ({"resources": {"requests": {"amd.com/gpu": 1}}}, {"amd.com/gpu": 1}),
        ({"resources": {"limits": {GPU: 1, "nvidia.com/hostdev": 4}}}, {GPU: 1, "nvidia.com/hostdev": 4}),
        ({"template": main(limits={"nvidia.com/mig-3g.40gb": 1})}, {"nvidia.com/mig-3g.40gb": 1}),
        ({"template": main(limits={"memory": "9Gi"})}, {GPU: 1}),
        ({"template": main("other", limits={"amd.com/gpu": 1})}, {GPU: 1}),
        ({"parallelism": {"device": "none"}}, {}),
        ({"parallelism": {"device": "none"}, "resources": {"limits": {"memory": "8Gi"}}}, {"memory": "8Gi"}),
        ({"parallelism": {"device": "amd.com/gpu", "tensor": 2}, "resources": {"limits": {"memory": "8Gi"}}},
         {"memory": "8Gi", "amd.com/gpu": 2}),
        ({"parallelism": {"device": GPU}, "resources": {"limits": {"example.com/nic": 8}}}, {"example.com/nic": 8, GPU: 1}),
        ({"parallelism": {"device": GPU}, "resources": {}}, {GPU: 1}),
        ({"resources": {"claims": [{"name": "gpu"}]}, "template": {"spec": CLAIMS}}, {}),
        ({"template": {"spec": CLAIMS}}, {}),
        ({"template": main(claims=[{"name": "gpu"}])}, {}),
    ],
    ids=str,
)
def test_limits_with_their_device(spec: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert limits(role(**spec)) == wanted


def test_claims_are_devices_and_networks_are_none() -> None:
    assert devices(role(resources={"claims": [{"name": "gpu"}]}))
    assert devices(role(template={"spec": CLAIMS}))
    assert not devices(role(resources={}))
    assert devices(role(resources={"limits": {"rdma/ib": 1}})).keys == (GPU,)


def test_nccl_runs_on_whole_gpus_of_nvidia() -> None:
    for key, runs in ((GPU, True), ("nvidia.com/mig-1g.10gb", False), ("amd.com/gpu", False)):
        assert devices(role(resources={"limits": {key: 1}})).nccl is runs
    assert devices(role()).nccl
    assert devices(role(resources={"claims": [{"name": "gpu"}]})).nccl


def test_a_template_that_has_no_form_names_nothing() -> None:
    """It is refused elsewhere, with its path."""
    for spec in ([], {"containers": {}}, {"containers": [{"name": "main", "resources": 1}]}):
        template = {"spec": spec}
        assert limits(role(template=template)) == {GPU: 1}


def test_a_device_is_unstated_where_it_comes_beside_resources_that_name_none() -> None:
    meant = {"limits": {"memory": "8Gi"}}
    assert implies_device(role(resources=meant))
    for spec in ({}, {"resources": {}}, {"resources": meant, "parallelism": {"device": "none"}},
                 {"resources": meant, "parallelism": {"device": GPU}}, {"resources": {"limits": {GPU: 1}}}):
        assert not implies_device(role(**spec))


def test_a_device_that_is_added_and_an_image_for_others_are_worth_a_note() -> None:
    found = notes(service(Target.KUBERNETES, prefill={"resources": {"limits": {"memory": "8Gi"}}},
                          decode={"resources": {"limits": {"amd.com/gpu": 1}}}))
    assert [fault.path for fault in found] == ["spec.prefill.resources", "spec.engine.image"]
    assert "nvidia.com/gpu: 1 is added; on CPUs write spec.prefill.parallelism.device: none" in found[0].message
    assert "an image with vLLM for amd.com/gpu (decode)" in found[1].message
    assert notes(service(Target.KUBERNETES)) == notes(service(Target.KUBERNETES, decode={"resources": {}})) == []
    other = service(Target.KUBERNETES, engine={"image": "rocm:1"}, decode={"resources": {"limits": {"amd.com/gpu": 1}}})
    assert notes(other) == []


def test_members_of_an_instance_are_noted_with_their_share_of_the_devices() -> None:
    wide = service(Target.LOCAL, decode={"parallelism": {"tensor": 16, "pods": 2}})
    assert [(note.path, note.message) for note in notes(wide)] == [
        ("spec.decode.parallelism.pods", "each instance is 2 members of 8 devices that begin and end together")]
    assert limits(wide.spec.decode) == {"nvidia.com/gpu": 8}
    ranks = service(Target.LOCAL, prefill={"parallelism": {"data": 4, "tensor": 2, "pods": 2}})
    assert [(note.path, note.message) for note in notes(ranks)] == [
        ("spec.prefill.parallelism.pods",
         ("each instance is 2 members of 4 devices that begin and end together; "
          "each has 2 of the 4 data-parallel ranks, and a server for them"))]
