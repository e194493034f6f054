"""Which devices an instance gets.

    parallelism.device: none               none
    parallelism.device: KEY                KEY; added where neither ``resources`` nor ``template`` names it
    resources: {}                          none
    resources or template name some        those: a key that is known for a device's (``device_keys``), or a claim
    otherwise                              ``nvidia.com/gpu``, added

What is added is as many as ``parallelism`` has devices for a pod. Neither a limit of memory nor a NIC takes a GPU away.
What ``template`` says of the container ``main`` counts like ``resources``. A key that nobody knows is refused where nothing
else says what an engine computes on (``questions``); what was accepted before there were lists has it for its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from xpyd_operator.api.device_keys import EFA, TPU, Meaning, meaning
from xpyd_operator.api.model import Engine
from xpyd_operator.api.roles import GPU, NO_DEVICE, Resources, RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Fault
from xpyd_sidecar.contract.ids import Role

_NVIDIA: Final = "nvidia.com/"
_MIG: Final = "nvidia.com/mig-"
_NODE: Final = 8
"""Devices of the nodes that are commonly had; those of NVIDIA and AMD."""


class NamedDevice(msgspec.Struct, frozen=True):
    """A device that a role names."""

    path: str
    """Below the role."""
    key: str
    value: Any


class Devices(msgspec.Struct, frozen=True):
    """Of one role."""

    added: str
    """The key that nothing names and that is added; empty: none is."""
    named: tuple[NamedDevice, ...]
    claimed: bool
    """Some come by claims (dynamic resource allocation)."""

    def __bool__(self) -> bool:
        return bool(self.added or self.named or self.claimed)

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the devices, without those of claims."""
        return tuple(dict.fromkeys((*((self.added,) if self.added else ()), *(one.key for one in self.named))))

    @property
    def nccl(self) -> bool:
        """Whether NCCL may run on them: NVIDIA's, and whole ones. What a claim brings is not known here."""
        whole = any(key.startswith(_NVIDIA) and not key.startswith(_MIG) for key in self.keys)
        return self.claimed or whole


def devices(role: RoleSpec) -> Devices:
    """The devices of one instance of a role."""
    stated = role.parallelism.device
    everything = tuple(_named(role))
    known = tuple(one for one in everything if meaning(one.key) in (Meaning.DEVICE, Meaning.SHARE))
    if stated == NO_DEVICE:
        return Devices("", (), claimed=False)
    named = tuple(one for one in everything if one.key == stated) if stated else known or tuple(_unknown(everything))
    if stated is not None:  # what is claimed beside it is something else
        return Devices("" if named else stated, named, claimed=False)
    claimed = _claimed(role)
    added = "" if named or claimed or role.resources == Resources() else GPU
    return Devices(added, named, claimed=claimed)


def limits(role: RoleSpec) -> dict[str, int | str]:
    """Resource limits of one instance, with its devices: those that are added, or named elsewhere than in ``limits``."""
    found = devices(role)
    made: dict[str, int | str] = {} if role.resources is None else dict(role.resources.limits)
    for one in found.named:  # the template's come last, and its limits after its requests
        made[one.key] = one.value
    return made | ({found.added: role.parallelism.devices_of_pod} if found.added else {})


def counted_devices(role: RoleSpec) -> Iterator[NamedDevice]:
    """The named devices of a role that must be as many as ``parallelism`` says."""
    named = devices(role).named
    mine = [one for one in named if one.key == GPU] if role.parallelism.device is None else []
    yield from mine or (one for one in named if meaning(one.key) is not Meaning.SHARE)


def questions(role: RoleSpec) -> Iterator[NamedDevice]:
    """Keys of which only the user knows whether engines compute on them, where nothing else says on what they do."""
    everything = tuple(_named(role))
    unknown = {one.key: one for one in _unknown(everything)}
    found = devices(role)
    if role.parallelism.device is None and not found.claimed and unknown.keys() >= set(found.keys):
        yield from unknown.values()


def networks(role: RoleSpec) -> list[str]:
    """Keys of a role's resources by which pods reach each other."""
    return list(dict.fromkeys(one.key for one in _named(role) if meaning(one.key) is Meaning.NETWORK))


def contradicting_devices(role: RoleSpec) -> Iterator[NamedDevice]:
    """What names a device of a role whose ``parallelism.device`` is none; claims have no key."""
    if role.parallelism.device == NO_DEVICE:
        yield from (one for one in _named(role) if meaning(one.key) in (Meaning.DEVICE, Meaning.SHARE))
        if _claimed(role):
            own = role.resources is not None and role.resources.claims
            yield NamedDevice("resources.claims" if own else "template", "", None)


def implies_device(role: RoleSpec) -> bool:
    """Whether ``nvidia.com/gpu`` is added to a role whose resources name no device."""
    return role.parallelism.device is None and role.resources is not None and bool(devices(role).added)


def notes(service: DisaggService) -> list[Fault]:
    """What is worth saying of devices that were perhaps not meant so."""
    found = []
    for which in Role:
        role = service.spec.role(which)
        keys = devices(role).keys
        if role.parallelism.pods > 1:
            found.append(Fault(f"spec.{which}.parallelism.pods", _members(role)))
        if implies_device(role):
            number = role.parallelism.devices_of_pod
            words = f"{GPU}: {number} is added; on CPUs write spec.{which}.parallelism.device: none"
            found.append(Fault(f"spec.{which}.resources", f"names no device, so {words}"))
        other = bool(keys) and not any(key.startswith(_NVIDIA) for key in keys) and not any(questions(role))
        if other and service.spec.engine.image == Engine().image:
            words = f"the default is made for CUDA; write an image with vLLM for {keys[0]} ({which})"
            found.append(Fault("spec.engine.image", words))
        if role.parallelism.devices_of_pod > _NODE and any(key in (GPU, "amd.com/gpu") for key in keys):
            words = (f"{role.parallelism.devices_of_pod} devices in one pod: most nodes have {_NODE}, and a pod is on one; "
                     "write pods, so that each has a part")
            found.append(Fault(f"spec.{which}.parallelism", words))
    return found


def warnings(service: DisaggService) -> Iterator[Fault]:
    """Devices that xpyd's part of an engine is not known to work with, in a cluster."""
    for which in Role:
        role = service.spec.role(which)
        if TPU in devices(role).keys:
            words = (f"xpyd has not run on {TPU}: it copies KV of GPUs, or of engines on CPUs; expect the engines of "
                     f"{which} to end at their start")
            yield Fault(f"spec.{which}.resources", words)
        if EFA in networks(role) and service.spec.kv.transport == "rdma":
            words = (f"{EFA} is no device for transport rdma: UCX, which NIXL goes by, has no EFA, so engines of {which} "
                     "end at their start; write kv.transport: tcp")
            yield Fault(f"spec.{which}.resources", words)


def _members(role: RoleSpec) -> str:
    size, ranks = role.parallelism, role.parallelism.data // role.parallelism.pods
    words = f"each instance is {size.pods} members of {size.devices_of_pod} devices that begin and end together"
    if size.data == 1:
        return words
    return f"{words}; each has {ranks} of the {size.data} data-parallel ranks, and a server for them"


def _unknown(named: Iterable[NamedDevice]) -> Iterator[NamedDevice]:
    return (one for one in named if meaning(one.key) is Meaning.UNKNOWN)


def _named(role: RoleSpec) -> Iterator[NamedDevice]:
    """Everything with a domain, where the later of two of one key holds."""
    given = role.resources or Resources()
    parts: list[tuple[str, Any]] = [("resources.requests", given.requests), ("resources.limits", given.limits)]
    for path, resources in _templates(role):
        parts += [(f"{path}.{name}", resources.get(name)) for name in ("requests", "limits")]
    for path, part in parts:
        for key, value in part.items() if isinstance(part, dict) else ():
            if isinstance(key, str) and "/" in key and isinstance(value, int | str) and not isinstance(value, bool):
                yield NamedDevice(f'{path}["{key}"]', key, value)


def _claimed(role: RoleSpec) -> bool:
    spec = (role.template or {}).get("spec")
    return bool(
        (role.resources is not None and role.resources.claims)
        or any(resources.get("claims") for _, resources in _templates(role))
        or (isinstance(spec, dict) and spec.get("resourceClaims"))
    )


def _templates(role: RoleSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """The resources of ``main`` in the template, whatever else stands there."""
    spec = (role.template or {}).get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for index, container in enumerate(containers if isinstance(containers, list | tuple) else ()):
        if isinstance(container, dict) and container.get("name") == "main" and isinstance(container.get("resources"), dict):
            yield f"template.spec.containers[{index}].resources", container["resources"]
