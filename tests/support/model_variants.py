"""Random models like the tiny Llama (``make_model``) whose KV is laid out otherwise.

    ensure("tiny-mqa-1")    one KV head, which tensor ranks share
    ensure("tiny-mla-1")    multi-head latent attention: a latent that every tensor rank has
    ensure("tiny-gemma-2")  every other layer sees 256 tokens alone
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from make_model import CONTEXT, MAKE_TIMEOUT_S, NAME, OTHER_STD, STD, VOCABULARY, cache_root, ensure_model

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


MADE: Final[dict[str, Callable[[], Any]]] = {"tiny-mqa-1": _mqa, "tiny-mla-1": _mla, "tiny-gemma-2": _gemma}


def ensure(name: str) -> Path:
    """The folder of a model of these, or of the tiny Llama itself; made at the first call (about 15 s)."""
    if name == NAME:
        return ensure_model()
    root = cache_root()
    target = root / name
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        tokenizer = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
        shutil.copytree(ensure_model(), temporary, dirs_exist_ok=True, ignore=tokenizer)
        subprocess.run([sys.executable, __file__, str(temporary), name], check=True, timeout=MAKE_TIMEOUT_S,
                       env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # else another has made it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def make(folder: Path, name: str) -> None:
    """Write configuration and weights into ``folder``."""
    import torch

    torch.manual_seed(1)
    model = MADE[name]()
    with torch.no_grad():
        for weight, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, STD.get(weight.split(".")[-2], OTHER_STD))
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
