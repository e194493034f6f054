"""What engines of vLLM 0.32 would not start with or not do; what only looks like it is not said."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.api import vllm
from xpyd_operator.api.model import DEFAULT_IMAGE

DRAFTS = '{"method": "eagle", "model": "a/b", "num_speculative_tokens": 3}'
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
WARNED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"engine": ["--tokens-only"]}, {"spec.engine.args[0]": "--tokens-only: an engine with it has no tokenizer"}),
    ({"decode": ["--seed", "1", "--tokens-o"]}, {"spec.decode.args[2]": "--tokens-o: "}),
    ({"prefill": ["--runner", "pooling"]}, {"spec.prefill.args[0]": "--runner pooling: an engine with it serves no comp"}),
    ({"engine": ["--convert=classify"]}, {"spec.engine.args[0]": "--convert classify: "}),
    ({"decode": ["--speculative-config", DRAFTS]}, {"spec.decode.args[0]": "prefill does not draft, so the draft's KV is"}),
    ({"engine": ["--enable-return-routed-experts"]}, {"spec.engine.args[0]": "--enable-return-routed-experts: "}),
    ({"engine": ["--enable-sleep-mode"]}, {"spec.engine.args[0]": "--enable-sleep-mode: an engine with it ends at its st"}),
    ({"engine": ["Qwen/Qwen3-8B"]}, {"spec.engine.args[0]": "Qwen/Qwen3-8B belongs to no option, so it is a second model"}),
    ({"engine": ["--seed", "1"], "decode": ["a/b"]}, {"spec.decode.args[0]": "a/b belongs to no option"}),
    ({"engine": ["--enable-auto-tool-choice"]}, {"spec.engine.args[0]": "--enable-auto-tool-choice: an engine with it "}),
    ({"engine": ["--tool-call-parser=x"], "prefill": [], "decode": ["--enable-auto-tool-choice"]}, {}),
    ({"prefill": ["--tool-call-parser=x", "--enable-auto-tool-choice"], "decode": ["--enable-auto-tool-choice"]},
     {"spec.decode.args[0]": "--enable-auto-tool-choice: "}),
    ({"prefill": ["--block-size", "16"], "decode": ["--block-size=32"]},
     {"spec.decode.args[0]": "--block-size is 16 for prefill and 32 for decode, so they take no KV from each other"}),
    ({"engine": ["--dtype=half"], "prefill": ["--dtype", "float"]},
     {"spec.prefill.args[0]": "--dtype is float for prefill and half for decode"}),
    ({"engine": ["--kv-cache-dtype=fp8"], "decode": ["--seed=1", "--kv_cache_dtype", "fp8_e5m2"]},
     {"spec.decode.args[1]": "--kv-cache-dtype is fp8 for prefill and fp8_e5m2 for decode"}),
]
SILENT: list[dict[str, Any]] = [
    {},
    {"engine": ["--enable-scale-out", "--tokenizer", "a/b", "--runner=generate", "--convert", "none"]},
    {"engine": ["--specialize-active-lora", "--enable-prefix-caching"]},
    {"engine": ["--speculative-config", DRAFTS]},
    {"engine": ["--lora-modules", "a=/x", "b=/y"]},
    {"engine": ["--dtype"], "decode": ["half"]},
    {"prefill": ["--dtype=half"], "decode": ["--dtype", "float16"]},
    {"prefill": ["--dtype=auto"], "decode": ["--dtype=bfloat16"]},
    {"decode": ["--block-size=32"]},
    {"prefill": ["--kv-cache-dtype=fp8"], "decode": ["--kv-cache-dtype=fp8_e4m3"]},
]


def found(given: dict[str, list[str]], **more: Any) -> dict[str, str]:
    spec = {name: {"args": args} for name, args in given.items()}
    spec["engine"] = spec.get("engine", {}) | more
    return {fault.path: fault.message for fault in vllm.warnings(service(**spec))}


@pytest.mark.parametrize(("given", "expected"), WARNED, ids=str)
def test_it_is_said_with_its_field_and_the_version(given: dict[str, list[str]], expected: dict[str, str]) -> None:
    said = found(given)
    assert said.keys() == expected.keys()
    assert all(said[path].startswith(words) and said[path].endswith(" (vLLM 0.32)") for path, words in expected.items())


@pytest.mark.parametrize("given", SILENT, ids=str)
def test_what_is_only_like_it_is_not_said(given: dict[str, list[str]]) -> None:
    assert found(given) == {}


def test_an_allocator_that_moves_memory_is_said_unless_another_one_is_used() -> None:
    env = [{"name": "A", "value": "1"}, {"name": ALLOCATOR, "value": "max_split_size_mb:64,expandable_segments:True"}]
    assert found({}, env=env)["spec.engine.env[1].value"].startswith("with expandable_segments:True an engine ends")
    assert found({"engine": ["--enable-cumem-allocator"]}, env=env) == {}
    assert found({}, env=[{"name": ALLOCATOR, "value": "expandable_segments:False"}]) == {}


@pytest.mark.parametrize(("args", "words"), [
    (["--load-format", "safetensors"], ["--load-format safetensors: an engine with it reads no s3://bucket/qwen; "]),
    (["--load_format=tensorizer"], ["--load-format tensorizer: "]),
    (["--load-format", "runai_streamer_sharded"], []), (["--load-format=auto"], []), ([], []),
])
def test_a_loader_that_reads_no_bucket_is_said(args: list[str], words: list[str]) -> None:
    bucket, folder = ({"source": source} for source in ("s3://bucket/qwen", "/models/qwen"))
    said = vllm.warnings(service(model=bucket, engine={"args": args}))
    assert [fault.path for fault in said] == ["spec.engine.args[0]"] * len(words)
    assert all(fault.message.startswith(word) for fault, word in zip(said, words, strict=True))
    assert vllm.warnings(service(model=folder, engine={"args": args})) == []


def test_a_role_without_instances_is_not_looked_at() -> None:
    spec: dict[str, Any] = {"prefill": {"replicas": 0, "args": ["--tokens-only", "--dtype=half"]},
                            "decode": {"args": ["--dtype=bfloat16"]}}
    assert vllm.warnings(service(**spec)) == []


def test_the_version_is_that_of_the_default_image() -> None:
    assert DEFAULT_IMAGE.partition(":v")[2].startswith(vllm.VERSION.removeprefix("vLLM ") + ".")
