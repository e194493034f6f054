"""Everything of vLLM that xpyd uses, in one place: these are internals, and another version may move them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final, NoReturn

import vllm
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

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.errors import ConfigError

__all__ = [
    "CacheHitSource", "KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata",
    "KVConnectorPromMetrics", "KVConnectorRole", "KVConnectorStats", "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata", "cached_tokens", "check_model", "check_version", "common_id", "create_metric_per_engine",
    "dp_rank", "instruction_set", "kv_dtype", "kv_heads", "kv_layout", "log_like_vllm", "max_model_len", "model_files",
    "model_text", "rank_of", "rest_while", "sampling", "show_cached", "show_own_cached", "sizes", "version",
]

SUPPORTED: Final = "0.32."
_FAST_TOKENIZERS = frozenset({"auto", "hf"})
"""Modes whose tokenizers give the text of a prompt that ends inside a character again, whole; others lose the character."""
REST_MS: Final = 5
"""Longest wait for a message that may have come without its notice."""


def check_version() -> None:
    """Refuse a vLLM whose internals are not the ones known here.

    Raises:
        ConfigError: names the version found and the one that works.
    """
    if not version().startswith(SUPPORTED):
        raise ConfigError(f"vLLM {version()} is not supported by this xpyd; use {SUPPORTED}x")


def version() -> str:
    """The version of vLLM that runs."""
    return str(vllm.__version__)


def log_like_vllm(name: str) -> None:
    """Have a logger write where and how vLLM's own does: an engine process configures no other."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger(name)
    ours.handlers[:] = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


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
            if isinstance(part, MLAAttentionSpec) and _rotates_wrongly(config):
                raise ConfigError(
                    "kv connector: this vLLM computes latent attention (MLA) wrongly on CPUs with its own rotary "
                    "embedding, whose result depends on how a prompt is cut, so prefill's KV and decode's would not fit; "
                    """turn it off with --compilation-config '{"custom_ops": ["none"]}'""")
    parallel = config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"kv connector: {name} {getattr(parallel, name)} is not supported (1 is)")
    if config.speculative_config is not None:
        _refuse_speculative(str(config.speculative_config.method))


def _rotates_wrongly(config: Any) -> bool:
    # vLLM's compiled op for CPUs takes query and key of latent attention, which are parts of wider rows, for whole ones.
    # Models that scale positions have a class of their own without it.
    ops = config.compilation_config.custom_ops
    on = ("all" in ops or "+rotary_embedding" in ops) and "-rotary_embedding" not in ops
    rope = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    return bool(on and config.device_config.device_type == "cpu" and rope.get("rope_type", "default") == "default")


def _refuse_speculative(method: str) -> NoReturn:
    reason = "drafts taken from the tokens have not been seen to work" if method == "ngram" else (
        "a model that drafts has KV of its own, which prefill does not compute")
    raise ConfigError(f"kv connector: speculative decoding ({method}) is not supported: {reason}; "
                      "leave speculative_config out")


def kv_heads(config: Any, kv_cache: Any) -> dict[str, int]:
    """KV heads over all tensor ranks, by layer; 0 where every rank has the same (MLA).

    Left out are layers whose blocks do not have the KV heads of their rank outermost: they cannot be cut.
    """
    total = int(config.model_config.get_total_num_kv_heads())
    mine = max(1, total // config.parallel_config.tensor_parallel_size)
    out = {}
    for group in kv_cache.kv_cache_groups:
        spec = group.kv_cache_spec
        parts = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
        for name, part in parts.items():
            if isinstance(part, MLAAttentionSpec):
                out[name] = 0
            elif part.num_head_slots is None and part.num_kv_heads == mine:
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


def cached_tokens(request: Any) -> int:
    """Tokens of a request's prompt that were in the cache when it was first scheduled; -1: that is not known any more."""
    stats = request.prefill_stats
    return -1 if stats is None else int(stats.num_cached_tokens)


def show_cached(request: Any, cached: int) -> None:
    """Have ``usage`` of a request say so many cached tokens; -1: what it says by itself. Before its first token.

    vLLM's front end has a word for it, ``remote_prefill_cached_tokens`` in ``kv_transfer_params``, which must be there when
    decode's leg is sent: that is before prefill has looked into its cache.
    """
    stats = request.prefill_stats
    if stats is not None and cached >= 0:
        stats.num_cached_tokens = min(cached, stats.num_prompt_tokens)


def show_own_cached(request: Any) -> None:
    """The same with what the engine itself had: nothing came from elsewhere."""
    if request.prefill_stats is not None:
        show_cached(request, int(request.prefill_stats.num_local_cached_tokens))


def sizes(config: Any) -> tuple[int, int, int]:
    """Tensor, pipeline and data parallel size."""
    parallel = config.parallel_config
    return parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size


def rank_of(config: Any) -> int:
    """The rank of this worker in its engine: pipeline rank times tensor size + tensor rank."""
    return int(config.parallel_config.rank)


def dp_rank(config: Any) -> int:
    """The data parallel rank of this engine."""
    return int(config.parallel_config.data_parallel_index)


def common_id(config: Any) -> str:
    """What all data-parallel ranks of this start of an engine know and no other one does: 32 hex digits.

    Empty where there is one rank. vLLM mints an engine id when its server starts and gives each rank one with a suffix,
    also where ranks are independent of each other. Routers hear one incarnation for an engine and its control addresses by
    rank, so all ranks answer to the same one.
    """
    minted, suffix, _ = str(config.kv_transfer_config.engine_id).rpartition("_dp")
    return hashlib.sha256(minted.encode()).hexdigest()[:32] if suffix else ""


def max_model_len(config: Any) -> int:
    """Tokens."""
    return int(config.model_config.max_model_len)


def sampling(config: Any) -> Sampling | None:
    """What the engine adds to how tokens are chosen; None where its generation config cannot be read."""
    model = config.model_config
    try:
        found = dict(model.get_diff_sampling_param())
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).warning("xpyd: no generation config, so sampled streams will not go on elsewhere: %s",
                                            error)
        return None
    plain = {name: float(value) for name, value in found.items()
             if isinstance(value, int | float) and not isinstance(value, bool)}
    own = {name for name in found if name not in plain}
    if model.logits_processors or entry_points(group="vllm.logits_processors"):
        own.add("logits_processors")
    if getattr(config, "watermark_config", None) is not None:
        own.add("watermarking")
    speculation = config.speculative_config
    if speculation is not None and speculation.rejection_sample_method != "standard":
        own.add("lossy_speculation")
    if model.tokenizer_mode not in _FAST_TOKENIZERS:
        own.add("tokenizer")
    bound = (found.get("max_tokens") if model.generation_config not in {"auto", "vllm"}
             else model.override_generation_config.get("max_new_tokens"))  # as vLLM's ``override_max_tokens``
    return Sampling(tuple(sorted(plain.items())), tuple(sorted(own)), int(bound or 0))


def kv_dtype(config: Any) -> str:
    """The type of what is in the cache: the model's, if none was asked for."""
    asked = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if asked == "auto" else asked


def kv_layout(config: Any) -> str:
    """The order of dimensions inside a block, as vLLM has resolved it."""
    return str(config.cache_config.get_resolved_kv_cache_layout())


def instruction_set(config: Any) -> str:
    """The instruction set that decides the inside of a block on CPU; empty where the device is none."""
    if config.device_config.device_type != "cpu":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 (CPU builds only)

    model = config.model_config
    return str(_get_attn_isa(model.dtype, config.cache_config.block_size, model.get_head_size(),
                             config.cache_config.cache_dtype))


def model_text(config: Any) -> str:
    """The model's configuration with every override, as JSON."""
    fields = dict(config.model_config.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        fields.pop(name, None)
    return json.dumps([fields, config.model_config.quantization], sort_keys=True, default=str)


def model_files(config: Any) -> tuple[str, str]:
    """The model's folder or hub id, and the commit that was resolved for it (empty for folders)."""
    model = config.model_config
    return str(model.model), str(getattr(model.hf_config, "_commit_hash", None) or model.revision or "")
