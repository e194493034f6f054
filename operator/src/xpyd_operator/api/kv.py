"""``spec.kv``: how KV goes from prefill to decode."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import Duration, Part, Size, SizeOrShare
from xpyd_operator.api.durations import seconds
from xpyd_operator.api.offload import Offload
from xpyd_operator.api.quantity import size, size_of_share

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
    """Link for KV data: `tcp` works everywhere, `shm` on one host, `rdma` by NIXL where pods have an RDMA device (not yet
    run on one; needs nixl in `engine.image`), `nccl` between GPUs (run within one GPU so far; needs nccl4py in
    `engine.image`). `auto` takes `shm` where a pair shares memory, else `rdma` where both sides have it, else `tcp`; never
    `nccl`."""
    mode: Literal["put_async", "put", "get"] = "put_async"
    """When decode fetches, and who waits: at once, beside prefill's next steps (`put_async`); at once, and prefill's step
    waits for it, a quarter of a second at most (`put`); or when it has blocks (`get`)."""
    keep: Size | None = None
    """Host memory of each rank for copies of KV that prefill holds until decode takes them; on devices 512Mi at least. What
    finds no room waits in prefill's cache, which slows prefill down. Default: 256Mi; on devices the KV of two and a half
    steps of `max_num_batched_tokens` tokens, 512Mi to 8Gi."""
    buffer_size: SizeOrShare | None = None
    """Host memory of each rank for KV that has no place in decode's cache yet, used when prefill cannot keep it: bytes
    (`2Gi`) or a share of the rank's KV cache (`10%`). 0: none. Default: 10%, 1 GiB at most. With mode `get` prefill may
    keep as much more."""
    host_pool: Size = 0
    """Host memory of each rank that takes over when `bufferSize` is full; and as much more for KV that prefill keeps.
    0: none."""
    checksum: Literal["enabled", "disabled"] = "enabled"
    """Whether decode checks a sum of every block that comes."""
    encryption: Literal["disabled", "enabled"] = "disabled"
    """Whether KV between hosts is encrypted and cannot be changed on its way, by the libcrypto in `engine.image`; an engine
    that has none does not start. `auto` takes `shm` or `tcp` then; `rdma` and `nccl` do not encrypt."""
    network: Literal["untrusted", "trusted"] = "untrusted"
    """What you say of the network between engines: `trusted` where nobody else can read or change what passes there
    (partition keys, IPsec or MACsec in the NIC). `xpyd check` warns of `rdma` and `nccl` in another one."""
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    """When KV cannot be loaded: decode computes it again, or the request fails."""
    load_limit: Duration = "10m"
    """Longest time that decode waits for the KV of one prompt after prefill has announced it, while prefill makes progress:
    blocks arrive, prompt tokens are computed, or others are served before it. Without progress it waits 30 s."""
    shared_memory: SharedMemory | None = None
    """Shared memory between pods of one node; transport `shm` needs it in Kubernetes."""
    offload: Offload | None = None
    """Where prefixes are kept that have no place in an engine's cache any more. Default: nowhere."""
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the answers with KV from prefill whose first token decode computes again without it, beside the client's
    request and only while there is room, e.g. `0.01`; what differs is counted by pair of instances. 0: none."""

    @property
    def keep_bytes(self) -> int | None:
        """Bytes, where they are stated."""
        return None if self.keep is None else size(self.keep)

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes of the buffer, where they are stated."""
        return None if self.buffer_size is None or self.buffer_share is not None else size(self.buffer_size)

    @property
    def buffer_share(self) -> float | None:
        """Its share of a rank's KV cache, where that is stated."""
        percent = str(self.buffer_size)
        return size_of_share(percent, 100) / 100 if percent.endswith("%") else None

    @property
    def load_limit_s(self) -> float:
        """Seconds."""
        return seconds(self.load_limit)

    @property
    def host_pool_bytes(self) -> int:
        """Bytes."""
        return size(self.host_pool)
