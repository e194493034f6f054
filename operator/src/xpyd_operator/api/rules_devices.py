"""Rules about the devices of a role: how many they are, what is said twice, and what NCCL runs on."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api import devices
from xpyd_operator.api.roles import GPU, RoleSpec
from xpyd_operator.api.rule import Finding, Rule
from xpyd_operator.api.service import ServiceSpec
from xpyd_sidecar.contract.ids import Role

_ROLES = ("spec.prefill", "spec.decode")
_SIZES = ("parallelism.tensor", "parallelism.pipeline", "parallelism.data", "parallelism.pods")
_STATED = ("parallelism", "parallelism.device", "resources", "resources.limits", "resources.requests", "resources.claims")
_UNSEEN = "CEL does not see what objects of Kubernetes name"


def _count(role: RoleSpec) -> Iterator[Finding]:
    parallel = role.parallelism
    sizes = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {parallel.data}"
    if parallel.pods > 1:
        sizes = f"{sizes} over {parallel.pods} pods"
    asked = {one.key for one in devices.questions(role)}
    for one in (each for each in devices.counted_devices(role) if each.key not in asked):
        if str(one.value) != str(parallel.devices_of_pod):
            known = one.key == GPU or parallel.device is not None
            other = "" if known else "; if the engine runs on something else, write parallelism.device"
            yield one.path, f"must be {parallel.devices_of_pod}, not {one.value}: {sizes}{other}"


def _questions(role: RoleSpec) -> Iterator[Finding]:
    for one in devices.questions(role):
        words = (
            f"is {one.key} what engines compute on? xpyd knows it neither as a device nor as a network. Write "
            f"parallelism.device: {one.key} if they do, else parallelism.device: {GPU}, or the key of what they compute on"
        )
        yield one.path, words


def _contradicted(role: RoleSpec) -> Iterator[Finding]:
    for one in devices.contradicting_devices(role):
        yield "parallelism.device", f"none, but {one.path} names a device; leave one of them out"


def _nccl(spec: ServiceSpec) -> Iterator[Finding]:
    for name, role in ((which.value, spec.role(which)) for which in Role) if spec.kv.transport == "nccl" else ():
        found = devices.devices(role)
        if not found:
            yield f"{name}.resources", f"transport nccl needs GPUs; add limits {GPU}, or write kv.transport: tcp"
        elif not found.nccl:
            reason = f"transport nccl runs on whole NVIDIA GPUs, not on {', '.join(found.keys)}; write kv.transport: tcp"
            yield f"{name}.resources", reason


RULES: tuple[Rule, ...] = (
    Rule(
        at=_ROLES,
        reads=(*_SIZES, *_STATED, "template"),
        says="",
        wrong=_count,
        no_twin=_UNSEEN,
    ),
    Rule(
        at=_ROLES,
        reads=(*_STATED, "template"),
        says="",
        wrong=_questions,
        no_twin=_UNSEEN,
    ),
    Rule(
        at=_ROLES,
        reads=(*_STATED, "template"),
        says="",
        wrong=_contradicted,
        no_twin=_UNSEEN,
    ),
    Rule(
        at=("spec",),
        reads=("kv.transport", "template",
               *(f"{role}.{field}" for role in ("prefill", "decode") for field in (*_STATED, "template"))),
        says="",
        wrong=_nccl,
        no_twin=_UNSEEN,
    ),
)
