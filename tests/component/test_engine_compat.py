"""Which module knows the vLLM that runs, and what is read of its configuration; without an engine."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import ModelConfig, MultiModalConfig, ParallelConfig
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import compat, connector
from xpyd_sidecar.engine.compat import common, v032, v033
from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.engine.worker.memory_sizes import StepLoad
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process.resources import memory_bytes

OTHERS = ["0.31.2", "0.34.0", "0.34.0+cu129", "0.3.2", "0.3.3", "0.320.0", "0.330.0", "1.0.0", "dev"]


def imported() -> ModuleType:
    """The package once more, as a process that starts imports it, under another name."""
    assert compat.__file__ is not None
    spec = importlib.util.spec_from_file_location("compat_again", Path(compat.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


@pytest.mark.parametrize(("version", "known"), [
    ("0.32.0", v032), ("0.32.1", v032), ("0.32.0+cu129", v032), ("0.33.0", v033), ("0.33.2", v033), ("0.33.0+cu130", v033)])
def test_the_module_of_a_version_is_found_by_how_it_begins(monkeypatch: pytest.MonkeyPatch, version: str,
                                                           known: ModuleType) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    compat.check_version()
    assert known.__name__ == f"{compat.__name__}.{common.module()}"
    assert imported().KV_ABI is known.KV_ABI


@pytest.mark.parametrize("version", OTHERS)
def test_a_version_that_no_module_knows_is_refused_by_name_before_its_parts_are_imported(
        monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    for known in (v032, v033):
        monkeypatch.setitem(sys.modules, known.__name__, None)  # importing it would fail
    said = re.escape(f"vLLM {version} is not supported by this xpyd; use 0.32.x or 0.33.x")
    with pytest.raises(ConfigError, match=rf"^{said}$"):
        imported()
    with pytest.raises(ConfigError, match="is not supported"):
        compat.check_version()


def test_all_that_is_exported_is_there_and_modules_of_versions_have_the_same_names() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)
    for name in common.KNOWN.values():
        known = importlib.import_module(f"{compat.__name__}.{name}")
        assert set(known.__all__) == set(v032.__all__) <= set(compat.__all__)
        (begins,) = [one for one, of in common.KNOWN.items() if of == name]
        assert all(version.startswith(begins) for version in known.KV_ABI)


# --- how KV is written ---


def test_a_listed_version_says_how_it_writes_kv_and_any_other_is_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = set(compat.KV_ABI.values())
    monkeypatch.setitem(compat.KV_ABI, "0.32.4", first)
    found = {}
    for version in (first, "0.32.4", "0.32.3", f"{first}+cu129", "0.32.4.dev1"):
        monkeypatch.setattr(vllm, "__version__", version)
        found[version] = compat.kv_abi()
    assert found == {first: first, "0.32.4": first, "0.32.3": "0.32.3", f"{first}+cu129": f"{first}+cu129",
                     "0.32.4.dev1": "0.32.4.dev1"}


def config(device: str, cache: str, dtype: str = "torch.bfloat16", *, latent: bool = False) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype=cache, get_resolved_kv_cache_layout=lambda: "LBNHC"),
        model_config=SimpleNamespace(dtype=dtype, use_mla=latent))


@pytest.mark.parametrize(("given", "hip", "layout"), [
    (config("cuda", "auto"), None, ""),
    (config("cuda", "auto", "torch.float16", latent=True), None, ""),
    (config("cuda", "bfloat16"), None, ""),
    (config("cuda", "fp8"), None, ""),
    (config("cuda", "fp8_e5m2"), None, ""),
    (config("cuda", "fp8", latent=True), None, "LBNHC"),
    (config("cuda", "fp8_ds_mla", latent=True), None, "LBNHC"),
    (config("cuda", "fp8_per_token_head"), None, "LBNHC"),
    (config("cuda", "int4_per_token_head"), None, "LBNHC"),
    (config("cuda", "nvfp4"), None, "LBNHC"),
    (config("cuda", "turboquant_k8v4"), None, "LBNHC"),
    (config("cuda", "auto", "torch.float64"), None, "LBNHC"),
    (config("cuda", "auto"), "6.4", "LBNHC"),
    (config("cpu", "auto"), None, "LBNHC"),
    (config("xpu", "auto"), None, "LBNHC"),
])
def test_the_layout_is_compared_where_bytes_depend_on_it(monkeypatch: pytest.MonkeyPatch, given: Any, hip: str | None,
                                                         layout: str) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert compat.kv_layout(given) == layout


def test_every_type_that_vllm_knows_is_plain_or_packed_by_its_own_words() -> None:
    """Where this fails, vLLM has a new type: say here whether its values are packed."""
    from typing import get_args

    from vllm.config.cache import CacheDType

    known = set(get_args(CacheDType)) - {"auto"}
    plain = {one for one in known if common.plain(config("cuda", one))}
    assert plain == {"float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
    assert known - plain == {
        "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
        "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head",
        "nvfp4", "nvfp4_4over6", *NEWER[common.module()]}


NEWER = {"v032": (), "v033": ("octave_k3v4", "octave_k3v3", "octave_k3v3_compact")}


# --- hooks ---


@pytest.mark.parametrize(("given", "several"), [
    ({}, False), ({"enable_dbo": True}, True), ({"ubatch_size": 2}, True), ({"ubatch_size": 1}, False)], ids=str)
def test_with_micro_batches_no_layer_leaves_at_its_hook(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any],
                                                        several: bool) -> None:
    asked: dict[str, Any] = {}

    def worker_side(*args: Any, **more: Any) -> Any:
        asked.update(more)
        return SimpleNamespace(rests=lambda _: True)

    monkeypatch.setattr(connector, "WorkerSide", worker_side)
    monkeypatch.setattr(compat, "rest_while", lambda _: None)
    made = XpydConnector.__new__(XpydConnector)
    made._settings, made._worker = SimpleNamespace(options=KvOptions()), None  # type: ignore[assignment]
    made._vllm_config = SimpleNamespace(parallel_config=ParallelConfig(**given), speculative_config=None,
                                        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
                                        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2))
    made._kv_cache_config = SimpleNamespace(kv_cache_groups=[], transfer_groups=(), transfer_group_ids=(), num_blocks=4)
    made.register_kv_caches({"l0": torch.zeros(4, 2, 8, 4)})
    assert asked["by_layer"] is not several
    assert asked["load"] == StepLoad(512, 1, memory_bytes(), 0), "what a step brings, and what there is room for"


def test_ranks_of_a_host_share_its_memory() -> None:
    for tensor, data in ((1, 1), (4, 1), (2, 3)):
        parallel = ParallelConfig(tensor_parallel_size=tensor, data_parallel_size=data, data_parallel_size_local=data,
                                  distributed_executor_backend="mp")
        assert compat.ranks_here(SimpleNamespace(parallel_config=parallel)) == tensor * data


LONG = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "pad_token_id": 0,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 1024, "torch_dtype": "float32",
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}


def test_engines_whose_allowed_length_decides_how_their_keys_rotate_are_told_apart(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LONG))
    by_rope: dict[bool, set[str]] = {True: set(), False: set()}
    for length in (512, 1024, 1025, 4096):
        model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=length, dtype="float32")
        running = SimpleNamespace(model_config=model, compilation_config=SimpleNamespace(custom_ops=[]))
        monkeypatch.setattr(phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda running=running: running)
        parameters = model.hf_text_config.rope_parameters
        rope = phi3_long_rope_scaled_rope.Phi3LongRoPEScaledRotaryEmbedding(
            16, 16, 4096, parameters["original_max_position_embeddings"], 10000, True, torch.float32,
            parameters["short_factor"], parameters["long_factor"])
        by_rope[rope.use_long_rope].add(common.model_text(running))
    assert [len(texts) for texts in by_rope.values()] == [1, 1]
    assert by_rope[True].isdisjoint(by_rope[False])


@pytest.mark.parametrize(("written", "generation", "override", "length", "scaled"), [
    (True, {}, {}, 32768, False), (False, {}, {}, 32769, True), (True, {"attn_temperature_tuning": True}, {}, 8, True),
    (False, {"attn_temperature_tuning": True}, {"attn_temperature_tuning": False}, 1 << 20, False)])
def test_how_llama_4_scales_attention_is_what_vllm_decides_whichever_process_asks(
        written: bool, generation: dict[str, Any], override: dict[str, Any], length: int, scaled: bool) -> None:
    def text(said: bool, length: int) -> str:
        fields = {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "attn_temperature_tuning": said}}
        return common.model_text(SimpleNamespace(model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: fields), quantization=None, max_model_len=length,
            try_get_generation_config=lambda: generation, override_generation_config=override)))

    assert text(written, length) == text(not written, length)
    assert f'"attn_temperature_tuning": {str(scaled).lower()}' in text(written, length)


def test_of_all_other_models_the_allowed_length_says_nothing() -> None:
    fields = {"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 4}}
    texts = {common.model_text(SimpleNamespace(model_config=SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: fields), quantization=None, max_model_len=length))) for length in (2, 9)}
    assert texts == {json.dumps([fields, None], sort_keys=True)}


def test_engines_that_bring_images_into_another_shape_are_told_apart_although_their_hashes_are_equal() -> None:
    def text(**media: Any) -> str:
        given = MultiModalConfig(**media) if media else None
        return common.model_text(SimpleNamespace(model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=dict), quantization=None, max_model_len=9, multimodal_config=given)))

    plain = text()
    assert text(limit_per_prompt={"image": 2}) == plain
    assert len({plain, text(mm_processor_kwargs={"do_normalize": False}), text(mm_processor_kwargs={"do_normalize": True}),
                text(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}})}) == 4
