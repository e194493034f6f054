"""``spec.kv``: how KV goes from prefill to decode."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import Part, Size, SizeOrShare
from xpyd_operator.api.quantity import size, size_of_share

HostPath = Annotated[str, Meta(min_length=2, max_length=512, pattern=r"^/[^:]+$", extra={"kind": "path"})]


class SharedMemory(Part, frozen=True):
    """Shared memory between pods of one node."""

    host_path: HostPath
    """Folder of the node that engine pods mount, e.g. `/dev/shm`. It must be there, in memory, and writable for their user.
    Such pods are not `restricted` in the sense of the Pod Security Standards."""


class Kv(Part, frozen=True):
    """How KV goes from prefill to decode."""

    transport: Literal["auto", "tcp", "shm", "nccl"] = "auto"
    """Link for KV data: `tcp` works everywhere, `shm` on one host, `nccl` between GPUs (not built yet). `auto` takes `shm`
    where both sides can, else `tcp`."""
    mode: Literal["put_async", "put", "get"] = "put_async"
    """Prefill pushes beside its next steps (`put_async`), pushes before its step ends (`put`), or decode pulls (`get`)."""
    buffer_size: SizeOrShare | None = None
    """Device memory for KV that has no place in the cache yet: bytes (`2Gi`) or a share of the device (`10%`). Default: 10%
    on decode, none on prefill; with mode `get` 10% on both."""
    host_pool: Size = 0
    """Host memory that takes over when `bufferSize` is full. 0: none."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    """Checksum of every block that is sent."""
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    """When KV cannot be loaded: decode computes it again, or the request fails."""
    shared_memory: SharedMemory | None = None
    """Shared memory between pods of one node; transport `shm` needs it in Kubernetes."""

    def buffer_bytes(self, role: Literal["prefill", "decode"], device_bytes: int) -> int:
        """Bytes of the buffer on a device that has ``device_bytes``."""
        if self.buffer_size is None:
            return device_bytes // 10 if role == "decode" or self.mode == "get" else 0
        return size_of_share(self.buffer_size, device_bytes) if role == "decode" or self.mode == "get" else 0

    @property
    def host_pool_bytes(self) -> int:
        """Bytes."""
        return size(self.host_pool)
