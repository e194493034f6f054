"""What the connector finds of speculation in vLLM's own configurations: what is refused, a draft's layers, its factors.

Without an engine. Groups of layers are made up as vLLM names them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from draft_models import EAGLE, TARGET, ensure
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from xpyd_operator.api import speculation
from xpyd_sidecar.agent.engine import ACCEPTED, DRAFTED
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.contract.speculation import ALIKE, Speculation, difference
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import drafting
from xpyd_sidecar.errors import ConfigError

NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 3}
OWN, DRAFT = "model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"


def config(speculation: dict[str, Any] | None, **given: Any) -> VllmConfig:
    transfer = launch.kv_transfer_config(KvOptions(), "recompute")
    return EngineArgs(model=str(ensure(TARGET)), enforce_eager=True, dtype="float32", max_model_len=2048,
                      kv_transfer_config=transfer, speculative_config=speculation, **given).create_engine_config()


def eagle(model: Path | None = None, **more: Any) -> dict[str, Any]:
    return {"method": "eagle", "model": str(model or ensure(EAGLE)), "num_speculative_tokens": 3, **more}


@pytest.fixture(scope="module")
def drafts() -> VllmConfig:
    return config(eagle())


def attention(heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=32, dtype=torch.float32)


def cache(*names: str, state: bool = False, **of: Any) -> Any:
    """One group of layers with attention, and with ``state`` another one; ``of``: specs of further layers."""
    groups = [SimpleNamespace(layer_names=list(names), kv_cache_spec=attention())]
    if state:
        mamba = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
        groups.append(SimpleNamespace(layer_names=["model.layers.0.mixer"], kv_cache_spec=mamba))
    groups += [SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name, spec in of.items()]
    return SimpleNamespace(kv_cache_groups=groups, transfer_groups=groups, transfer_group_ids=list(range(len(groups))))


def test_an_engine_that_does_not_speculate_says_so() -> None:
    assert drafting.speculation_of(config(None), cache(OWN)) == Speculation()
    assert drafting.speculation_of(config(None), cache(OWN, state=True)) == Speculation(states=True)


def test_drafts_from_tokens_have_no_layers() -> None:
    plain = config(NGRAM)
    compat.check_model(plain, cache(OWN))
    assert drafting.speculation_of(plain, cache(OWN)) == Speculation("ngram", num_speculative_tokens=3)
    assert drafting.layers(plain, cache(OWN, "model.layers.9.self_attn.attn")) == frozenset()


def test_a_drafts_factors_and_layers(drafts: VllmConfig) -> None:
    compat.check_model(drafts, cache(OWN, DRAFT))
    found = drafting.speculation_of(drafts, cache(OWN, DRAFT))
    assert (found.method, found.kv_cache_dtype, found.num_speculative_tokens) == ("eagle", "float32", 3)
    assert (found.layers, found.auxiliary_layers, found.parallel_drafting, found.states) == ((DRAFT,), (), False, False)
    assert len(found.model) == 32


@pytest.mark.parametrize(("name", "is_draft"), [
    (OWN, False), (DRAFT, True), ("language_model.model.layers.1.self_attn.attn", True),
    ("mtp.layers.0.self_attn.attn", True), ("draft_model.model.layers.0.self_attn.attn", True),
    ("model.layers.1.mtp_block.self_attn.attn", True), ("model.layers.0.self_attn.attn.1", False)])
def test_a_drafts_layers_are_known_by_their_names(drafts: VllmConfig, name: str, is_draft: bool) -> None:
    assert (name in drafting.layers(drafts, cache(name))) == is_draft


def test_a_drafts_layers_are_known_by_what_vllm_says_of_them(drafts: VllmConfig) -> None:
    """From 0.33 on."""
    said = SimpleNamespace(is_draft=True)
    assert drafting.layers(drafts, cache(OWN, **{"any.name": said})) == {"any.name"}


def test_the_same_draft_elsewhere_is_the_same_and_another_one_is_not(drafts: VllmConfig, tmp_path: Path) -> None:
    here = drafting.speculation_of(drafts, cache(OWN, DRAFT))
    moved = shutil.copytree(ensure(EAGLE), tmp_path / "moved")
    there = drafting.speculation_of(config(eagle(moved, num_speculative_tokens=5)), cache(OWN, DRAFT))
    assert difference(here, there, ALIKE) == ""
    assert difference(here, there, ("num_speculative_tokens",)) == "speculation.num_speculative_tokens: 3 here, 5 there"
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    other = drafting.speculation_of(config(eagle(moved)), cache(OWN, DRAFT))
    assert difference(here, other).startswith("speculation.model: ")


def test_the_type_of_a_drafts_kv_is_its_own_or_the_engines() -> None:
    for given, is_called in (("fp8_e5m2", "fp8_e5m2"), ("fp8", "fp8_e4m3")):
        said = drafting.speculation_of(config(eagle(), kv_cache_dtype=given), cache(OWN, DRAFT))
        assert said.kv_cache_dtype == is_called


def test_heads_of_a_drafts_layers_are_the_drafts(drafts: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cut by heads between tensor sizes as any others."""
    assert compat.kv_heads(drafts, cache(OWN, DRAFT)) == {OWN: 2, DRAFT: 2}
    monkeypatch.setattr(drafts.speculative_config.draft_model_config, "get_total_num_kv_heads", lambda: 4)
    assert compat.kv_heads(drafts, cache(OWN, **{DRAFT: attention(4)})) == {OWN: 2, DRAFT: 4}
    assert compat.kv_heads(drafts, cache(OWN, DRAFT)) == {OWN: 2}, "what is not as expected goes between equal sizes only"


@pytest.mark.parametrize("method", sorted(speculation.OTHERS))
def test_methods_that_nobody_has_seen_handed_over_are_refused(drafts: VllmConfig, method: str) -> None:
    other = SimpleNamespace(speculative_config=SimpleNamespace(method=method), num_prefill_lookahead_tokens=0)
    with pytest.raises(ConfigError, match=rf"speculative_config.method {method} is not supported \(draft_model, eagle, "):
        drafting.check(other)


def test_a_module_for_each_draft_is_refused_with_what_works() -> None:
    other = SimpleNamespace(speculative_config=SimpleNamespace(method="mtp"), num_prefill_lookahead_tokens=3)
    with pytest.raises(ConfigError, match=r"read 3 tokens ahead.* num_speculative_tokens 1"):
        drafting.check(other)
    other.num_prefill_lookahead_tokens = 1
    drafting.check(other)


def test_what_the_agent_reads_is_what_an_engine_that_speculates_exports(drafts: VllmConfig) -> None:
    from prometheus_client import REGISTRY
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": "0"})

    def found(config: VllmConfig) -> SpecDecodingProm:
        return SpecDecodingProm(config.speculative_config, ["model_name", "engine"], {0: ["m", "0"]})

    found(config(None))
    assert value(DRAFTED) is None, "an engine that does not speculate has no such series"
    stats = SpecDecodingStats.new(3)
    stats.observe_draft(num_draft_tokens=3, num_accepted_tokens=2)
    found(drafts).observe(stats)
    assert (value(DRAFTED), value(ACCEPTED)) == (3, 2)


def test_what_is_told_fits_into_a_hello(drafts: VllmConfig) -> None:
    found = drafting.speculation_of(drafts, cache(OWN, DRAFT, state=True))
    assert found.states
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Speculation) == found
