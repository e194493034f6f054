"""The models that are served, with the arguments of their engines on a GPU and, to try the driver itself, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

EXACT: Final = ("--dtype", "float32", "--attention-backend", "TRITON_ATTN", "--enforce-eager")
"""The same bits at every concurrency."""
GRAPHS: Final = ("-cc.mode=0", "-cc.cudagraph_mode=FULL_DECODE_ONLY")
"""CUDA graphs for decode, without torch's compiler."""
ON_CPU: Final = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")


class Model(NamedTuple):
    """``folder``: of the model's files. ``context``: its longest prompt with answer, in tokens. ``kv``: of the GPU, for the
    KV cache. ``kv_token``: bytes of KV a token, all layers.
    """

    folder: str
    args: tuple[str, ...]
    context: int
    kv: str = "1G"
    kv_token: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    """Lengths of prompts that are timed, and how often each."""


MODELS: Final[Mapping[str, Model]] = MappingProxyType({
    "llama": Model("llama", ("--dtype", "bfloat16", *GRAPHS), 2048),
    "demo": Model("llama", EXACT, 1024),
    "gemma": Model("gemma", EXACT, 2048),
    "granite": Model("granite", (*EXACT, "--no-enable-prefix-caching"), 2048),
    "big": Model("big", ("--load-format", "dummy", "--max-num-batched-tokens", "8192", "--no-enable-prefix-caching",
                         *GRAPHS), 36_000, "8G", 36 * 2 * 8 * 128 * 2,
                 ((8192, 7), (1024, 7), (4096, 7), (256, 7), (16_384, 5), (32_768, 5))),
})
TRIAL: Final = Model("llama", (), 1024, lengths=((256, 5), (64, 5), (700, 5)), kv_token=4 * 2 * 2 * 32 * 4)
"""Stands for each of them on a CPU."""


def arguments(model: Model, *, cpu: bool) -> list[str]:
    """Of vLLM's server, for each of its engines."""
    if cpu:
        return [*ON_CPU, *(("--no-enable-prefix-caching",) if "--no-enable-prefix-caching" in model.args else ())]
    return [*model.args, "--max-model-len", str(model.context), "--gpu-memory-utilization", "0.05",
            "--kv-cache-memory-bytes", model.kv]


def environment(*, cpu: bool) -> dict[str, str]:
    """Of every engine. flashinfer does not travel."""
    common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if cpu:
        return {**common, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**common, "OMP_NUM_THREADS": "2", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
