"""Collects what KV bytes of this engine depend on (``contract.fingerprint``)."""

from __future__ import annotations

from typing import Any

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.weights import model_hash


def collect(config: Any, states: str = "") -> FingerprintFields:
    """The fields of this engine, equal on all its ranks. ``states``: what its states keep."""
    cache, dtype = config.cache_config, str(config.model_config.dtype).removeprefix("torch.")
    return FingerprintFields(
        model=model_hash(*compat.model_files(config), compat.model_text(config)),
        dtype=dtype,
        kv_dtype=compat.kv_dtype(config),
        block_size=int(cache.block_size),
        layout=compat.kv_layout(config),
        isa=compat.instruction_set(config),
        kv_abi=compat.kv_abi(),
        states=states,
    )
