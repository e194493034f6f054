"""What a vLLM says of its speculative decoding: what is supported, a draft's layers, and what other engines must know."""

from __future__ import annotations

import json
from typing import Any, Final

from vllm.v1.kv_cache_interface import MambaSpec

from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.engine.compat.common import cache_type, layer_specs
from xpyd_sidecar.engine.weights import model_hash
from xpyd_sidecar.errors import ConfigError

BY_TOKENS: Final = ("ngram", "ngram_gpu", "suffix")
"""Methods that draft from the tokens that there are: they have no KV of their own."""
BY_MODELS: Final = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods with a model that drafts, whose layers have KV. vLLM calls all kinds of MTP ``mtp``."""
_ELSEWHERE: Final = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""What a configuration says of where it came from."""


def check(config: Any) -> None:
    """Refuse drafts that are not known to be handed over rightly.

    Raises:
        ConfigError: names the method, and those that work.
    """
    given = config.speculative_config
    if given is None:
        return
    if given.method not in {*BY_TOKENS, *BY_MODELS}:
        raise ConfigError(f"kv connector: speculative_config.method {given.method} is not supported "
                          f"({', '.join(sorted((*BY_TOKENS, *BY_MODELS)))} are): no engine has been seen to hand over what "
                          "it drafts by")
    if config.num_prefill_lookahead_tokens > 1:
        raise ConfigError("kv connector: MTP with a module for each draft is not supported: its modules read "
                          f"{config.num_prefill_lookahead_tokens} tokens ahead, which prefill does not hand over; give "
                          "speculative_config num_speculative_tokens 1")


def speculation_of(config: Any, kv_cache: Any) -> Speculation:
    """What other engines must know of an engine's speculative decoding."""
    given, states = config.speculative_config, any(isinstance(spec, MambaSpec) for spec in _layers(kv_cache).values())
    if given is None:
        return Speculation(states=states)
    about = Speculation(str(given.method), num_speculative_tokens=int(given.num_speculative_tokens), states=states)
    draft = given.draft_model_config
    if given.method not in BY_MODELS or draft is None:
        return about
    asked = str(given.kv_cache_dtype or config.cache_config.cache_dtype)
    auxiliary = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None) or ()
    commit = getattr(draft.hf_config, "_commit_hash", None) or draft.revision or ""
    return Speculation(
        method=str(given.method),
        model=model_hash(str(draft.model), str(commit), _text(draft)),
        kv_cache_dtype=cache_type(asked, draft.dtype),
        auxiliary_layers=tuple(int(each) for each in auxiliary),
        parallel_drafting=bool(given.parallel_drafting),
        num_speculative_tokens=int(given.num_speculative_tokens),
        states=states,
        layers=tuple(sorted(layers(config, kv_cache))),
    )


def layers(config: Any, kv_cache: Any) -> frozenset[str]:
    """Layers of the cache that are a draft's.

    vLLM 0.33 says it of each; 0.32 gives them numbers after those of the model that they draft for, or names of their own.
    A layer that is not recognised here counts as one of the model, so both sides must have it.
    """
    given = config.speculative_config
    if given is None or given.method not in BY_MODELS:
        return frozenset()
    count = int(config.model_config.get_total_num_hidden_layers())
    return frozenset(name for name, spec in _layers(kv_cache).items()
                     if getattr(spec, "is_draft", False) or _beyond(name, count))


def heads(config: Any) -> tuple[int, int]:
    """KV heads of a model that drafts: of all its tensor ranks, and of each."""
    draft, parallel = config.speculative_config.draft_model_config, config.speculative_config.draft_parallel_config
    total = int(draft.get_total_num_kv_heads())
    return total, max(1, total // int(parallel.tensor_parallel_size))


def _layers(kv_cache: Any) -> dict[str, Any]:
    return {} if kv_cache is None else layer_specs(kv_cache.kv_cache_groups)


def _beyond(name: str, count: int) -> bool:
    parts = name.split(".")
    number = next((int(part) for part in parts if part.isdigit()), -1)
    return parts[0] == "draft_model" or "mtp" in parts or number >= count


def _text(model: Any) -> str:
    """Its configuration as JSON, without where it lies: a draft's holds that of another one."""
    return json.dumps([_plain(model.hf_config.to_dict()), model.quantization], sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if key not in _ELSEWHERE}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
