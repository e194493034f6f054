"""Everything of vLLM that xpyd uses, in one place: these are internals, and another version may move them.

    common       what every version known here has alike
    cache_specs  what is said of each layer's blocks, of every version known here
    drafting     speculative decoding, likewise
    device_room  device memory that workers leave to the connector, likewise
    v032         0.32: its classes, and what hangs on its internals
    v033         0.33: what is not as in 0.32

The module of the installed version is chosen here, before anything of vLLM is imported but its version: a version that no
module knows is refused by name, and never met by an import that fails. Modules of versions have the same names.
"""

from __future__ import annotations

from xpyd_sidecar.engine.compat import common
from xpyd_sidecar.engine.compat.common import (
    NO_SLEEP,
    answer_once,
    backoff,
    cached_tokens,
    check_version,
    common_id,
    cut_prompt,
    dp_rank,
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
)

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
    "cache_groups",
    "cached_tokens",
    "check_model",
    "check_version",
    "common_id",
    "create_metric_per_engine",
    "cut_prompt",
    "dp_rank",
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
]


def kv_abi() -> str:
    """How the vLLM that runs writes KV: what its module says of this exact version, else the version itself."""
    return KV_ABI.get(version(), version())
