"""What the connector does not move is refused when the engine starts, with the reason; what is like it is not.

With vLLM's own configuration objects and its own grouping of layers, without an engine.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from make_model import ensure_model
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm_places import at_its_place

from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import compat
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.reach import CacheGroup, LayerGroup, Reach

COMPILED = any(Path(vllm.__file__).parent.glob("_C*.so"))


def config(**given: Any) -> VllmConfig:
    transfer = launch.kv_transfer_config(KvOptions(), "recompute")
    return EngineArgs(model=str(ensure_model()), enforce_eager=True, dtype="float32", max_model_len=2048,
                      kv_transfer_config=transfer, **given).create_engine_config()


@pytest.fixture(scope="module")
def plain() -> VllmConfig:
    return config()


def attention(kind: Any = FullAttentionSpec, **more: Any) -> KVCacheSpec:
    spec: KVCacheSpec = kind(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, **more)
    return spec


WINDOW = {"kind": SlidingWindowSpec, "sliding_window": 64}
CHUNKED = {"kind": ChunkedLocalAttentionSpec, "attention_chunk_size": 64}


def check(vllm: VllmConfig, *layers: KVCacheSpec) -> list[Any]:
    """Group layers as vLLM does for this configuration, and have them checked; the groups."""
    groups: list[Any] = at_its_place("get_kv_cache_groups")(vllm, {f"layer{n}": one for n, one in enumerate(layers)})
    compat.check_model(vllm, described(groups))
    return groups


def described(groups: list[Any]) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.fixture
def one_group(plain: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """As with ``--disable-hybrid-kv-cache-manager``."""
    monkeypatch.setattr(plain.scheduler_config, "disable_hybrid_kv_cache_manager", True)
    return plain


@pytest.mark.parametrize("layers", [
    (attention(), attention()), (attention(), attention(**WINDOW)), (attention(**CHUNKED), attention())],
    ids=["full", "some layers with windows", "some layers in chunks"])
def test_where_vllm_is_told_to_make_one_group_windows_and_chunks_are_as_full_attention(
        one_group: VllmConfig, layers: tuple[KVCacheSpec, ...]) -> None:
    groups = check(one_group, *layers)
    assert [one.layer_names for one in groups] == [["layer0", "layer1"]]
    assert {one.reach.over for one in compat.layer_groups(described(groups)).values()} == {"all"}


LATENT = (attention(MLAAttentionSpec), attention(MLAAttentionSpec))


def test_latent_attention_is_one_group_where_vllm_computes_it_rightly() -> None:
    (group,) = check(config(compilation_config={"custom_ops": ["none"]}), *LATENT)
    assert group.layer_names == ["layer0", "layer1"]


def test_latent_attention_is_refused_with_the_rotary_embedding_of_cpus(plain: VllmConfig) -> None:
    with pytest.raises(ConfigError, match=r"latent attention \(MLA\) wrongly on CPUs.*custom_ops"):
        check(plain, *LATENT)


@pytest.mark.skipif(not COMPILED, reason="of this vLLM there are the Python sources alone")
def test_the_rotary_embedding_of_cpus_is_wrong_for_parts_of_wider_rows(plain: VllmConfig) -> None:
    # The reason for the refusal: where this fails, vLLM has mended it, and the refusal can go.
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(plain):
        rope = get_rope(64, max_position=64, is_neox_style=False,
                        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    torch.manual_seed(0)
    query, latent = torch.randn(3, 4, 96)[..., 32:], torch.randn(3, 576)[:, 512:].unsqueeze(1)
    positions = torch.tensor([0, 5, 9])
    right = rope.forward_native(positions, query.clone(), latent.clone())[1]
    whole = query.clone(memory_format=torch.contiguous_format), latent.clone(memory_format=torch.contiguous_format)
    assert torch.allclose(rope.forward_cpu(positions, *whole)[1], right)
    assert not torch.allclose(rope.forward_cpu(positions, query, latent)[1], right)


def state(kind: MambaAttentionBackendEnum = MambaAttentionBackendEnum.MAMBA2, **more: Any) -> MambaSpec:
    return MambaSpec(**{"block_size": 2048, "shapes": ((3, 8), (2, 4, 4)), "dtypes": (torch.bfloat16, torch.float32),
                        "page_size_padded": 4096, "mamba_type": kind, **more})


def test_vllm_asks_the_connector_and_makes_a_group_of_each_kind(plain: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plain.scheduler_config.disable_hybrid_kv_cache_manager
    monkeypatch.setattr(plain.cache_config, "kv_cache_layout", "LBHNC")
    groups = check(plain, attention(**WINDOW), attention(), attention(**WINDOW), attention())
    known = compat.cache_groups(described(groups))
    assert sorted(known.items()) == list(known.items())
    assert {one.reach for one in known.values()} == {Reach("all", 16), Reach("window", 16, 64)}
    of_layer = compat.layer_groups(described(groups))
    assert [of_layer[f"layer{n}"].reach.over for n in range(4)] == ["window", "all", "window", "all"]
    assert all(known[one.group].reach == one.reach for one in of_layer.values())
    assert compat.states(described(groups)) == ""


def test_what_a_state_holds_is_said_by_layer_and_in_the_fingerprint(plain: VllmConfig) -> None:
    drafts = state(num_speculative_blocks=2)
    groups = [SimpleNamespace(kv_cache_spec=drafts, layer_names=["layer0"], enable_kv_transfer=True),
              SimpleNamespace(kv_cache_spec=attention(), layer_names=["layer1"], enable_kv_transfer=True)]
    known = described(groups)
    compat.check_model(plain, known)
    assert compat.cache_groups(known) == {0: CacheGroup(Reach("state", 0), 2048), 1: CacheGroup(Reach("all", 16), 16)}
    assert compat.states(known) == "mamba2 bfloat16/float32 SD +2"
    assert compat.layer_groups(known)["layer0"].state == "mamba2 bfloat16/float32 SD +2 (3, 8)/(2, 4, 4)"
    assert compat.kv_heads(plain, known) == {"layer1": 2}, "a state is not cut by heads"


def test_groups_that_vllm_does_not_transfer_are_left_out(plain: VllmConfig) -> None:
    groups = [SimpleNamespace(kv_cache_spec=attention(**CHUNKED), layer_names=["layer0"], enable_kv_transfer=False),
              SimpleNamespace(kv_cache_spec=attention(), layer_names=["layer1"], enable_kv_transfer=True)]
    compat.check_model(plain, described(groups))
    assert list(compat.cache_groups(described(groups))) == [1]
    assert compat.layer_groups(described(groups)) == {"layer1": LayerGroup(0, Reach("all", 16))}


@pytest.mark.parametrize(("layer", "text"), [
    (attention(**CHUNKED), "ChunkedLocalAttentionSpec is not supported .*--disable-hybrid-kv-cache-manager"),
    (attention(**{**WINDOW, "sliding_window": 1}), "a sliding window of 1 tokens is not supported"),
    (state(MambaAttentionBackendEnum.SHORT_CONV),
     r"state of kind short_conv are not supported \(gdn_attn and mamba2 are\): no engine has been seen"),
    (state(MambaAttentionBackendEnum.MAMBA1), "state of kind mamba1 are not supported"),
], ids=["chunks", "a window of nothing", "short conv", "mamba1"])
def test_layers_that_have_not_been_seen_to_be_handed_over_rightly_are_refused(plain: VllmConfig, layer: KVCacheSpec,
                                                                              text: str) -> None:
    groups = [SimpleNamespace(kv_cache_spec=layer, layer_names=["layer0"], enable_kv_transfer=True)]
    with pytest.raises(ConfigError, match=text):
        compat.check_model(plain, described(groups))


def test_states_with_pipeline_stages_are_refused(plain: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.parallel_config, "pipeline_parallel_size", 2)
    groups = [SimpleNamespace(kv_cache_spec=state(), layer_names=["layer0"], enable_kv_transfer=True)]
    with pytest.raises(ConfigError, match="a state are not supported with pipeline_parallel_size 2"):
        compat.check_model(plain, described(groups))


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism_is_refused(plain: VllmConfig, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"{name} 2 is not supported"):
        check(plain, attention())


@pytest.mark.parametrize(("given", "is_called"), [
    ("auto", "float32"), ("fp8_e5m2", "fp8_e5m2"), ("fp8_e4m3", "fp8_e4m3"), ("fp8", "fp8_e4m3")])
def test_the_type_of_the_cache_is_in_the_fingerprint(given: Any, is_called: str) -> None:
    """So that a pair of engines with different ones refuse each other (``test_kv_peers``)."""
    assert compat.kv_dtype(config(kv_cache_dtype=given)) == is_called


@pytest.mark.parametrize(("tensor", "here"), [(1, 2), (2, 1), (4, 1)])
def test_heads_are_counted_over_all_ranks_also_where_ranks_share_one(plain: VllmConfig, tensor: int, here: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.parallel_config, "tensor_parallel_size", tensor)
    mine = FullAttentionSpec(block_size=16, num_kv_heads=here, head_size=32, dtype=torch.float32)
    other = FullAttentionSpec(block_size=16, num_kv_heads=here + 4, head_size=32, dtype=torch.float32)
    groups = [SimpleNamespace(kv_cache_spec=one, layer_names=[name], enable_kv_transfer=True) for name, one in
              {"mine": mine, "latent": attention(MLAAttentionSpec), "other": other}.items()]
    assert compat.kv_heads(plain, described(groups)) == {"mine": 2, "latent": 0}
