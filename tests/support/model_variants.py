"""Random models like the tiny Llama (``make_model``) whose KV is laid out otherwise.

    ensure("tiny-mqa-1")    one KV head, which tensor ranks share
    ensure("tiny-mla-1")    multi-head latent attention: a latent that every tensor rank has
    ensure("tiny-gemma-2")  every other layer sees 256 tokens alone
    ensure("tiny-gemma-3")  three layers see 200 tokens, the fourth all
    ensure("tiny-gpt-oss")  every other layer sees 128 tokens alone, with experts and sinks
    ensure("tiny-granite")  every other layer keeps a state (Mamba2)
    ensure("tiny-qwen-next")  every other layer keeps a state (gated delta net), in bfloat16
    ensure("tiny-qwen-next-mtp")  the same with an MTP module

Each has several KV cache groups but the first three. Their greedy text depends on every token of a prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from make_model import CONTEXT, NAME, OTHER_STD, STD, VOCABULARY, ensure_by, ensure_model

COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False}


def _mqa() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=1))


def _mla() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(DeepseekV2Config(
        **COMMON, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32,
        v_head_dim=32, first_k_dense_replace=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=64, pretraining_tp=1))


def _gemma() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**{**COMMON, "tie_word_embeddings": True}, num_key_value_heads=2, head_dim=32,
                                          sliding_window=256, query_pre_attn_scalar=32, pad_token_id=2))


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(
        **COMMON, num_key_value_heads=2, head_dim=32, sliding_window=200, pad_token_id=1,
        layer_types=["sliding_attention"] * 3 + ["full_attention"]))


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(
        **COMMON, num_key_value_heads=2, head_dim=32, sliding_window=128, num_local_experts=4, num_experts_per_tok=2,
        pad_token_id=1, layer_types=["sliding_attention", "full_attention"] * 2))


def _granite() -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(
        **COMMON, num_key_value_heads=2, layer_types=["mamba", "attention"] * 2, mamba_n_heads=8, mamba_d_head=32,
        mamba_d_state=32, mamba_n_groups=1, mamba_expand=2, num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=256, position_embedding_type="rope", pad_token_id=1))


def _qwen_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(
        **COMMON, num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=128, linear_value_head_dim=128, layer_types=["linear_attention", "full_attention"] * 2,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, pad_token_id=1))


HYBRIDS: Final[dict[str, Callable[[], Any]]] = {
    "tiny-gemma-3": _gemma3, "tiny-gpt-oss": _gpt_oss, "tiny-granite": _granite, "tiny-qwen-next": _qwen_next,
    "tiny-qwen-next-mtp": _qwen_next}
HYBRID_STD: Final = {**STD, "in_proj": 0.12, "out_proj": 0.15, "in_proj_qkvz": 0.12, "in_proj_ba": 0.1}
MADE: Final[dict[str, Callable[[], Any]]] = {"tiny-mqa-1": _mqa, "tiny-mla-1": _mla, "tiny-gemma-2": _gemma, **HYBRIDS}


def ensure(name: str) -> Path:
    """The folder of a model of these, or of the tiny Llama itself; made at the first call (about 15 s)."""
    if name == NAME:
        return ensure_model()
    return ensure_by(__file__, name)


def make(folder: Path, name: str) -> None:
    """Write configuration and weights into ``folder``."""
    import torch

    torch.manual_seed(1)
    model = MADE[name]()
    with torch.no_grad():
        for weight, parameter in model.named_parameters():
            if name in HYBRIDS and parameter.ndim == 3:
                parameter.normal_(0, 0.5 if "conv" in weight else 0.08)
            elif name in HYBRIDS and parameter.ndim == 2:
                other = OTHER_STD if "embed" in weight or "lm_head" in weight else 0.1
                parameter.normal_(0, HYBRID_STD.get(weight.split(".")[-2], other))
            elif parameter.ndim == 2:
                parameter.normal_(0, STD.get(weight.split(".")[-2], OTHER_STD))
    model.save_pretrained(folder)
    if name.startswith("tiny-qwen-next"):
        more = _add_a_module(folder) if name.endswith("-mtp") else {}
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": "bfloat16", **more}))


def _add_a_module(folder: Path) -> dict[str, Any]:
    """Give weights an MTP module like the model's second layer; what its configuration says of it."""
    import torch
    from safetensors.torch import load_file, save_file

    file, start = folder / "model.safetensors", "model.layers.1."
    weights = load_file(file)
    weights |= {key.replace(start, "mtp.layers.0."): value.clone()
                for key, value in weights.items() if key.startswith(start)}
    size = COMMON["hidden_size"]
    weights["mtp.fc.weight"] = torch.randn(size, 2 * size) * 0.05
    weights |= {f"mtp.{key}.weight": torch.zeros(size) for key in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    save_file(weights, file, metadata={"format": "pt"})
    return {"num_nextn_predict_layers": 1}


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
