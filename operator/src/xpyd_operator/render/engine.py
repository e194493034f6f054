"""A role's vLLM server: arguments, environment and revision, without anything that only a backend knows.

Shared by pods and local processes. Where the server listens, its run folder, key and addresses are bound later (see
``processes`` for local ones).
"""

from __future__ import annotations

import math

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import Revision, revision_of
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import KvOptions, kv_transfer_config

MODULE = "vllm.entrypoints.openai.api_server"
PROBED = "/health,/metrics"
"""Asked by the agent every second; not worth a line in the log each time."""

CPU_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Defaults without a GPU. vLLM's own would pin the engines of a host to the same cores and give each 4 GiB for KV."""


def engine_args(service: DisaggService, role: Role, model: str) -> tuple[str, ...]:
    """Arguments of the server but for host and port. ``model`` is a hub id, or a path as the engine sees it.

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
    config = kv_transfer_config(kv_options(service), spec.kv.on_load_failure)
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


def kv_options(service: DisaggService) -> KvOptions:
    """The connector's settings."""
    kv = service.spec.kv
    return KvOptions(transport=kv.transport, mode=kv.mode, checksum=kv.checksum)


def engine_revision(service: DisaggService, role: Role, model: str) -> Revision:
    """Changes with everything that an engine must be restarted for, and with nothing else.

    The role itself is left out: engines run as ``kv_both``, so equal roles can switch.
    """
    return revision_of({"args": engine_args(service, role, model), "env": engine_env(service)})
