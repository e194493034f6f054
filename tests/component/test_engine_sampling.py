"""What an engine tells of how it chooses tokens, with vLLM's own configuration objects."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_model import ensure_model
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.engine import compat


def config(**given: Any) -> VllmConfig:
    return EngineArgs(model=str(ensure_model()), enforce_eager=True, dtype="float32", max_model_len=2048,
                      **given).create_engine_config()


def test_an_engine_tells_its_generation_config(tmp_path: Path) -> None:
    assert compat.sampling(config(generation_config="vllm")) == Sampling()
    over = {"presence_penalty": 0.5, "top_k": 7, "max_new_tokens": 50}
    told = Sampling((("max_tokens", 50.0), ("presence_penalty", 0.5), ("top_k", 7.0)), (), 50)
    assert compat.sampling(config(generation_config="vllm", override_generation_config=over)) == told
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "max_new_tokens": 9}))
    given = Sampling((("max_tokens", 9.0), ("temperature", 0.3)), (), 9)
    assert compat.sampling(config(generation_config=str(tmp_path))) == given, "it bounds all requests"


@pytest.mark.parametrize(("change", "own"), [
    ({"watermark_config": object()}, "watermarking"),
    ({"speculative_config": SimpleNamespace(rejection_sample_method="synthetic")}, "lossy_speculation")])
def test_an_engine_tells_what_it_does_by_itself(change: dict[str, Any], own: str) -> None:
    plain = config(generation_config="vllm")
    seen = SimpleNamespace(model_config=plain.model_config, speculative_config=None, watermark_config=None)
    assert compat.sampling(seen) == Sampling()
    assert compat.sampling(SimpleNamespace(**{**vars(seen), **change})) == Sampling(own=(own,))
    lossless = SimpleNamespace(rejection_sample_method="standard")
    assert compat.sampling(SimpleNamespace(**{**vars(seen), "speculative_config": lossless})) == Sampling()


def test_logits_processors_and_tokenizers_that_lose_characters_are_told() -> None:
    plain = config(generation_config="vllm").model_config
    for change, own in (({"logits_processors": ["a.b:C"]}, "logits_processors"), ({"tokenizer_mode": "slow"}, "tokenizer")):
        model = SimpleNamespace(**{"get_diff_sampling_param": dict, "logits_processors": None, "generation_config": "vllm",
                                   "override_generation_config": {}, "tokenizer_mode": plain.tokenizer_mode, **change})
        found = compat.sampling(SimpleNamespace(model_config=model, speculative_config=None, watermark_config=None))
        assert found == Sampling(own=(own,))


def test_an_engine_whose_generation_config_cannot_be_read_tells_nothing() -> None:
    def broken() -> dict[str, Any]:
        raise OSError("no such file")

    model = SimpleNamespace(get_diff_sampling_param=broken)
    assert compat.sampling(SimpleNamespace(model_config=model)) is None
