"""What every version of vLLM known here has alike: what is read of its configuration and of its requests."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, KeysView
from importlib.metadata import entry_points
from typing import Any, Final

import torch
import vllm
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.errors import ConfigError

KNOWN: Final = {"0.32.": "v032", "0.33.": "v033"}
"""The module that knows a version, by how the version begins."""
NO_SLEEP: Final = ("kv connector: sleep mode is not supported: blocks would lose their memory while peers may still write "
                   "into them; leave --enable-sleep-mode out")
_FAST_TOKENIZERS = frozenset({"auto", "hf"})
"""Modes whose tokenizers give the text of a prompt that ends inside a character again, whole; others lose the character."""
_PLAIN_TYPES: Final = frozenset({"float16", "bfloat16", "float32"})
_PLAIN_BYTES: Final = frozenset({"fp8_e4m3", "fp8_e5m2"})
"""Types of one scale for a whole layer. Of latent attention vLLM makes packed ones of them."""


def version() -> str:
    """The version of vLLM that runs."""
    return str(vllm.__version__)


def module() -> str:
    """The module of this package that knows the vLLM that runs.

    Raises:
        ConfigError: none does; names the version found and what works.
    """
    for begins, name in KNOWN.items():
        if version().startswith(begins):
            return name
    raise ConfigError(f"vLLM {version()} is not supported by this xpyd; use {' or '.join(f'{one}x' for one in KNOWN)}")


def check_version() -> None:
    """Refuse a vLLM whose internals are not the ones known here.

    Raises:
        ConfigError: names the version found and the one that works.
    """
    module()


def outer_transfer() -> Any | None:
    """The transfer configuration of the MultiConnector that is making the caller's connector; None: there is none.

    vLLM makes a connector inside of one with a copy of the configuration, which has the connector's own settings in place
    of the outer ones; the scheduler goes by the outer ones, of which the connector is told nothing. Who makes it is on the
    stack.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector  # noqa: PLC0415 (of a version)

    holder = _maker(MultiConnector)
    return None if holder is None else holder._vllm_config.kv_transfer_config


def weight_version() -> Callable[[], str]:
    """What tells how the weights of the engine are called in which the caller's connector is made; empty: nobody can.

    Whoever changes weights at run time names them (``weight_version`` of vLLM's ``finish_weight_update``), and only the
    engine's core is told. It makes the scheduler, and that the connector, so it is on the stack.
    """
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 (a worker needs none of it)

    holder = _maker(EngineCore)
    return holder.get_weight_version if holder is not None else lambda: ""


def _maker(kind: type) -> Any | None:
    """The innermost object of a kind by whose method this process has come here; None: there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, kind):
            return holder
        frame = frame.f_back
    return None


def make_known(name: str, module: str) -> None:
    """Give a connector a name in vLLM: MultiConnector finds the statistics of those that it holds by their names alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 (of a version)

    with contextlib.suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(name, module, name)


def log_like_vllm(name: str) -> None:
    """Have a logger write where and how vLLM's own does: an engine process configures no other."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger(name)
    ours.handlers[:] = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def rotates_wrongly(config: Any) -> bool:
    """Whether the rotary embedding of CPUs takes parts of rows for whole ones."""
    # vLLM's compiled op for CPUs takes query and key of latent attention, which are parts of wider rows, for whole ones.
    # Models that scale positions have a class of their own without it.
    ops = config.compilation_config.custom_ops
    on = ("all" in ops or "+rotary_embedding" in ops) and "-rotary_embedding" not in ops
    rope = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    return bool(on and config.device_config.device_type == "cpu" and rope.get("rope_type", "default") == "default")


def backoff(config: Any) -> int:
    """Tokens at the end of a prompt that decode computes itself, and prefill does not hand over (``kv.reach``)."""
    return max(1, int(config.num_prefill_lookahead_tokens) - 1)


def answer_once(request: Any) -> None:
    """Have an engine end a request with its first token: what it would compute then frees and overwrites blocks."""
    request.max_tokens = 1


def cut_prompt(request: Any, tokens: int) -> None:
    """Have an engine compute so many tokens of a request's prompt; what it answers then means nothing. As it arrives."""
    del request.prompt_token_ids[tokens:]
    del request._all_token_ids[tokens:]
    request.num_prompt_tokens = tokens


def reads_no_cache(request: Any) -> bool:
    """Whether a request computes all of its prompt whatever there is of it, since it wants what comes of each token."""
    return bool(request.get_skip_reading_prefix_cache())


def refuse_sleep(config: Any) -> None:
    """Refuse sleep mode. vLLM 0.33 asks ``supports_sleep_mode`` before; 0.32 asks nobody.

    Raises:
        ConfigError: it is on.
    """
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise ConfigError(NO_SLEEP)


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
    """Have vLLM report only the tokens that the engine itself had cached: nothing came from elsewhere."""
    if request.prefill_stats is not None:
        show_cached(request, int(request.prefill_stats.num_local_cached_tokens))


def sizes(config: Any) -> tuple[int, int, int]:
    """Tensor, pipeline and data parallel size."""
    parallel = config.parallel_config
    return parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size


def rank_of(config: Any) -> int:
    """The rank of this worker in its engine: pipeline rank times tensor size + tensor rank."""
    return int(config.parallel_config.rank)


def hashed_tokens(pool: Any) -> int:
    """Tokens of the blocks that a cache of prefixes has hashes of; 0: the engine has no such cache."""
    return int(pool.hash_block_size) if pool.enable_caching else 0


def cached_keys(pool: Any) -> KeysView[bytes]:
    """What the cache of prefixes has blocks under; a view, which changes as the cache does until that is emptied."""
    keys: KeysView[bytes] = pool.cached_block_hash_to_block._cache.keys()
    return keys


def block_key(block_hash: bytes, group: int) -> bytes:
    """What the cache has a block under, by its hash and vLLM's number of its group of layers."""
    return bytes(make_block_hash_with_group_id(block_hash, group))


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


def step_tokens(config: Any) -> int:
    """Tokens that a step computes at most."""
    return int(config.scheduler_config.max_num_batched_tokens)


def ranks_here(config: Any) -> int:
    """Ranks of this engine on this host."""
    parallel = config.parallel_config
    return int(parallel.local_world_size) * max(1, int(parallel.data_parallel_size_local))


def max_model_len(config: Any) -> int:
    """The longest sequence of the model, in tokens."""
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
    return cache_type(str(config.cache_config.cache_dtype), config.model_config.dtype)


def cache_type(asked: str, dtype: Any) -> str:
    """What a cache for a model of ``dtype`` holds, by one name: "fp8" is short for "fp8_e4m3"."""
    if asked == "auto":
        return str(dtype).removeprefix("torch.")
    return "fp8_e4m3" if asked == "fp8" else asked


def kv_layout(config: Any) -> str:
    """The order of dimensions in memory, where the bytes of a copy depend on it; empty where they do not (``plain``)."""
    return "" if plain(config) else str(config.cache_config.get_resolved_kv_cache_layout())


def plain(config: Any) -> bool:
    """Whether copies of blocks travel in their logical order, heads, tokens, values, whatever the order in memory.

    They are gathered through vLLM's views of the cache, whose dimensions have that order for every backend of NVIDIA's
    devices, with types that are one value after the other. It is not so where a backend packs something of its own inside
    those dimensions: keys across tokens (CPUs, AMD's devices), values with their scales (latent attention in fp8, nvfp4 …).
    """
    if config.device_config.device_type != "cuda" or torch.version.hip is not None:
        return False
    kind = kv_dtype(config)
    return kind in _PLAIN_TYPES or (kind in _PLAIN_BYTES and not config.model_config.use_mla)


def micro_batches(config: Any) -> bool:
    """Whether a forward may run as several batches, each of which calls a layer's hook when it alone has written."""
    return bool(config.parallel_config.use_ubatching)


def model_text(config: Any) -> str:
    """The model's configuration with every override, as JSON, and what else decides of its KV: the length that is allowed,
    and how images, sounds and videos are brought into shape, where that was set (their hashes do not say it).
    """
    model = config.model_config
    fields = dict(model.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        fields.pop(name, None)
    media = getattr(model, "multimodal_config", None)
    shaped = {name: value for name in ("mm_processor_kwargs", "media_io_kwargs") if (value := getattr(media, name, None))}
    more = [*_by_length(model, fields), *([shaped] if shaped else [])]
    return json.dumps([fields, model.quantization, *more], sort_keys=True, default=str)


def _by_length(model: Any, fields: Any) -> list[str]:
    """What ``--max-model-len`` decides of KV besides how much there may be of it; empty, for nearly all models: nothing.

    vLLM takes a rope's long factors where more tokens are allowed than the model was first trained with (Phi 3), and scales
    attention of Llama 4 above 32,768. The latter it writes into the configuration, in processes that have the model.
    """
    if isinstance(fields, list | tuple):
        return [one for part in fields for one in _by_length(model, part)]
    if not isinstance(fields, dict):
        return []
    found = []
    if fields.get("rope_type") == "longrope" and model.max_model_len > fields.get("original_max_position_embeddings", 0):
        found.append("long rope")
    if fields.get("model_type") == "llama4_text":
        asked = {**model.try_get_generation_config(), **model.override_generation_config}
        fields["attn_temperature_tuning"] = asked.get("attn_temperature_tuning", model.max_model_len > 32768)
    return found + [one for part in fields.values() for one in _by_length(model, part)]


def model_files(config: Any) -> tuple[str, str]:
    """The model's folder, hub id or bucket, and the commit that was resolved for it (empty for folders).

    Of a model in a bucket vLLM has a folder without weights beside ``model_weights``, the address that they are read from.
    """
    model = config.model_config
    weights = str(getattr(model, "model_weights", "") or "")
    source = weights if "://" in weights else str(model.model)
    return source, str(getattr(model.hf_config, "_commit_hash", None) or model.revision or "")


def layer_specs(groups: Iterable[Any]) -> dict[str, Any]:
    """What vLLM says of each layer's blocks: of its groups of layers, each has one spec together, or one for each layer."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs  # noqa: PLC0415 (of a version)

    found: dict[str, Any] = {}
    for group in groups:
        spec = group.kv_cache_spec
        found |= {name: spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
                  for name in group.layer_names}
    return found
