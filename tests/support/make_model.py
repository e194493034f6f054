"""The model of the correctness tests: a tiny random Llama with a byte-level tokenizer.

A default random initialisation collapses to one repeated token and hides errors. The scales below make the greedy output
depend on every prompt token, so one wrong KV block changes the text.

    ensure_model()  →  $XPYD_TEST_CACHE/tiny-llama-1, by default .cache/models/tiny-llama-1 in the repository
    ensure_moe()    →  …/tiny-moe-1: a mixture of four experts
    ensure_adapter() →  …/tiny-lora-1: a LoRA adapter of the first, whose answers differ from its

It is made once, in a process of its own (torch stays out of the tests), under a lock, and put in place by a rename: a
reader sees a whole model or none.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "tiny-llama-1"  # grows when the recipe changes
MOE = "tiny-moe-1"
WIDE = "wide-llama-1"
ADAPTER = "tiny-lora-1"
ADAPTER_RANK = 8
HIDDEN, LAYERS = 128, 4
VOCABULARY = 512
CONTEXT = 4096
MAKE_TIMEOUT_S = 600.0
STD = {"q_proj": 0.25, "k_proj": 0.25, "v_proj": 0.3, "o_proj": 0.3, "gate_proj": 0.08, "up_proj": 0.08, "down_proj": 0.08}
OTHER_STD = 0.3


def cache_root() -> Path:
    """Where models for tests are kept."""
    named = os.environ.get("XPYD_TEST_CACHE")
    return Path(named) if named else Path(__file__).resolve().parents[2] / ".cache" / "models"


def ensure_model(root: Path | None = None) -> Path:
    """The model's folder; made at the first call (about 15 s)."""
    return _ensure(root or cache_root(), NAME)


def ensure_wide(root: Path | None = None) -> Path:
    """A model whose prefill takes far longer than what is done around it: 512 wide, 8 layers, 16 KiB of KV per token."""
    return _ensure(root or cache_root(), WIDE)


def ensure_moe(root: Path | None = None) -> Path:
    """The same for a mixture of experts."""
    return _ensure(root or cache_root(), MOE)


def ensure_adapter(root: Path | None = None) -> Path:
    """The same for a LoRA adapter of the first."""
    return _ensure(root or cache_root(), ADAPTER)


def ensure_by(script: str, name: str) -> Path:
    """A model that another script writes, beside the tokenizer of the first; made at the first call (about 15 s)."""
    return _ensure(cache_root(), name, script, ensure_model())


def _ensure(root: Path, name: str, script: str = __file__, like: Path | None = None) -> Path:
    """``like``: the model whose tokenizer lies in the folder before ``script`` is called."""
    target = root / name
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{name}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            if like is not None:
                others = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
                shutil.copytree(like, temporary, dirs_exist_ok=True, ignore=others)
            subprocess.run([sys.executable, script, str(temporary), name], check=True, timeout=MAKE_TIMEOUT_S,
                           env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
            temporary.chmod(0o755)
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def make(folder: Path, name: str = NAME) -> None:
    """Write tokenizer, configuration and weights into ``folder``."""
    if name == ADAPTER:
        _make_adapter(folder)
        return
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": 0, "<eos>": 1, **{char: index + 2 for index, char in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)

    torch.manual_seed(1)
    if name == MOE:
        _make_moe(folder)
        return
    if name == WIDE:
        LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=1,
            tie_word_embeddings=False)).save_pretrained(folder)
        return
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
                         bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, STD.get(weight.split(".")[-2], OTHER_STD))
    model.save_pretrained(folder)


def _make_moe(folder: Path) -> None:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
                           num_local_experts=4, num_experts_per_tok=2, bos_token_id=0, eos_token_id=1,
                           tie_word_embeddings=False, sliding_window=None)
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.normal_(0, STD["down_proj"])
            elif parameter.ndim == 2:
                parameter.normal_(0, STD.get(name.split(".")[-2], OTHER_STD))
    model.save_pretrained(folder)


def _make_adapter(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(2)
    weights = {}
    for layer in range(LAYERS):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{at}.lora_A.weight"] = torch.randn(ADAPTER_RANK, HIDDEN) * 0.2
        weights[f"{at}.lora_B.weight"] = torch.randn(HIDDEN, ADAPTER_RANK) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "lora_dropout": 0.0,
         "target_modules": ["q_proj"], "bias": "none", "base_model_name_or_path": NAME}))


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
