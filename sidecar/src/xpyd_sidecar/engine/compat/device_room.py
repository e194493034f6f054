"""Device memory for others than vLLM: its workers are told to leave it, within ``--gpu-memory-utilization``.

A connector is made after workers have measured what is free for KV, and vLLM takes all of that. So what the connector will
take is taken off each worker's answer. A size of the cache that is stated in bytes stays as it is: whoever states it has
counted. Installed by vLLM's plugin, in every process, before there is a worker.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from xpyd_sidecar.contract.launch import CONNECTOR_CLASS
from xpyd_sidecar.engine.compat import common

logger = logging.getLogger(__name__)
Room = Callable[[Mapping[str, Any], int], int]
"""From the connector's settings and the bytes of KV that a step brings at most, the bytes that are to be left."""
_left: list[int] = []
"""In this process, which has one worker."""


def device_bytes_left() -> int:
    """Bytes of the device that vLLM has left to the connector in this process."""
    return _left[-1] if _left else 0


def leave(room: Room) -> None:
    """Have the worker of this process leave so much; for engines with our connector, on devices."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415 (not needed before there is a device)

    def determine_available_memory(self: Any) -> int:
        config = self.worker.vllm_config
        stated = config.cache_config.kv_cache_memory_bytes  # before vLLM takes it from its plan of an earlier start
        available = int(self.worker.determine_available_memory())
        extra = _settings(config.kv_transfer_config)
        if extra is None or config.device_config.device_type == "cpu" or stated:
            return available
        some = room(extra, step_bytes(config, self.worker.get_kv_cache_spec()))
        _left.append(some)
        common.log_like_vllm("xpyd_sidecar")
        logger.info("xpyd: %d MiB of what --gpu-memory-utilization allows are left for copies of KV", some >> 20)
        return available - some

    WorkerWrapperBase.determine_available_memory = determine_available_memory


def step_bytes(config: Any, specs: Mapping[str, Any]) -> int:
    """KV that a step brings at most, by what vLLM says of each layer."""
    each = sum(spec.page_size_bytes / spec.block_size for spec in specs.values())
    return math.ceil(int(config.scheduler_config.max_num_batched_tokens) * each)


def _settings(transfer: Any) -> Mapping[str, Any] | None:
    """Those of our connector, alone or inside of vLLM's MultiConnector; None: it is not there."""
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == CONNECTOR_CLASS:
        return dict(extra)
    held = [one for one in extra.get("connectors", ()) if one.get("kv_connector") == CONNECTOR_CLASS]
    return held[0].get("kv_connector_extra_config", {}) if held else None
