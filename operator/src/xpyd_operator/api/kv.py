"""``spec.kv``: how KV goes from prefill to decode."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import Part, Size
from xpyd_operator.api.offload import Offload
from xpyd_operator.api.quantity import size

HostPath = Annotated[str, Meta(min_length=2, max_length=512, pattern=r"^/[^:]+$", extra={"kind": "path"})]


class SharedMemory(Part, frozen=True):
    """Shared memory between pods of one node."""

    host_path: HostPath
    """Folder of the node that engine pods mount, e.g. `/dev/shm/xpyd`, for the sockets through which they pass each other
    memory; no KV lies there. It must be there, and writable for their user; it cannot be the root, nor one of the system's
    folders, nor in one. Such pods are not `restricted` in the sense of the Pod Security Standards."""


class Kv(Part, frozen=True):
    """How KV goes from prefill to decode."""

    transport: Literal["auto", "tcp", "shm", "nccl", "rdma"] = "auto"
    """Link for KV data: `tcp` works everywhere, `shm` on one host, `rdma` by NIXL where pods have an RDMA device (not
    yet run on one; needs nixl in `engine.image`), `nccl` between GPUs (run within one GPU so far; needs nccl4py in
    `engine.image`). `auto` takes `shm` where a pair shares memory, else `rdma` where both sides have it, else `tcp`;
    never `nccl`. Set it to be refused instead of getting a slower link, or to rule one out.
    """
    mode: Literal["put_async", "put", "get"] = "put_async"
    """When decode fetches, and who waits: at once, beside prefill's next steps (`put_async`); at once, and prefill's step
    waits for it, a quarter of a second at most (`put`); or when it has blocks (`get`). Set it to `get` where decode's host
    has no memory for what comes early, and prefill's has: prefill keeps half of `memory` more.
    """
    memory: Size | None = None
    """Host memory of each rank for KV on its way: half for copies that prefill holds until decode takes them (on
    devices 512Mi at least; what finds no room waits in prefill's cache and slows it down), half for KV that comes
    before decode has a place for it. Default: copies by what the model brings (256Mi; on devices the KV of two and a
    half steps of `max_num_batched_tokens` tokens, 512Mi to 8Gi), and 10 % of the rank's KV cache, 1 GiB at most, for
    what comes early. Set it where `xpyd_kv_transfers_total{outcome="overflow"}` grows, or where the host has little
    memory.
    """
    encryption: Literal["disabled", "enabled", "network"] = "disabled"
    """Who keeps others from reading and changing KV between hosts: `enabled`: engines encrypt it, by the libcrypto in
    `engine.image`, and one that has none does not start; `auto` takes `shm` or `tcp` then, as `rdma` and `nccl` do not
    encrypt. `network`: the network does (partition keys, IPsec or MACsec in the NIC), which is what you say of it.
    `disabled`: nobody does, and `xpyd check` warns of `rdma` and `nccl`. Set it where others share the network between
    nodes.
    """
    shared_memory: SharedMemory | None = None
    """Shared memory between pods of one node; transport `shm` needs it in Kubernetes, and other ones than `auto` do not use
    it."""
    offload: Offload | None = None
    """Where prefixes are kept that have no place in an engine's cache any more. Default: nowhere."""
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the answers with KV from prefill whose first token decode computes again without it, beside the client's
    request and only while there is room, e.g. `0.01`; what differs is counted by pair of instances. 0: none. Set it to
    know that KV which is handed over gives the same answers.
    """

    @property
    def shared_folder(self) -> str | None:
        """Folder of the node that pods share; None where the link does not go through memory."""
        return None if self.shared_memory is None or self.transport not in ("auto", "shm") else self.shared_memory.host_path

    @property
    def engines_encrypt(self) -> Literal["disabled", "enabled"]:
        """What engines are told: whether they encrypt."""
        return "enabled" if self.encryption == "enabled" else "disabled"

    @property
    def keep_bytes(self) -> int | None:
        """Bytes for copies to send, half of ``memory``; None: the engine chooses by its model."""
        return None if self.memory is None else -(-size(self.memory) // 2)

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes for KV that has no place in decode's cache yet, half of ``memory``; None: a share of the cache."""
        return None if self.memory is None else size(self.memory) // 2
