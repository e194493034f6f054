"""Rules about the devices of a role: how many they are, what is said twice, and what NCCL runs on."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api import devices
from xpyd_operator.api.roles import GPU, NO_DEVICE, RoleSpec
from xpyd_operator.api.rule import Finding, Rule
from xpyd_operator.api.service import ServiceSpec
from xpyd_sidecar.contract.ids import Role

_ROLES = ("spec.prefill", "spec.decode")
_SIZES = ("parallelism.tensor", "parallelism.pipeline", "parallelism.data", "parallelism.pods", "parallelism.executor")
_STATED = ("parallelism", "parallelism.device", "resources", "resources.limits", "resources.requests", "resources.claims")
_UNSEEN = "CEL does not see what a template names, and costs too much where it looks into keys"


def _count(role: RoleSpec) -> Iterator[Finding]:
    yield from (found for one, found in _counts(role) if _seen(role, one))


def _count_unseen(role: RoleSpec) -> Iterator[Finding]:
    yield from (found for one, found in _counts(role) if not _seen(role, one))


def _counts(role: RoleSpec) -> Iterator[tuple[devices.Named, Finding]]:
    parallel = role.parallelism
    if parallel.executor == "ray":
        return
    sizes = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {parallel.data}"
    if parallel.pods > 1:
        sizes = f"{sizes} over {parallel.pods} pods"
    asked = {one.key for one in devices.questions(role)}
    for one in (each for each in devices.counted(role) if each.key not in asked):
        if str(one.value) != str(parallel.devices_of_pod):
            known = one.key == GPU or parallel.device is not None
            other = "" if known else "; if the engine runs on something else, write parallelism.device"
            yield one, (one.path, f"must be {parallel.devices_of_pod}, not {one.value}: {sizes}{other}")


def _seen(role: RoleSpec, one: devices.Named) -> bool:
    """Whether the API server knows it for a device."""
    return one.path.startswith("resources.") and (one.key in ("", role.parallelism.device) or _listed(one.key))


def _questions(role: RoleSpec) -> Iterator[Finding]:
    for one in devices.questions(role):
        words = (
            f"is {one.key} what engines compute on? xpyd knows it neither as a device nor as a network. Write "
            f"parallelism.device: {one.key} if they do, else parallelism.device: {GPU}, or the key of what they compute on"
        )
        yield one.path, words


def _contradicted(role: RoleSpec) -> Iterator[Finding]:
    yield from (_none_but(one) for one in devices.contradicted(role) if _seen(role, one))


def _contradicted_unseen(role: RoleSpec) -> Iterator[Finding]:
    yield from (_none_but(one) for one in devices.contradicted(role) if not _seen(role, one))


def _none_but(one: devices.Named) -> Finding:
    return "parallelism.device", f"none, but {one.path} names a device; leave one of them out"


def _nccl(spec: ServiceSpec) -> Iterator[Finding]:
    yield from (found for role, found in _without_nccl(spec) if _judged(role))


def _nccl_unseen(spec: ServiceSpec) -> Iterator[Finding]:
    yield from (found for role, found in _without_nccl(spec) if not _judged(role))


def _without_nccl(spec: ServiceSpec) -> Iterator[tuple[RoleSpec, Finding]]:
    for name, role in ((which.value, spec.role(which)) for which in Role) if spec.kv.transport == "nccl" else ():
        found = devices.devices(role)
        if not found:
            reason = f"transport nccl needs GPUs; add limits {GPU}, or write kv.transport: tcp"
            yield role, (f"{name}.resources", reason)
        elif not found.nccl:
            reason = f"transport nccl runs on whole NVIDIA GPUs, not on {', '.join(found.keys)}; write kv.transport: tcp"
            yield role, (f"{name}.resources", reason)


def _judged(role: RoleSpec) -> bool:
    """Whether the API server knows the devices of a role."""
    if role.parallelism.device is not None:
        return True
    named = devices.devices(role).named
    return role.template is None and (not named or any(_listed(one.key) for one in named))


def _listed(key: str) -> bool:
    """Whether the API server knows a key: looking for more of them in CEL costs too much."""
    return key in _SERVERS or key.startswith(_MIG)


_MIG = "nvidia.com/mig-"
_SERVERS = (GPU, "nvidia.com/gpu.shared", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi",
            "aws.amazon.com/neuroncore", "google.com/tpu")
_VENDORS = f"k in {list(_SERVERS)} || k.startsWith('{_MIG}')"
_WHOLE = f"k in {list(_SERVERS[:2])}"


def _count_cel(part: str) -> str:
    """Of the devices in limits or requests; a GPU is the one that counts, wherever it is named."""
    return f"""self.resources.{part}.all(k, !(has(self.parallelism.device) ? k == self.parallelism.device :
            '{GPU}' in self.resources.limits || '{GPU}' in self.resources.requests ? k == '{GPU}' : {_VENDORS}) ||
            string(self.resources.{part}[k]) ==
            string(self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data / self.parallelism.pods))"""


def _nccl_cel(role: str) -> str:
    """The API server knows only some vendors, and not what a template names."""
    device, given = f"self.{role}.parallelism.device", f"self.{role}.resources"
    return f"""(has({device}) ?
                {device}.startsWith('nvidia.com/') && !{device}.startsWith('{_MIG}') :
                !has({given}) || has(self.{role}.template) || has(self.template) || {given}.claims.size() > 0 ||
                {given}.limits.exists(k, {_WHOLE}) || {given}.requests.exists(k, {_WHOLE}) ||
                ({given}.limits.size() + {given}.requests.size() > 0 && !{given}.limits.exists(k, {_VENDORS}) &&
                !{given}.requests.exists(k, {_VENDORS})))"""


RULES: tuple[Rule, ...] = (
    Rule(
        at=_ROLES,
        reads=(*_SIZES, *_STATED),
        says="resources: the number of devices must be tensor x pipeline x data, over pods",
        cel=f"""!has(self.resources) || (has(self.parallelism.executor) && self.parallelism.executor == 'ray') ||
            ({_count_cel("limits")} && {_count_cel("requests")})""",
        wrong=_count,
    ),
    Rule(
        at=_ROLES,
        reads=(*_SIZES, *_STATED, "template"),
        says="",
        wrong=_count_unseen,
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
        reads=_STATED,
        says="parallelism.device is none, but resources name a device",
        cel=f"""!has(self.parallelism.device) || self.parallelism.device != '{NO_DEVICE}' || !has(self.resources) ||
            (!self.resources.limits.exists(k, {_VENDORS}) && !self.resources.requests.exists(k, {_VENDORS}) &&
            self.resources.claims.size() == 0)""",
        wrong=_contradicted,
    ),
    Rule(
        at=_ROLES,
        reads=(*_STATED, "template"),
        says="",
        wrong=_contradicted_unseen,
        no_twin=_UNSEEN,
    ),
    Rule(
        at=("spec",),
        reads=("kv.transport", *(f"{role}.{field}" for role in ("prefill", "decode") for field in _STATED)),
        says="kv.transport nccl needs whole NVIDIA GPUs: add nvidia.com/gpu to resources, or write another transport",
        cel=f"""self.kv.transport != 'nccl' ||
            ({_nccl_cel("prefill")} && {_nccl_cel("decode")})""",
        wrong=_nccl,
    ),
    Rule(
        at=("spec",),
        reads=("kv.transport", "template",
               *(f"{role}.{field}" for role in ("prefill", "decode") for field in (*_STATED, "template"))),
        says="",
        wrong=_nccl_unseen,
        no_twin=_UNSEEN,
    ),
)
