"""vLLM 0.33: what is not as in 0.32. Names that this module only hands on stand at the same place in both versions.

    connector   ``supports_sleep_mode`` (answered False), ``unregister_kv_caches``, ``restore_kv_caches``
    wake-up     tells the workers' addresses once more, although they are as before
    hooks       Runner V2 with a draft calls ``wait_for_save`` after what ends a step, not before it
    engine core ``EngineCoreProc.resume_scheduler`` also lets new requests in again, which ``pause_generation`` turned away

``tests/component/test_engine_versions.py`` holds this list against the sources of both.
"""

from __future__ import annotations

from typing import Final

from xpyd_sidecar.engine.compat.v032 import (
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
    "KV_ABI", "CacheHitSource", "KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata",
    "KVConnectorPromMetrics", "KVConnectorRole", "KVConnectorStats", "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata", "SupportsHMA", "cache_groups", "check_model", "create_metric_per_engine",
    "instruction_set", "kv_heads", "layer_groups", "rest_while", "states",
]

KV_ABI: Final = {"0.33.0": "0.33.0"}
"""As in ``v032``. 0.32 has another name: decision 0042 says which differences of their sources speak against one."""
