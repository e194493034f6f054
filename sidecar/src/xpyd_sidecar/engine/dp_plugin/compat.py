"""Everything that step sync uses of vLLM's engine core, and the sources it was written for.

The rules replace methods of a class that is not meant for it. So the sources of these methods, and of those around them
whose order matters, are pinned by hash for each version (``PINNED``): for any other the rules are not used, which is
known before a model is loaded.

    0.32 → 0.33, what differs                                     and why the rules hold
    add_request, run_busy_loop, _has_global_unfinished_reqs       replaced: engines alone start waves now, ours start none
    _process_input_queue, _process_engine_step, run_engine_core   feed a watchdog, also where the rules call them
    _handle_client_request, pause_generation                      turn requests away while paused; the rules call both
    resume_scheduler                                              lets them in again: the rules call that of EngineCoreProc
    wake_up                                                       tells the connector its workers again, which it takes once
    __init__, _initialize_kv_caches                               groups and layout are settled before; signatures are equal

Whoever adds a version reads every method that differs, and runs ``tests/component/test_dp_by_hand.py`` with its sources.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import core as _core
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import common
from xpyd_sidecar.engine.compat.sources import differing, hashes
from xpyd_sidecar.errors import ConfigError

__all__ = ["DPEngineCoreProc", "EngineCore", "EngineCoreProc", "EngineCoreRequestType", "check_sources",
           "impossible", "refusal", "sources", "unusable"]

V032: Final[dict[str, str]] = {
    "EngineCore.__init__": "cf8e963034c9c0cd",
    "EngineCore._initialize_kv_caches": "2aed21a67e1d6cb9",
    "EngineCore.step": "a4d753d3ba6a6d76",
    "EngineCore.step_with_batch_queue": "c2a1f9e6af2f5855",
    "EngineCore.execute_dummy_batch": "e2ef7706a119fb9f",
    "EngineCore.resume_scheduler": "08c119d3298fd7f7",
    "EngineCore.sleep": "0edf4705a69264c2",
    "EngineCore.wake_up": "3c42d2d0f66ef6ba",
    "EngineCoreProc.__init__": "680a07a7ed4a2aa1",
    "EngineCoreProc.run_engine_core": "4bdeb1ad0102630b",
    "EngineCoreProc.has_work": "738131600c84bbaa",
    "EngineCoreProc.is_running": "391622db2a14b4ae",
    "EngineCoreProc._process_input_queue": "877492857a426bb0",
    "EngineCoreProc._process_engine_step": "f6ca3103209eb7d5",
    "EngineCoreProc._notify_idle_state_callbacks": "c30730f44660d336",
    "EngineCoreProc._handle_shutdown": "d3071648edaac775",
    "EngineCoreProc._handle_client_request": "62d85392259ab99d",
    "EngineCoreProc._send_engine_dead": "a971b4c4f80105c1",
    "EngineCoreProc.pause_scheduler": "7121cb705f10d63d",
    "EngineCoreProc._pause_complete": "4b2eabeb276424aa",
    "EngineCoreProc._maybe_publish_request_counts": "f4ef1468574032c4",
    "DPEngineCoreProc.__init__": "ca4123a2058430c5",
    "DPEngineCoreProc._init_data_parallel": "47948f33547a8550",
    "DPEngineCoreProc._pause_complete": "e62e7248116a0117",
    "DPEngineCoreProc.add_request": "32f6ef1d99fb3443",
    "DPEngineCoreProc.resume_scheduler": "5a6c5640cc0f82c8",
    "DPEngineCoreProc._handle_client_request": "38afc3364fe52c75",
    "DPEngineCoreProc._maybe_publish_request_counts": "fc640e2008ff8c36",
    "DPEngineCoreProc._should_throttle_prefills": "8189e037708e13d8",
    "DPEngineCoreProc.run_busy_loop": "721172524dbf4c15",
    "DPEngineCoreProc._has_global_unfinished_reqs": "c89b708185aad16f",
    "DPEngineCoreProc.reinitialize_distributed": "60f42e5eb7a9e008",
}
V033: Final[dict[str, str]] = {
    **V032,
    "EngineCore.__init__": "7a444546ac062d29",
    "EngineCore._initialize_kv_caches": "8f59d6327c50635d",
    "EngineCore.wake_up": "317882299daa802c",
    "EngineCoreProc.__init__": "7864a68b6ac9240a",
    "EngineCoreProc.run_engine_core": "52ffa13b495e0b02",
    "EngineCoreProc._process_input_queue": "c78526e58fbfd219",
    "EngineCoreProc._process_engine_step": "203aacb4b8ce6a54",
    "EngineCoreProc._handle_client_request": "da2d6072f135e506",
    "DPEngineCoreProc.add_request": "71fecb57dd4a7eea",
    "DPEngineCoreProc.run_busy_loop": "0b22c5c62730d788",
    "DPEngineCoreProc._has_global_unfinished_reqs": "97a015775b332491",
    "EngineCoreProc.pause_generation": "8c922176d5fffce1",
    "EngineCoreProc.resume_scheduler": "4fcba295aeedfaba",
    "EngineCoreProc._reject_add_while_paused": "c3bcfbbc49694bed",
}
PINNED: Final[dict[str, dict[str, str]]] = {"v032": V032, "v033": V033}
"""By the module that knows the version (``engine.compat``)."""


def check_sources() -> None:
    """Refuse another vLLM; ``auto`` takes that for a reason to leave it alone (``register``).

    Raises:
        ConfigError: names the version, or the methods that differ.
    """
    differ = differing(_core, PINNED[common.module()])
    if differ:
        raise ConfigError(f"XPYD_DP_SYNC: vLLM {compat.version()} is not the one that step sync was written for: "
                          f"{', '.join(differ)} of vllm/v1/engine/core.py differ; "
                          "with auto or disabled vLLM keeps the ranks in step")


def sources() -> dict[str, str]:
    """The hash of every method in the module of vLLM's engine core, by ``Class.method``."""
    return {name: digest for name, digest in hashes(_core).items() if "." in name}


def unusable(engine: Any, config: Any) -> str:
    """Why there is nothing to keep in step in this engine; empty where there is."""
    parallel = config.parallel_config
    if isinstance(engine, DPEngineCoreProc):
        return ""
    if not config.model_config.is_moe:
        return "the model is dense: its data-parallel ranks do not run in step"
    return f"data_parallel_size is {parallel.data_parallel_size}: there is only one rank"


def impossible(config: Any) -> str:
    """Why this vLLM cannot run ranks that share experts at all, by whatever scheme; empty where it can."""
    if config.device_config.device_type != "cpu" or "all_gatherv" in CpuCommunicator.__dict__:
        return ""
    return "vLLM for CPUs has no collectives for ranks that share experts (all_gatherv); use GPUs, or one rank"


def refusal(engine: Any, config: Any) -> str:
    """Why the rules cannot be used with these settings of vLLM; empty where they can."""
    parallel = config.parallel_config
    transfer = config.ec_transfer_config
    reasons = {
        "enable_elastic_ep: ranks that come and go are not known to the rules": parallel.enable_elastic_ep,
        "enable_fault_tolerance: a rank that starts its loop again would not be in step":
            parallel.enable_fault_tolerance,
        "distributed_executor_backend external_launcher: there is no engine core to keep in step":
            parallel.distributed_executor_backend == "external_launcher",
        "data_parallel_backend ray: its engine cores were never tried": parallel.data_parallel_backend == "ray",
        "encoder-only engines run no forward of the model": config.is_mm_encoder_only,
        "engines that only encode run no forward of the model": transfer is not None and transfer.is_encode_only,
        "without vLLM's coordinator (offline, one front end per rank) ranks would not wait for each other's requests":
            not engine.has_coordinator,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)
