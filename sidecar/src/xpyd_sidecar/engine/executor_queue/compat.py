"""Everything that is used of vLLM's executor and its queue, and the sources that this was written for."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils.network_utils import get_ip
from vllm.v1.executor import multiproc_executor

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import common, sources
from xpyd_sidecar.engine.executor_queue.pins import PINNED
from xpyd_sidecar.errors import ConfigError

__all__ = ["MessageQueue", "MultiprocExecutor", "WorkerProc", "check_sources", "get_ip", "multiproc_executor",
           "reduce_tensor", "shm_broadcast"]

MODULES: Final[dict[str, ModuleType]] = {
    "shm_broadcast": shm_broadcast, "multiproc_executor": multiproc_executor, "parallel_state": parallel_state,
}
MessageQueue: Any = shm_broadcast.MessageQueue
"""VLLM's own."""
MultiprocExecutor: Any = multiproc_executor.MultiprocExecutor
WorkerProc: Any = multiproc_executor.WorkerProc
reduce_tensor: Any = shm_broadcast._reduce_tensor


def check_sources() -> None:
    """Refuse another vLLM.

    Raises:
        ConfigError: names the version, or what differs.
    """
    pinned = PINNED[common.module()]
    differ = {name: found for name, module in MODULES.items() if (found := sources.differing(module, pinned[name]))}
    if differ:
        words = "; ".join(f"{', '.join(names)} of {MODULES[name].__name__}" for name, names in differ.items())
        raise ConfigError(f"vLLM {compat.version()} is not the one that the broadcast queue was fitted to: {words} differ")
