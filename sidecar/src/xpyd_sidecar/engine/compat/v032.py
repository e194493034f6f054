"""vLLM 0.32: its classes, and what hangs on its internals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine

from xpyd_sidecar.engine.compat import common, drafting
from xpyd_sidecar.errors import ConfigError

__all__ = [
    "KV_ABI", "CacheHitSource", "KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata",
    "KVConnectorPromMetrics", "KVConnectorRole", "KVConnectorStats", "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata", "check_model", "create_metric_per_engine", "instruction_set", "kv_heads", "rest_while",
]

KV_ABI: Final = {"0.32.0": "0.32.0"}
"""How these exact versions write KV: the name of the first version that wrote it so.

Versions of one name exchange KV. Two may have one only where ``tests/component/test_engine_kv_abi.py`` finds that their
sources which write KV are equal, or the reason why a difference does not matter. What is not listed is its own name.
"""
REST_MS: Final = 5
"""Longest wait for a message that may have come without its notice."""


def check_model(config: Any, kv_cache: Any) -> None:
    """Refuse what the connector cannot move rightly.

    Layers that see a window of tokens beside others that see all are one group of full attention here: vLLM allocates for
    all of them alike where the connector takes one group.

    Raises:
        ConfigError: names the feature.
    """
    groups = kv_cache.kv_cache_groups if kv_cache is not None else ()
    if len(groups) > 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(f"kv connector: models with several KV cache groups are not supported (this one has {kinds})")
    for group in groups:
        spec = group.kv_cache_spec
        parts = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
        for part in parts:
            if type(part) not in {FullAttentionSpec, MLAAttentionSpec}:
                raise ConfigError(f"kv connector: {type(part).__name__} is not supported (full attention and MLA are): "
                                  "its blocks are not all kept until prefill ends")
            if isinstance(part, MLAAttentionSpec) and common.rotates_wrongly(config):
                raise ConfigError(
                    "kv connector: this vLLM computes latent attention (MLA) wrongly on CPUs with its own rotary "
                    "embedding, whose result depends on how a prompt is cut, so prefill's KV and decode's would not fit; "
                    """turn it off with --compilation-config '{"custom_ops": ["none"]}'""")
    common.refuse_sleep(config)
    parallel = config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"kv connector: {name} {getattr(parallel, name)} is not supported (1 is)")
    drafting.check(config)


def kv_heads(config: Any, kv_cache: Any) -> dict[str, int]:
    """KV heads over all tensor ranks, by layer; 0 where every rank has the same (MLA).

    Left out are layers whose blocks do not have the KV heads of their rank outermost: they cannot be cut.
    """
    total = int(config.model_config.get_total_num_kv_heads())
    mine = max(1, total // config.parallel_config.tensor_parallel_size)
    drafts = drafting.layers(config, kv_cache)
    of_draft = drafting.heads(config) if drafts else (0, 0)
    out = {}
    for group in kv_cache.kv_cache_groups:
        spec = group.kv_cache_spec
        parts = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
        for name, part in parts.items():
            if isinstance(part, MLAAttentionSpec):
                out[name] = 0
            elif part.num_head_slots is None and name in drafts and part.num_kv_heads == of_draft[1]:
                out[name] = of_draft[0]
            elif part.num_head_slots is None and name not in drafts and part.num_kv_heads == mine:
                out[name] = total
    return out


def rest_while(rests: Callable[[float], bool]) -> None:
    """Have this process wait for the other side's messages without looking for them all the time, where it may.

    vLLM's engine core and its workers yield their processors for a second after each message, before they wait for the
    notice that comes with every one. ``rests(seconds)`` says whether the notice is waited for already, when a message has
    been looked for so long: what was done between two of them, a step, does not count. A notice that follows another within
    a millisecond may be dropped (a queue of one, whose room the sender learns of later): no wait in that second is longer
    than ``REST_MS``.
    """
    spin = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        now, busy = time.monotonic(), self.busy_loop_s
        read, since = getattr(self, "xpyd_looked", (None, now))
        if read != self.last_read:
            read, since = self.xpyd_looked = self.last_read, now
        if now - self.last_read > busy or not rests(now - since):
            spin(self, timeout_ms)
            return
        self.busy_loop_s = -1.0
        try:
            spin(self, REST_MS if timeout_ms is None else min(timeout_ms, REST_MS))
        finally:
            self.busy_loop_s = busy

    SpinCondition.wait = wait


def instruction_set(config: Any) -> str:
    """The instruction set that decides the inside of a block on CPU; empty where the device is none."""
    if config.device_config.device_type != "cpu":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 (CPU builds only)

    model = config.model_config
    return str(_get_attn_isa(model.dtype, config.cache_config.block_size, model.get_head_size(),
                             config.cache_config.cache_dtype))
