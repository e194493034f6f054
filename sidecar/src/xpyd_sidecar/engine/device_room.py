"""How much device memory vLLM leaves to the connector: for what copies pass through, and for NCCL where it is the link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.device_landing import THROUGH_BYTES
from xpyd_sidecar.engine.memory_sizes import RING_MOST, SLAB_MOST, ring_bytes, slab_bytes
from xpyd_sidecar.engine.nccl_setup import most_bytes


def beside(options: KvOptions) -> int:
    """What is neither slab nor ring: what leaves the lookup buffer, and what NCCL takes where it is the link."""
    return THROUGH_BYTES + (most_bytes(options) if options.transport == "nccl" else 0)


def room(extra: Mapping[str, Any], step: int) -> int:
    """Bytes of the device for a rank whose steps bring so many bytes of KV. Settings that are wrong need none: the
    connector refuses them with better words.
    """
    try:
        options = msgspec.convert(extra.get("xpyd", {}), KvOptions)
    except msgspec.ValidationError:
        return 0
    return slab_bytes(step, SLAB_MOST) + ring_bytes(step, RING_MOST) + beside(options)
