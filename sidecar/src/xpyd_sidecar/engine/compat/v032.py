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
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine

from xpyd_sidecar.engine.compat import common, drafting
from xpyd_sidecar.engine.compat.common import layer_specs
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.reach import CacheGroup, LayerGroup, Reach

__all__ = [
    "KV_ABI", "CacheHitSource", "KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata",
    "KVConnectorPromMetrics", "KVConnectorRole", "KVConnectorStats", "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata", "SupportsHMA", "cache_groups", "check_model", "create_metric_per_engine",
    "instruction_set", "kv_heads", "layer_groups", "rest_while", "states",
]

KV_ABI: Final = {"0.32.0": "0.32.0"}
"""How these exact versions write KV: the name of the first version that wrote it so.

Versions of one name exchange KV. Two may have one only where ``tests/component/test_engine_kv_abi.py`` finds that their
sources which write KV are equal, or the reason why a difference does not matter. What is not listed is its own name.
"""
STATES: Final = frozenset({"MAMBA2", "GDN_ATTN"})
"""Kinds of states that engines have been seen to hand over rightly."""
REST_MS: Final = 5
"""Longest wait for a message that may have come without its notice."""


def check_model(config: Any, kv_cache: Any) -> None:
    """Refuse what the connector cannot move rightly.

    Raises:
        ConfigError: names the feature.
    """
    for part in layer_specs(kv_cache.transfer_groups).values() if kv_cache is not None else ():
        if type(part) not in {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec}:
            raise ConfigError(f"kv connector: {type(part).__name__} is not supported (full and latent attention, sliding "
                              "windows and some states are); with --disable-hybrid-kv-cache-manager vLLM makes one group "
                              "of layers with full attention and such ones, where it can")
        if isinstance(part, MambaSpec):
            _check_state(config, part)
        if isinstance(part, SlidingWindowSpec) and part.sliding_window < 2:
            raise ConfigError(f"kv connector: a sliding window of {part.sliding_window} tokens is not supported")
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


def _check_state(config: Any, part: MambaSpec) -> None:
    kind = part.mamba_type.name
    if kind not in STATES:
        known = " and ".join(sorted(one.lower() for one in STATES))
        raise ConfigError(f"kv connector: layers that keep a state of kind {kind.lower()} are not supported ({known} are): "
                          "no engine has been seen to hand one over rightly")
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError("kv connector: layers that keep a state are not supported with pipeline_parallel_size "
                          f"{config.parallel_config.pipeline_parallel_size} (1 is)")


def _reach(part: Any) -> Reach:
    if isinstance(part, MambaSpec):
        return Reach("state", 0)
    if isinstance(part, SlidingWindowSpec):
        return Reach("window", part.block_size, part.sliding_window, part.extra_retained_tokens)
    return Reach("all", part.block_size)


def _types(part: MambaSpec) -> str:
    types = "/".join(str(one).removeprefix("torch.") for one in part.dtypes)
    return f"{part.mamba_type.name.lower()} {types} {get_conv_state_layout()} +{part.num_speculative_blocks}"


def cache_groups(kv_cache: Any) -> dict[int, CacheGroup]:
    """VLLM's groups that are moved, by number."""
    out = {}
    for at, group in zip(kv_cache.transfer_group_ids, kv_cache.transfer_groups, strict=True):
        part = next(iter(layer_specs([group]).values()))
        out[at] = CacheGroup(_reach(part), int(part.block_size))
    return out


def layer_groups(kv_cache: Any) -> dict[str, LayerGroup]:
    """Which of those groups each layer is in, and what it keeps."""
    parts, out = layer_specs(kv_cache.transfer_groups), {}
    for at, group in enumerate(kv_cache.transfer_groups):
        for name in group.layer_names:
            part = parts[name]
            state = f"{_types(part)} {'/'.join(map(str, part.shapes))}" if isinstance(part, MambaSpec) else ""
            out[name] = LayerGroup(at, _reach(part), state)
    return out


def states(kv_cache: Any) -> str:
    """What layers keep that have a state; empty: none has one."""
    parts = layer_specs(kv_cache.transfer_groups).values()
    return ", ".join(sorted({_types(one) for one in parts if isinstance(one, MambaSpec)}))


def kv_heads(config: Any, kv_cache: Any) -> dict[str, int]:
    """KV heads over all tensor ranks, by layer; 0 where every rank has the same (MLA).

    Left out are layers whose blocks do not have the KV heads of their rank outermost: they cannot be cut.
    """
    total = int(config.model_config.get_total_num_kv_heads())
    mine = max(1, total // config.parallel_config.tensor_parallel_size)
    drafts = drafting.layers(config, kv_cache)
    of_draft = drafting.heads(config) if drafts else (0, 0)
    out = {}
    for name, part in layer_specs(kv_cache.transfer_groups).items():
        if isinstance(part, MLAAttentionSpec):
            out[name] = 0
        elif isinstance(part, MambaSpec) or part.num_head_slots is not None:
            continue
        elif name in drafts and part.num_kv_heads == of_draft[1]:
            out[name] = of_draft[0]
        elif name not in drafts and part.num_kv_heads == mine:
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
