"""Everything that is used of vLLM's executor and its queue, and the sources that this was fitted to (``PINNED``).

    0.32 → 0.33, what differs                            and why the queue fits both
    _init_executor                                       starts workers by threads; the order of the queues is as before
    collective_rpc, enqueue_output                       a failure may carry KV reports: pickled like every answer
    worker_main, worker_busy_loop, _execute_worker_rpc,  feed a watchdog, which is off while the next call is waited for
    monitor_death_pipe

Whoever adds a version reads every one that differs, and runs ``tests/component/test_executor_queue.py`` with its sources.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils.network_utils import get_ip
from vllm.v1.executor import multiproc_executor

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import common, sources
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
V032: Final[dict[str, dict[str, str]]] = {
    "shm_broadcast": {
        "Handle": "06d74131adb2ffb4",
        "_reduce_tensor": "2e64c4db2000b6e9",
        "_rebuild_tensor": "d7296b4279a40ea3",
        "MessageQueue.__init__": "e6662bae6c38e600",
        "MessageQueue.export_handle": "243deb19c2c302bb",
        "MessageQueue.create_from_handle": "7f31125f892c719d",
        "MessageQueue.wait_until_ready": "c2f335e3261b82e2",
        "MessageQueue.shutdown": "8458e9a175e01481",
        "MessageQueue.enqueue": "9b37f36ff7ac94eb",
        "MessageQueue.dequeue": "1ec2d06145d2d420",
        "MessageQueue.recv": "a373cdc4a294c2d2",
        "MessageQueue.broadcast_object": "2ce2941bec50b581",
        "MessageQueue.create_from_process_group_single_reader": "16ee0b227996b8a6",
        "MessageQueue.create_from_process_group": "0bb6aafd352a7226",
    },
    "multiproc_executor": {
        "FutureWrapper": "1f5a235e45dbad7f",
        "MultiprocExecutor._init_executor": "cc1d7f67bdccec29",
        "MultiprocExecutor.get_response_mqs": "39fb7a9a6a9043ca",
        "MultiprocExecutor.start_worker_monitor": "5909c4ca805b5328",
        "MultiprocExecutor.register_failure_callback": "a3c3eb08ebe1ced4",
        "MultiprocExecutor.execute_model": "bd61b46ad0428391",
        "MultiprocExecutor.sample_tokens": "0df7b043309b6383",
        "MultiprocExecutor.collective_rpc": "1b819a63eae189b5",
        "MultiprocExecutor.shutdown": "02b2f6225b56fd1b",
        "MultiprocExecutor.check_health": "ff62d6f43e2e9422",
        "WorkerProcHandle": "6304504d6bfcff18",
        "WorkerProc._init_message_queues": "84d37926af4e378c",
        "WorkerProc.__init__": "bce8a325b59df784",
        "WorkerProc.make_worker_process": "46233dfa0940209d",
        "WorkerProc.wait_for_response_handle_ready": "c1c36587708bc87c",
        "WorkerProc.wait_for_ready": "51951d693744bd7d",
        "WorkerProc.shutdown": "0dfa0a92efbbddb9",
        "WorkerProc.monitor_death_pipe": "0a28095edf6b81ff",
        "WorkerProc.worker_main": "c7cab3876eec6986",
        "WorkerProc.enqueue_output": "dbaef69b645741a1",
        "WorkerProc.handle_output": "2d7025254aaec0da",
        "WorkerProc.async_output_busy_loop": "7a961b8ae8d48243",
        "WorkerProc.worker_busy_loop": "086e89cbe2dcfb8f",
        "WorkerProc._execute_worker_rpc": "56041959ea444851",
    },
    "parallel_state": {
        "GroupCoordinator.create_mq_broadcaster": "6e840d15e7338698",
        "GroupCoordinator.create_single_reader_mq_broadcasters": "51ad5a412ff87e97",
        "GroupCoordinator.broadcast_object": "71680f80e99c7788",
        "GroupCoordinator.destroy": "ab10d042e8eb18fe",
        "in_the_same_node_as": "e641d8d2bef0c84f",
    },
}
V033: Final[dict[str, dict[str, str]]] = {
    "shm_broadcast": V032["shm_broadcast"],
    "multiproc_executor": {
        **V032["multiproc_executor"],
        "MultiprocExecutor._init_executor": "f8e3e3e364cd6060",
        "MultiprocExecutor.collective_rpc": "8d6bb6ff856209dc",
        "WorkerProc.monitor_death_pipe": "5b2cfe14f4d5e515",
        "WorkerProc.worker_main": "c0accbdd80448beb",
        "WorkerProc.enqueue_output": "d98b0234b92bf717",
        "WorkerProc.worker_busy_loop": "fe5349e1f85fdaae",
        "WorkerProc._execute_worker_rpc": "bc966fa241879bac",
    },
    "parallel_state": V032["parallel_state"],
}
PINNED: Final[dict[str, dict[str, dict[str, str]]]] = {"v032": V032, "v033": V033}
"""By the module that knows the version (``engine.compat``), by vLLM's module (``MODULES``), and by name: hashes of
vLLM's methods, classes and functions."""


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
