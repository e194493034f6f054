"""Rules about how KV travels."""

from __future__ import annotations

import re

from xpyd_operator.api.kv import Kv, SharedMemory
from xpyd_operator.api.offload import NO_STORES, Offload, Store
from xpyd_operator.api.rule import Finding, Rule, Target, finding_if

_NODES_OWN = re.compile(r"/+((etc|usr|var|proc|sys|root|home|boot|lib|lib64|bin|sbin|opt)(/.*)?)?")
"""What no engine may write to: these folders, all in them, and what is above."""
_DOTS = re.compile(r"(^|/)[.][.]?(/|$)")


def _shm_pods(kv: Kv) -> list[Finding]:
    return finding_if(
        kv.transport == "shm" and kv.shared_memory is None,
        "sharedMemory",
        "transport shm needs sharedMemory.hostPath in Kubernetes; or write transport: tcp",
    )


def _encrypts(kv: Kv) -> list[Finding]:
    clear = kv.encryption == "enabled" and kv.transport in ("rdma", "nccl")
    return finding_if(clear, "encryption", f"transport {kv.transport} does not encrypt; write transport: auto, tcp or shm")


def _host_path(shared: SharedMemory) -> list[Finding]:
    right = "write a folder of its own, such as /dev/shm/xpyd"
    if _NODES_OWN.fullmatch(shared.host_path):
        return [("hostPath", f"{shared.host_path} belongs to the node's system, and engines write there; {right}")]
    return finding_if(bool(_DOTS.search(shared.host_path)), "hostPath", f"must not go through . or ..; {right}")


def _nowhere(offload: Offload) -> list[Finding]:
    return finding_if(offload == Offload(), "", "names no place; write memory, disk or store, or leave it out")


def _no_store(store: Store) -> list[Finding]:
    instead = NO_STORES.get(store.connector, "")
    return finding_if(bool(instead), "connector", f"{store.connector} {instead}")


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec.kv",),
        reads=("transport", "sharedMemory"),
        says="transport shm needs sharedMemory.hostPath in Kubernetes",
        cel="self.transport != 'shm' || has(self.sharedMemory)",
        wrong=_shm_pods,
        target=Target.KUBERNETES,
    ),
    Rule(
        at=("spec.kv",),
        reads=("transport", "encryption"),
        says="the transports rdma and nccl do not encrypt: encryption is for auto, tcp and shm",
        cel="self.encryption != 'enabled' || self.transport in ['auto', 'tcp', 'shm']",
        wrong=_encrypts,
    ),
    Rule(
        at=("spec.kv.sharedMemory",),
        reads=("hostPath",),
        says="hostPath must be a folder that is not the system's, such as /dev/shm/xpyd",
        cel=f"!self.hostPath.matches('^({_NODES_OWN.pattern})$') && !self.hostPath.matches('{_DOTS.pattern}')",
        wrong=_host_path,
    ),
    Rule(
        at=("spec.kv.offload",),
        reads=("memory", "disk", "store"),
        says="offload names no place: write memory, disk or store",
        cel="has(self.memory) || has(self.disk) || has(self.store)",
        wrong=_nowhere,
    ),
    Rule(
        at=("spec.kv.offload.store",),
        reads=("connector",),
        says="this connector is no store beside xpyd's own",
        cel=f"!(self.connector in {list(NO_STORES)})",
        wrong=_no_store,
    ),
)
