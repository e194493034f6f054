"""A random model of one layer, and an EAGLE draft for it that is good if, and only if, the draft's own KV is right.

    ensure("tiny-target-1")   the model: a Llama of one layer, whose greedy text depends on every token
    ensure("tiny-eagle-1")    its draft: the same layer and head over its own cache, so that it computes what the model does

Drafts of random weights are never accepted, and prove nothing of their KV. An EAGLE layer has no first norm and reads the
embedding and the model's hidden state side by side: here embeddings are of norm 1, so the model's first norm is the
identity, and the draft takes the embedding alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from make_model import OTHER_STD, STD, ensure_by
from model_variants import COMMON

TARGET: Final = "tiny-target-1"
EAGLE: Final = "tiny-eagle-1"


def ensure(name: str) -> Path:
    """The folder of one of them; made at the first call (about 15 s)."""
    return ensure_by(__file__, name)


def speculating(tokens: int = 3) -> tuple[str, str]:
    """Arguments of an engine that drafts with it."""
    given = {"method": "eagle", "model": str(ensure(EAGLE)), "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps(given)


def by_a_model(tokens: int = 3) -> tuple[str, str]:
    """Arguments of an engine that drafts with the model itself as a model of its own."""
    given = {"method": "draft_model", "model": str(ensure(TARGET)), "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps(given)


def by_tokens(tokens: int = 3) -> tuple[str, str]:
    """Arguments of an engine that drafts by n-grams."""
    return "--speculative-config", json.dumps({"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": tokens})


def _target() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, "num_hidden_layers": 1}, num_key_value_heads=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, STD.get(name.split(".")[-2], OTHER_STD))
        embedding = model.model.embed_tokens.weight
        embedding.div_(embedding.pow(2).mean(-1, keepdim=True).sqrt())
    return model


def make(folder: Path, name: str) -> None:
    """Write configuration and weights into ``folder``."""
    model = _target()
    if name == TARGET:
        model.save_pretrained(folder)
        return
    import torch
    from safetensors.torch import save_file

    weights = {key.removeprefix("model."): value.clone() for key, value in model.state_dict().items()
               if key.startswith("model.layers.0.")}
    del weights["layers.0.input_layernorm.weight"]
    size = model.config.hidden_size
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    weights["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}))


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
