"""What vLLM says of each layer's blocks, of every version known here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs


def layer_specs(groups: Iterable[Any]) -> dict[str, Any]:
    """By layer, over vLLM's groups of layers: a group's layers have one spec together, or one each."""
    found: dict[str, Any] = {}
    for group in groups:
        spec = group.kv_cache_spec
        found |= {name: spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
                  for name in group.layer_names}
    return found
