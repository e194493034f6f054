"""The connectors beside ours, in the order in which they are asked, and what of ``kv.offload`` cannot be.

    MultiConnector ─┬─ XpydConnector                  KV that prefill hands over
                    ├─ OffloadingConnector            kv.offload.memory
                    ├─ SimpleCPUOffloadConnector      kv.offload.disk
                    └─ the store's                    kv.offload.store

vLLM loads from the first connector that has tokens, and saves with all. Ours is first in both roles: on decode another one
that came first would take the hand-over's place, and prefill's work would be lost. Both roles have the same connectors, so
that an instance can go from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import paths as at
from xpyd_sidecar.contract.ids import Role

CPU_REASON: Final = "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"
"""What vLLM says before it ends."""
_DISK_PART: Final = 0.99
"""Of the volume, that files may fill: it has more to hold than their content, and a pod over its limit is evicted."""


def offload_connectors(service: DisaggService, role: Role) -> tuple[dict[str, Any], ...]:
    """The configurations of the connectors after ours in the engines of a role; none without ``kv.offload``."""
    offload = service.spec.kv.offload
    if offload is None:
        return ()
    parallel = service.spec.role(role).parallelism
    found = []
    if offload.memory_bytes:  # of all ranks that step as one engine
        found.append(_child("OffloadingConnector", {"cpu_bytes_to_use": offload.memory_bytes // parallel.data}))
    if offload.disk_bytes:  # of each rank
        part = int(offload.disk_bytes * _DISK_PART) // parallel.devices
        options = {"kv_offload_backend": "disk", "disk_path": f"{at.OFFLOAD}/kv", "disk_capacity_bytes": part}
        found.append(_child("SimpleCPUOffloadConnector", options))
    if (store := offload.store) is not None:
        module = {"kv_connector_module_path": store.module} if store.module is not None else {}
        found.append(_child(store.class_name, dict(store.options)) | module)
    return tuple(found)


def _child(connector: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both"} | ({"kv_connector_extra_config": options} if options else {})


def memory_bytes(service: DisaggService) -> int:
    """Host memory of one instance for what is beside ours."""
    offload = service.spec.kv.offload
    return 0 if offload is None else offload.memory_bytes


def refusals(service: DisaggService, bare: tuple[Role, ...]) -> Iterator[tuple[str, str]]:
    """What cannot be; ``bare``: the roles without GPUs."""
    offload = service.spec.kv.offload
    if offload is None:
        return
    lacking = [str(role) for role in bare if service.spec.role(role).max_instances]
    if lacking:
        none = f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} none"
        for name, given in (("memory", offload.memory_bytes), ("disk", offload.disk_bytes)):
            if given:
                yield f"spec.kv.offload.{name}", f"needs GPUs, and {none}: {CPU_REASON}; leave it out"
    for role in Role:
        if offload.disk_bytes and service.spec.role(role).parallelism.data > 1:
            reason = f"the files of data-parallel ranks ({role}) would have one name; write memory instead"
            yield "spec.kv.offload.disk", reason
