"""vLLM's offloading to host memory on CPUs: all of it but the copies, which it makes with CUDA alone.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"spec_name": "OffloadOnCpu", "spec_module_path": "offload_on_cpu", "cpu_bytes_to_use": 64 << 20}}

What is vLLM's: the connector, its scheduler and worker sides, what is looked up, saved, evicted and waited for. What is
ours: a worker that copies between two tensors of host memory. As on a GPU, where a stream of its own does it, a copy comes
later than it was asked for: when its job is waited for, or two looks later.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LOOKS: Final = 2


class Copies(NamedTuple):
    """A job: blocks of the cache and of the store, of each group."""

    blocks: GPULoadStoreSpec
    stored: BlockIDsLoadStoreSpec
    to_store: bool


class HostCopies(OffloadingWorker):  # type: ignore[misc]  # (vLLM's, of which mypy knows nothing)
    """Copies between the cache and host memory."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int) -> None:
        self._caches = [one.tensor for one in caches.tensors]
        self._store = [torch.zeros(blocks, cache.shape[1], dtype=torch.int8) for cache in self._caches]
        self._refs: list[list[CanonicalKVCacheRef]] = caches.group_data_refs
        self._asked: dict[int, tuple[int, Copies]] = {}
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Into the store, later."""
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        self._asked[job_id] = (LOOKS, Copies(src_spec, dst_spec, to_store=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Out of the store, later."""
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        self._asked[job_id] = (LOOKS, Copies(dst_spec, src_spec, to_store=False))
        return True

    def get_finished(self) -> list[TransferResult]:
        """What is done by now."""
        for job, (looks, copies) in list(self._asked.items()):
            if looks:
                self._asked[job] = (looks - 1, copies)
            else:
                self._copy(job)
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do them now."""
        for job in job_ids & set(self._asked):
            self._copy(job)

    def _copy(self, job: int) -> None:
        _, copies = self._asked.pop(job)
        moved = 0
        for ref, block, place in self._pairs(copies):
            size = ref.page_size_bytes
            cached, stored = self._caches[ref.tensor_idx][block, :size], self._store[ref.tensor_idx][place, :size]
            (stored if copies.to_store else cached).copy_(cached if copies.to_store else stored)
            moved += size
        self._done.append(TransferResult(job, success=True, transfer_size=moved, transfer_time=1e-6))

    def _pairs(self, copies: Copies) -> Iterator[tuple[CanonicalKVCacheRef, int, int]]:
        """Each array of each group, a block in it, and where that is in the store."""
        pairs = zip(copies.blocks.block_ids, copies.stored.block_ids, strict=True)  # one each: blocks_per_chunk is 1
        for refs, count in zip(self._refs, copies.blocks.group_sizes, strict=True):
            for block, place in islice(pairs, count):
                for ref in refs:
                    yield ref, int(block), int(place)


class OffloadOnCpu(CPUOffloadingSpec):  # type: ignore[misc]  # (the same)
    """vLLM's, with the worker above."""

    _worker: HostCopies | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        """The one of this process."""
        self._worker = self._worker or HostCopies(kv_caches, self.num_chunks)
        return self._worker
