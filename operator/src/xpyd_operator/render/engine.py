"""A role's vLLM server: arguments, environment and revision, without anything that only a backend knows.

Shared by pods and local processes. Where the server listens, its run folder, key and addresses are bound later (see
``processes`` for local ones).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from xpyd_operator.api.service import ENABLE_ADAPTERS, DisaggService
from xpyd_operator.plan.desired import Revision, revision_of
from xpyd_operator.render import offload
from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.adapters import Adapter, AdapterOrder
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import ENV_DP_SYNC, ENV_QUEUE, KvOptions, kv_transfer_config

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""vLLM's server with one front end. ``vllm serve`` does not run in the build for CPUs, and starts a front end for each
data-parallel rank. No revision has it in it: what runs is not replaced for it (decision 0042)."""
PROBED = "/health,/metrics"
"""Asked by the agent every second; not worth a line in the log each time."""

ON_LOAD_FAILURE: Final = "recompute"
"""Where KV cannot be loaded, decode computes the prompt itself: that is an answer, though a later one."""
DP_SYNC: Final = "auto"
"""How data-parallel ranks agree on the next step: through shared memory where they share a host, else by RPC."""
ADAPTER_MIDDLEWARE: Final = "xpyd_sidecar.engine.adapter_serving.AdapterMiddleware"
CPU_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Defaults without a GPU. vLLM's own would pin the engines of a host to the same cores and give each 4 GiB for KV."""

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
    config = kv_transfer_config(kv_options(service, shared), ON_LOAD_FAILURE, offload.offload_connectors(service, role))
    if life:
        config["engine_id"] = life
    args += ["--kv-transfer-config", msgspec.json.encode(config).decode()]
    if spec.takes_adapters(role):
        args += ["--middleware", ADAPTER_MIDDLEWARE]
        args += [] if ENABLE_ADAPTERS in (*spec.engine.args, *spec.role(role).args) else [ENABLE_ADAPTERS]
    args += ["--disable-access-log-for-endpoints", PROBED]
    return (*args, *spec.engine.args, *spec.role(role).args)


def adapter_order(service: DisaggService) -> AdapterOrder:
    """What agents are told of the document's adapters.

    Raises:
        ValueError: there are too many; ``api.rules_adapters`` refuses it first.
    """
    return adapters.order_of(tuple(
        Adapter(each.name, each.source, each.revision or "") for each in service.spec.adapters))


def shutdown_args(service: DisaggService) -> tuple[str, ...]:
    """How long the server lets requests run on after SIGTERM, which backs up the drain before it.

    Apart from ``engine_args``, since a changed drain timeout is no reason to replace an engine.
    """
    return ("--shutdown-timeout", str(math.ceil(service.spec.drain.timeout_s)))


def engine_env(service: DisaggService) -> dict[str, str]:
    """The environment that the user gave, literal values only."""
    return {variable.name: variable.value or "" for variable in service.spec.engine.env if variable.value_from is None}


def kv_options(service: DisaggService, shared: str = "") -> KvOptions:
    """The connector's settings."""
    kv = service.spec.kv
    return KvOptions(transport=kv.transport, shared_folder=shared, mode=kv.mode, encryption=kv.engines_encrypt,
                     keep_bytes=kv.keep_bytes, buffer_bytes=kv.buffer_bytes)


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
    return {} if service.spec.role(role).parallelism.data == 1 else {ENV_DP_SYNC: DP_SYNC}


def queue_env(service: DisaggService, role: Role) -> dict[str, str]:
    """What has a role's engine use xpyd's queue to its workers: where calls go between pods, since it asks for the key of
    the service. On one host vLLM's own is as good (decision 0056).
    """
    parallel = service.spec.role(role).parallelism
    return {ENV_QUEUE: "xpyd"} if parallel.pods > 1 and parallel.tensor * parallel.pipeline > 1 else {}


def step_sync(service: DisaggService) -> str | None:
    """How data-parallel ranks are kept in step, for the status; None where no role has several."""
    ranks = (service.spec.prefill.parallelism.data, service.spec.decode.parallelism.data)
    return DP_SYNC if max(ranks) > 1 else None
