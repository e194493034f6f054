"""A role's vLLM server: arguments, environment and revision, without anything that only a backend knows.

Shared by pods and local processes. Where the server listens, its run folder, key and addresses are bound later (see
``processes`` for local ones).
"""

from __future__ import annotations

import math
import os

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Unsupported
from xpyd_operator.plan.desired import Revision, revision_of
from xpyd_operator.render import offload
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import (
    ENV_DP_SYNC,
    ENV_OPEN_PODS,
    ENV_QUEUE,
    KvOptions,
    kv_transfer_config,
)

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""vLLM's server with one front end. ``vllm serve`` does not run in the build for CPUs, and starts a front end for each
data-parallel rank. No revision has it in it: what runs is not replaced for it (decision 0042)."""
PROBED = "/health,/metrics"
"""Asked by the agent every second; not worth a line in the log each time."""

CPU_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Defaults without a GPU. vLLM's own would pin the engines of a host to the same cores and give each 4 GiB for KV."""

RAY_ENV = {
    "RAY_ADDRESS": "local",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(128 << 20),
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
}
"""A Ray of its own for each engine, which nobody else reaches or joins.

``local`` starts one instead of joining whichever the host has. The variable with the odd name has it listen on the loopback
address, on ports that the kernel chooses. vLLM's newer executor works with that: it sends steps through shared memory, so
Ray only starts the workers, and a small object store is enough. Logs are bounded. Ray's own watch over the host's memory is
off: it would kill a worker for what others use. Workers keep the engine's priority; Ray would lower it. Its processes,
and so the workers, inherit the engine's environment.
"""
RAY_OWNED = frozenset((*RAY_ENV, "RAY_TMPDIR"))
"""What ``executor_env`` sets for Ray."""
RAY_FOLDER_MAX = 107 - len("/ray/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store")
"""A Unix socket's path has at most 107 bytes."""


def engine_args(service: DisaggService, role: Role, model: str, shared: str = "", life: str = "") -> tuple[str, ...]:
    """Arguments of the server but for host and port. ``model`` is a hub id, or a path as the engine sees it; ``shared``: a
    folder that all engines of a host share; ``life``: the name of the engine that all its ranks have, where vLLM is not to
    give each process another one.

    xpyd's own come first and the user's last; the user's are known not to touch them (``api.owned``).
    """
    spec = service.spec
    parallel = spec.role(role).parallelism
    args = ["--model", model, "--served-model-name", service.served_name]
    if spec.model.revision is not None:
        args += ["--revision", spec.model.revision]
    args += ["--tensor-parallel-size", str(parallel.tensor)]
    if parallel.pipeline > 1:
        args += ["--pipeline-parallel-size", str(parallel.pipeline)]
    if parallel.data > 1:
        args += ["--data-parallel-size", str(parallel.data)]
    if parallel.executor is not None:
        args += ["--distributed-executor-backend", parallel.executor]
    config = kv_transfer_config(kv_options(service, shared), spec.kv.on_load_failure, offload.beside(service, role))
    if life:
        config["engine_id"] = life
    args += ["--kv-transfer-config", msgspec.json.encode(config).decode()]
    args += ["--disable-access-log-for-endpoints", PROBED]
    return (*args, *spec.engine.args, *spec.role(role).args)


def shutdown_args(service: DisaggService) -> tuple[str, ...]:
    """How long the server lets requests run on after SIGTERM, which backs up the drain before it.

    Apart from ``engine_args``, since a changed drain timeout is no reason to replace an engine.
    """
    return ("--shutdown-timeout", str(math.ceil(service.spec.drain.timeout_s)))


def engine_env(service: DisaggService) -> dict[str, str]:
    """The environment that the user gave, literal values only."""
    return {variable.name: variable.value or "" for variable in service.spec.engine.env if variable.value_from is None}


def executor_env(service: DisaggService, role: Role, folder: str) -> dict[str, str]:
    """What the executor of a role needs, which the user's variables must not change; nothing but for Ray.

    ``folder``: for the files and sockets of this engine alone.

    Raises:
        Unsupported: its path is too long for sockets.
    """
    if service.spec.role(role).parallelism.executor != "ray":
        return {}
    if len(os.fsencode(folder)) > RAY_FOLDER_MAX:
        reason = f"ray's sockets need a folder of at most {RAY_FOLDER_MAX} bytes, not {folder}; set TMPDIR to a short one"
        raise Unsupported(f"spec.{role}.parallelism.executor", reason)
    return RAY_ENV | {"RAY_TMPDIR": folder}


def kv_options(service: DisaggService, shared: str = "") -> KvOptions:
    """The connector's settings."""
    kv = service.spec.kv
    return KvOptions(transport=kv.transport, shared_folder=shared, mode=kv.mode, checksum=kv.checksum,
                     encryption=kv.encryption, keep_bytes=kv.keep_bytes, buffer_bytes=kv.buffer_bytes,
                     buffer_share=kv.buffer_share, host_pool_bytes=kv.host_pool_bytes, load_limit_s=kv.load_limit_s)


def engine_revision(service: DisaggService, role: Role, model: str) -> Revision:
    """Changes with everything that an engine must be restarted for, and with nothing else.

    The role itself is left out: engines run as ``kv_both``, so equal roles can switch.
    """
    env = engine_env(service) | dp_env(service, role) | queue_env(service, role)
    pods = service.spec.role(role).parallelism.pods
    more = {"pods": pods} if pods > 1 else {}
    return revision_of({"args": engine_args(service, role, model), "env": env} | more)


def dp_env(service: DisaggService, role: Role) -> dict[str, str]:
    """The environment of a role's engine; nothing for a role of one rank, so that its revision stays what it was."""
    if service.spec.role(role).parallelism.data == 1:
        return {}
    return {ENV_DP_SYNC: service.spec.engine.dp_step_sync}


def queue_env(service: DisaggService, role: Role) -> dict[str, str]:
    """What has a role's engine use xpyd's queue to its workers; nothing where it uses vLLM's, or has but one."""
    parallel, word = service.spec.role(role).parallelism, service.spec.engine.queue
    if word == "auto":
        word = "xpyd" if parallel.pods > 1 else "vllm"
    return {ENV_QUEUE: word} if word == "xpyd" and parallel.tensor * parallel.pipeline > 1 else {}


def open_env(service: DisaggService, role: Role) -> dict[str, str]:
    """What lets an engine of several pods start although nobody asks who calls its workers. Apart from ``queue_env``, since
    it is no reason to replace an engine that has started.
    """
    allowed = service.spec.network_policy.allow_open_pods and service.spec.role(role).parallelism.pods > 1
    return {ENV_OPEN_PODS: "1"} if allowed else {}


def step_sync(service: DisaggService) -> str | None:
    """How data-parallel ranks are kept in step, for the status; None where no role has several."""
    ranks = (service.spec.prefill.parallelism.data, service.spec.decode.parallelism.data)
    return service.spec.engine.dp_step_sync if max(ranks) > 1 else None
