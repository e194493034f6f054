"""Everything of vLLM that xpyd uses, in one place: these are internals, and another version may move them.

    common       what every version known here has alike
    drafting     speculative decoding, of every version known here
    adapters     LoRA adapters of an API server, likewise
    device_room  device memory that workers leave to the connector, likewise
    v032         0.32: its classes, and what hangs on its internals
    v033         0.33: what is not as in 0.32

The module of the installed version is chosen here, before anything of vLLM is imported but its version: a version that no
module knows is refused by name, and never met by an import that fails. Modules of versions have the same names.
"""

from __future__ import annotations

from typing import Any

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.engine.compat import common
from xpyd_sidecar.engine.compat.common import (
    NO_SLEEP,
    answer_once,
    backoff,
    block_key,
    cached_keys,
    cached_tokens,
    check_version,
    common_id,
    cut_prompt,
    dp_rank,
    hashed_tokens,
    kv_dtype,
    kv_layout,
    log_like_vllm,
    make_known,
    max_model_len,
    micro_batches,
    model_files,
    model_text,
    outer_transfer,
    rank_of,
    ranks_here,
    reads_no_cache,
    sampling,
    show_cached,
    show_own_cached,
    sizes,
    step_tokens,
    version,
    weight_version,
)
from xpyd_sidecar.engine.weights import model_hash

if common.module() == "v032":
    from xpyd_sidecar.engine.compat.v032 import (
        KV_ABI,
        CacheHitSource,
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorPromMetrics,
        KVConnectorRole,
        KVConnectorStats,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
        cache_groups,
        check_model,
        create_metric_per_engine,
        instruction_set,
        kv_heads,
        layer_groups,
        rest_while,
        states,
    )
else:
    from xpyd_sidecar.engine.compat.v033 import (
        KV_ABI,
        CacheHitSource,
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorPromMetrics,
        KVConnectorRole,
        KVConnectorStats,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
        cache_groups,
        check_model,
        create_metric_per_engine,
        instruction_set,
        kv_heads,
        layer_groups,
        rest_while,
        states,
    )

__all__ = [
    "KV_ABI",
    "NO_SLEEP",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "answer_once",
    "backoff",
    "block_key",
    "cache_groups",
    "cached_keys",
    "cached_tokens",
    "check_model",
    "check_version",
    "common_id",
    "create_metric_per_engine",
    "cut_prompt",
    "dp_rank",
    "fingerprint",
    "hashed_tokens",
    "instruction_set",
    "kv_abi",
    "kv_dtype",
    "kv_heads",
    "kv_layout",
    "layer_groups",
    "log_like_vllm",
    "make_known",
    "max_model_len",
    "micro_batches",
    "model_files",
    "model_text",
    "outer_transfer",
    "rank_of",
    "ranks_here",
    "reads_no_cache",
    "rest_while",
    "sampling",
    "show_cached",
    "show_own_cached",
    "sizes",
    "states",
    "step_tokens",
    "version",
    "weight_version",
]


def kv_abi() -> str:
    """How the vLLM that runs writes KV: what its module says of this exact version, else the version itself."""
    return KV_ABI.get(version(), version())


def fingerprint(config: Any, states: str = "") -> FingerprintFields:
    """What KV bytes of this engine depend on, equal on all its ranks. ``states``: what its states keep."""
    return FingerprintFields(
        model=model_hash(*model_files(config), model_text(config)),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        kv_dtype=kv_dtype(config),
        block_size=int(config.cache_config.block_size),
        layout=kv_layout(config),
        isa=instruction_set(config),
        kv_abi=kv_abi(),
        states=states,
    )
