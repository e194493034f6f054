"""How much device memory vLLM leaves to the connector: for what copies pass through, and for NCCL where it is the link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.worker.device_landing import THROUGH_BYTES
from xpyd_sidecar.engine.worker.memory_sizes import RING_MOST, SLAB_MOST, ring_bytes, slab_bytes
from xpyd_sidecar.engine.worker.nccl_setup import most_bytes


def extra_bytes(options: KvOptions) -> int:
    """Bytes of the device beside slab and ring: for what leaves the lookup buffer, and for NCCL where it is the link."""
    return THROUGH_BYTES + (most_bytes(options) if options.transport == "nccl" else 0)


def device_bytes(extra: Mapping[str, Any], step: int) -> int:
    """Bytes of the device that the connector needs on a rank whose steps bring ``step`` bytes of KV.

    0 where the settings are wrong: the connector refuses them later, with better words.
    """
    try:
        options = msgspec.convert(extra.get("xpyd", {}), KvOptions)
    except msgspec.ValidationError:
        return 0
    return slab_bytes(step, SLAB_MOST) + ring_bytes(step, RING_MOST) + extra_bytes(options)
