"""Workers of vLLM leave device memory to the connector: taken off what they say is free. Real wrapper, no device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.worker_base import WorkerWrapperBase

from xpyd_sidecar.contract.launch import KvOptions, kv_transfer_config
from xpyd_sidecar.engine.compat import device_room as compat_room
from xpyd_sidecar.engine.worker import device_room
from xpyd_sidecar.engine.worker.device_landing import THROUGH_BYTES
from xpyd_sidecar.engine.worker.memory_sizes import RING_LEAST, RING_MOST, ROUNDS, SLAB_LEAST
from xpyd_sidecar.engine.worker.nccl_setup import most_bytes

FREE = 60 << 30
STEP = 8192 * 36 * 4096
"""Bytes of KV of a step: 8,192 tokens of 36 layers."""
OURS = STEP // ROUNDS + RING_MOST + THROUGH_BYTES
"""What copies of such steps pass through."""
THEIRS = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {}}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(WorkerWrapperBase, "determine_available_memory", None, raising=False)
    monkeypatch.setattr(compat_room, "_left", [])
    compat_room.leave(device_room.device_bytes)
    yield
    monkeypatch.undo()
    assert "determine_available_memory" not in vars(WorkerWrapperBase)


def wrapper(transfer: dict[str, Any] | None, *, device: str = "cuda", stated: int | None = None) -> Any:
    """What vLLM's executors call, around a worker that has measured."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = SimpleNamespace(
        kv_transfer_config=None if transfer is None else SimpleNamespace(**transfer),
        device_config=SimpleNamespace(device_type=device), cache_config=SimpleNamespace(kv_cache_memory_bytes=stated),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192))
    made = WorkerWrapperBase()
    made.worker = SimpleNamespace(vllm_config=config, determine_available_memory=lambda: FREE,
                                  get_kv_cache_spec=lambda: {f"layer{n}": spec for n in range(36)})
    return made


def test_executors_ask_the_wrapper_of_each_worker() -> None:
    assert 'collective_rpc("determine_available_memory")' in inspect.getsource(Executor.determine_available_memory)
    assert "def __getattr__" in inspect.getsource(WorkerWrapperBase), "which has no answer of its own"


@pytest.mark.parametrize("beside", [(), (THEIRS,)], ids=["alone", "beside another"])
def test_what_the_connector_takes_is_left(beside: tuple[Any, ...]) -> None:
    transfer = kv_transfer_config(KvOptions(transport="tcp"), "recompute", beside)
    assert FREE - wrapper(transfer).determine_available_memory() == OURS
    assert compat_room.device_bytes_left() == OURS


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm", "rdma", "nccl"])
def test_nccl_is_counted_where_it_is_the_link(transport: Literal["auto", "tcp", "shm", "rdma", "nccl"]) -> None:
    options = KvOptions(transport=transport)
    left = FREE - wrapper(kv_transfer_config(options, "recompute")).determine_available_memory()
    assert left == OURS + (most_bytes(options) if transport == "nccl" else 0)


@pytest.mark.parametrize("given", [
    {"transfer": None}, {"transfer": THEIRS}, {"transfer": kv_transfer_config(KvOptions(), "recompute"), "device": "cpu"},
    {"transfer": kv_transfer_config(KvOptions(), "recompute"), "stated": 1 << 30},
], ids=["no connector", "another one", "no device", "a size in bytes was stated"])
def test_nothing_is_left_to_who_needs_nothing(given: dict[str, Any]) -> None:
    assert wrapper(**given).determine_available_memory() == FREE
    assert compat_room.device_bytes_left() == 0


def test_a_size_that_vllm_remembers_of_an_earlier_start_leaves_as_much() -> None:
    made = wrapper(kv_transfer_config(KvOptions(transport="tcp"), "recompute"))

    def remembered() -> int:
        made.worker.vllm_config.cache_config.kv_cache_memory_bytes = FREE
        return FREE

    made.worker.determine_available_memory = remembered
    assert FREE - made.determine_available_memory() == OURS


def test_wrong_settings_are_left_to_the_connector() -> None:
    transfer = kv_transfer_config(KvOptions(), "recompute")
    transfer["kv_connector_extra_config"]["xpyd"]["keepbytes"] = 1
    assert wrapper(transfer).determine_available_memory() == FREE


def test_small_steps_leave_the_least() -> None:
    assert device_room.device_bytes({"xpyd": {"transport": "tcp"}}, 1) == SLAB_LEAST + RING_LEAST + THROUGH_BYTES
