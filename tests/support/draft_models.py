"""Random models of one layer, and drafts for them that are good if, and only if, the draft's own KV is right.

    ensure("tiny-target-1")   the model: a Llama of one layer, whose greedy text depends on every token
    ensure("tiny-eagle-1")    an EAGLE draft: the same layer and head over its own cache, so it computes what the model does
    ensure("tiny-eagle3-1")   an EAGLE3 draft, likewise but for what comes past the attention
    ensure("tiny-mimo-1")     a model with an MTP module (MiMo) that computes what its one layer does

Drafts of random weights are never accepted, and prove nothing of their KV. All of these read the embedding of the next
token beside the model's hidden state: here embeddings are of norm 1, so the model's first norm is the identity, and drafts
take the embedding alone. EAGLE3 has no way past its attention but for the hidden state, which it is told to ignore: the
embedding, a tenth of what the attention gives, is missing from its sum, so it is right a little less often.
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
EAGLE3: Final = "tiny-eagle3-1"
MTP: Final = "tiny-mimo-1"
ONE_LAYER: Final[dict[str, Any]] = {**COMMON, "num_hidden_layers": 1, "num_key_value_heads": 2}


def ensure(name: str) -> Path:
    """The folder of one of them; made at the first call (about 15 s)."""
    return ensure_by(__file__, name)


def speculating(tokens: int = 3, draft: str = EAGLE) -> tuple[str, str]:
    """Arguments of an engine that drafts with it."""
    given = {"method": {EAGLE: "eagle", EAGLE3: "eagle3"}[draft], "model": str(ensure(draft)),
             "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps(given)


def by_a_module(tokens: int = 1) -> tuple[str, str]:
    """Arguments of an engine of a model that has an MTP module."""
    return "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})


def by_a_model(tokens: int = 3) -> tuple[str, str]:
    """Arguments of an engine that drafts with the model itself as a model of its own."""
    given = {"method": "draft_model", "model": str(ensure(TARGET)), "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps(given)


def by_tokens(tokens: int = 3) -> tuple[str, str]:
    """Arguments of an engine that drafts by n-grams."""
    return "--speculative-config", json.dumps({"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": tokens})


def by_suffixes(tokens: int = 3) -> tuple[str, str]:
    """Arguments of an engine that drafts by what came after the same tokens before (needs ``arctic_inference``)."""
    return "--speculative-config", json.dumps({"method": "suffix", "num_speculative_tokens": tokens})


def _filled(model: Any) -> Any:
    """Weights on which text depends, and embeddings of norm 1."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, STD.get(name.split(".")[-2], OTHER_STD))
        embedding = model.model.embed_tokens.weight
        embedding.div_(embedding.pow(2).mean(-1, keepdim=True).sqrt())
    return model


def _target() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return _filled(LlamaForCausalLM(LlamaConfig(**ONE_LAYER)))


def make(folder: Path, name: str) -> None:
    """Write configuration and weights into ``folder``."""
    if name == TARGET:
        _target().save_pretrained(folder)
    else:
        {EAGLE: _eagle, EAGLE3: _eagle3, MTP: _mtp}[name](folder)


def _layer(model: Any) -> dict[str, Any]:
    """The weights of a model's only layer, by their names in it."""
    start = "model.layers.0."
    return {key.removeprefix(start): value.clone() for key, value in model.state_dict().items() if key.startswith(start)}


def _write(folder: Path, weights: dict[str, Any], config: Any, **more: Any) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"], **more}))


def _eagle(folder: Path) -> None:
    import torch

    model, size = _target(), ONE_LAYER["hidden_size"]
    weights = {f"layers.0.{key}": value for key, value in _layer(model).items() if key != "input_layernorm.weight"}
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    weights["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    _write(folder, weights, model.config)


def _eagle3(folder: Path) -> None:
    """Its attention reads the embedding, and of the hidden state, from two places of the model, nothing."""
    import torch

    model, size = _target(), ONE_LAYER["hidden_size"]
    weights = {f"midlayer.{key}": value for key, value in _layer(model).items()}
    for key in ("q_proj", "k_proj", "v_proj"):
        name = f"midlayer.self_attn.{key}.weight"
        weights[name] = torch.cat([weights[name], torch.zeros_like(weights[name])], 1)
    weights["midlayer.hidden_norm.weight"] = torch.zeros(size)
    weights["fc.weight"] = torch.randn(size, 2 * size) * 0.05
    for key in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        weights[key.removeprefix("model.")] = model.state_dict()[key].clone()
    _write(folder, weights, model.config, draft_vocab_size=ONE_LAYER["vocab_size"], norm_before_residual=True,
           num_aux_hidden_states=2, eagle_aux_hidden_state_layer_ids=[0, 1])


def _mtp(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    model, size = _filled(Qwen2ForCausalLM(Qwen2Config(**ONE_LAYER))), ONE_LAYER["hidden_size"]
    weights = {f"model.mtp_layers.0.{key}": value for key, value in _layer(model).items()}
    for key in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{key}.weight"] = torch.ones(size)
    weights["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    _write(folder, weights | {key: value.clone() for key, value in model.state_dict().items()}, model.config,
           architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
