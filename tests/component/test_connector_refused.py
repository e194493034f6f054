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
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
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
    compat.check_model(vllm, SimpleNamespace(kv_cache_groups=groups))
    return groups


@pytest.mark.parametrize("layers", [
    (attention(), attention()), (attention(), attention(**WINDOW)), (attention(**CHUNKED), attention())],
    ids=["full", "some layers with windows", "some layers in chunks"])
def test_full_attention_and_layers_with_windows_beside_it_are_one_group(plain: VllmConfig,
                                                                        layers: tuple[KVCacheSpec, ...]) -> None:
    (group,) = check(plain, *layers)
    assert group.layer_names == ["layer0", "layer1"]


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


@pytest.mark.parametrize(("layers", "text"), [
    ((attention(**WINDOW), attention(**WINDOW)), "SlidingWindowSpec is not supported"),
    ((attention(**CHUNKED),), "ChunkedLocalAttentionSpec is not supported"),
    ((MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)),), "MambaSpec is not supported"),
], ids=["windows alone", "chunks alone", "mamba"])
def test_layers_whose_blocks_are_not_all_kept_are_refused(plain: VllmConfig, layers: tuple[KVCacheSpec, ...],
                                                          text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check(plain, *layers)


def test_several_groups_are_refused(plain: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain.scheduler_config.disable_hybrid_kv_cache_manager, "vLLM asks the connector"
    monkeypatch.setattr(plain.scheduler_config, "disable_hybrid_kv_cache_manager", False)
    monkeypatch.setattr(plain.cache_config, "kv_cache_layout", "LBHNC")
    with pytest.raises(ConfigError, match=r"several KV cache groups are not supported .*SlidingWindowSpec"):
        check(plain, attention(), attention(**WINDOW))


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism_is_refused(plain: VllmConfig, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"{name} 2 is not supported"):
        check(plain, attention())


@pytest.mark.parametrize(("given", "is_called"), [("auto", "float32"), ("fp8_e5m2", "fp8_e5m2")])
def test_the_type_of_the_cache_is_in_the_fingerprint(given: Any, is_called: str) -> None:
    """So that a pair of engines with different ones refuse each other (``test_kv_peers``)."""
    assert compat.kv_dtype(config(kv_cache_dtype=given)) == is_called


@pytest.mark.parametrize(("tensor", "here"), [(1, 2), (2, 1), (4, 1)])
def test_heads_are_counted_over_all_ranks_also_where_ranks_share_one(plain: VllmConfig, tensor: int, here: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.parallel_config, "tensor_parallel_size", tensor)
    mine = FullAttentionSpec(block_size=16, num_kv_heads=here, head_size=32, dtype=torch.float32)
    other = FullAttentionSpec(block_size=16, num_kv_heads=here + 4, head_size=32, dtype=torch.float32)
    groups = [SimpleNamespace(kv_cache_spec=one, layer_names=[name]) for name, one in
              {"mine": mine, "latent": attention(MLAAttentionSpec), "other": other}.items()]
    assert compat.kv_heads(plain, SimpleNamespace(kv_cache_groups=groups)) == {"mine": 2, "latent": 0}
