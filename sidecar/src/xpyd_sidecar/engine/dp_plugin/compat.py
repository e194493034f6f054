"""Everything that step sync uses of vLLM's engine core, and the sources it was written for.

The rules replace methods of a class that is not meant for it. So the sources of these methods, and of those around them
whose order matters, are pinned by hash for each version (``pins``): for any other the rules are not used, which is known
before a model is loaded.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import core as _core
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import common
from xpyd_sidecar.engine.compat.sources import differing, hashes
from xpyd_sidecar.engine.dp_plugin.pins import PINNED
from xpyd_sidecar.errors import ConfigError

__all__ = ["DPEngineCoreProc", "EngineCore", "EngineCoreProc", "EngineCoreRequestType", "check_sources",
           "impossible", "refusal", "sources", "unusable"]


def check_sources() -> None:
    """Refuse another vLLM; ``auto`` takes that for a reason to leave it alone (``register``).

    Raises:
        ConfigError: names the version, or the methods that differ.
    """
    differ = differing(_core, PINNED[common.module()])
    if differ:
        raise ConfigError(f"XPYD_DP_SYNC: vLLM {compat.version()} is not the one that step sync was written for: "
                          f"{', '.join(differ)} of vllm/v1/engine/core.py differ; "
                          "set spec.engine.dpStepSync to auto or disabled")


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
