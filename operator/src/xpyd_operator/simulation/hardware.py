"""Engine models from data sheets: which model on which GPU, with which tensor-parallel size and link.

A step reads all weights and the KV once; prefill is bound by arithmetic (two operations per weight and token; attention
adds two per layer, hidden size and pair of tokens, halved by the causal mask, for scores and values each). Of a mixture
of experts a token multiplies with the active weights, while a batch reads all. With t devices arithmetic, memory and its
bandwidth are t times as much, and each layer has two all-reduces: 2 (t - 1) / t of the activations pass each device, and
each takes at least ``ALL_REDUCE_S``. Nothing here was measured: ``COMPUTE`` and ``BANDWIDTH`` are what kernels usually
reach.

GPUs: the data sheets of their makers, dense figures of one device (SXM or OAM where there are several forms): NVIDIA A100
(80 GB), H100, H200, H20, L40S, L4, HGX B200 / 8; AMD Instinct MI300X. ``peer``: bytes a second to the other devices, one
way (NVLink, Infinity Fabric, or PCIe 4.0 x16). Models: config.json of each on the hub (layers, heads times head size, KV
heads), parameters of its model card.
"""

from __future__ import annotations

import re

import msgspec

from xpyd_operator.errors import XpydError
from xpyd_operator.simulation.engine import EngineModel

COMPUTE, BANDWIDTH = 0.45, 0.7
"""What prefill reaches of a device's arithmetic, and decode of its memory's bandwidth."""
ALL_REDUCE_S = 10e-6
USABLE = 0.9
"""Share of the memory for weights and KV (``gpu_memory_utilization``)."""
LINK = 25e9
"""Bytes a second out of and into an instance: 200 Gb/s."""
COLD_START_S = 180.0
LARGE = 70e9
"""A device of so many bytes has chunks of 8,192 tokens, a smaller one of 2,048, as vLLM's defaults are."""


class GpuData(msgspec.Struct, frozen=True):
    """One device."""

    bf16: float
    """Operations a second."""
    fp8: float
    """0: it has none."""
    bandwidth: float
    """Bytes a second of its memory."""
    memory: float
    """Bytes."""
    peer: float


class ModelShape(msgspec.Struct, frozen=True):
    """What a model takes."""

    parameters: float
    active: float
    """Parameters that one token multiplies with."""
    layers: int
    hidden: int
    """Query heads times head size."""
    kv_bytes: float
    """KV of one token, in bf16."""


GPUS: dict[str, GpuData] = {
    "a100": GpuData(312e12, 0.0, 2.039e12, 80e9, 300e9),
    "h100": GpuData(989e12, 1979e12, 3.35e12, 80e9, 450e9),
    "h200": GpuData(989e12, 1979e12, 4.8e12, 141e9, 450e9),
    "h20": GpuData(148e12, 296e12, 4.0e12, 96e9, 450e9),
    "b200": GpuData(2250e12, 4500e12, 7.7e12, 180e9, 900e9),
    "mi300x": GpuData(1307e12, 2615e12, 5.3e12, 192e9, 448e9),
    "l40s": GpuData(362e12, 733e12, 0.864e12, 48e9, 32e9),
    "l4": GpuData(121e12, 242e12, 0.3e12, 24e9, 32e9),
}
MODELS: dict[str, ModelShape] = {
    "qwen3-0.6b": ModelShape(0.6e9, 0.6e9, 28, 2048, 114688),
    "qwen3-8b": ModelShape(8.2e9, 8.2e9, 36, 4096, 147456),
    "qwen3-14b": ModelShape(14.8e9, 14.8e9, 40, 5120, 163840),
    "qwen3-32b": ModelShape(32.8e9, 32.8e9, 64, 8192, 262144),
    "qwen3-30b-a3b": ModelShape(30.5e9, 3.3e9, 48, 4096, 98304),
    "qwen3-235b-a22b": ModelShape(235e9, 22e9, 94, 8192, 192512),
    "llama-3.1-8b": ModelShape(8.0e9, 8.0e9, 32, 4096, 131072),
    "llama-3.1-70b": ModelShape(70.6e9, 70.6e9, 80, 8192, 327680),
    "llama-3.3-70b": ModelShape(70.6e9, 70.6e9, 80, 8192, 327680),
}
FP8 = "-fp8"
_ANSWERS = re.compile(r"-(instruct|chat|base|thinking|it|\d{4})(?=-|$)")


def gpu_of(name: str) -> str:
    """The GPU that a name stands for, also as node labels have it (``NVIDIA-H100-80GB-HBM3``).

    Raises:
        XpydError: no such GPU; names those that there are.
    """
    words = re.split(r"[-_ ]+", name.lower())
    found = [each for each in GPUS if each in words]
    if not found:
        raise XpydError(f"no GPU {name}; there are {', '.join(GPUS)}, or give --engine FILE with its figures")
    return found[0]


def model_of(name: str) -> tuple[str, bool]:
    """The model that a name or hub id stands for, and whether its weights have eight bits.

    Raises:
        XpydError: no such model; names those that there are.
    """
    word = name.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    short = _ANSWERS.sub("", word)
    fp8 = short.endswith(FP8)
    found = short.removesuffix(FP8)
    if found not in MODELS:
        raise XpydError(f"no model {name}; there are {', '.join(MODELS)} (each with {FP8} too), or give --engine FILE with "
                        "the figures of an instance")
    return found, fp8


def roofline(
    model: str, gpu: str, tensor: int = 1, *, link: float = LINK, pods: int = 1, cold_start: float = COLD_START_S,
) -> EngineModel:
    """An instance of ``tensor`` devices.

    Args:
        model: a name or hub id, with ``-fp8`` at its end for weights and arithmetic in eight bits.
        gpu: a name, or a node label's value.
        tensor: tensor-parallel size.
        link: bytes a second out of and into the instance.
        pods: how many it spans.
        cold_start: seconds.

    Raises:
        XpydError: no such model or GPU, the GPU has no eight bits, the size does not fit, or the weights do not.
    """
    gpu = gpu_of(gpu)
    name, fp8 = model_of(model)
    shape, device = MODELS[name], GPUS[gpu]
    flops = device.fp8 if fp8 else device.bf16
    if not flops:
        raise XpydError(f"{gpu} computes nothing in fp8; leave {FP8} away, or take {', '.join(_with_fp8())}")
    if not 1 <= tensor <= 64:
        raise XpydError(f"a tensor-parallel size is 1 to 64, not {tensor}")
    weights = shape.parameters * (1 if fp8 else 2)
    room = device.memory * tensor * USABLE - weights
    if room < shape.kv_bytes * 1024:
        least = next((size for size in (2, 4, 8, 16, 32, 64)
                      if device.memory * size * USABLE - weights >= shape.kv_bytes * 1024), None)
        right = f"take --tp {least}" if least else "take a larger GPU"
        raise XpydError(f"{model} on {tensor} {gpu}: weights of {weights / 1e9:.0f} GB leave no room for KV in "
                        f"{device.memory * tensor * USABLE / 1e9:.0f} GB; {right}")
    arithmetic, reading = flops * COMPUTE * tensor, device.bandwidth * BANDWIDTH * tensor
    passing = 2 * shape.layers * shape.hidden * 2 * 2 * (tensor - 1) / tensor / device.peer
    return EngineModel(
        prefill_start=0.015,
        prefill_rate=1 / (2 * shape.active / arithmetic + passing),
        prefill_quadratic=2 * shape.layers * shape.hidden / arithmetic,
        step_base=weights / reading + 0.002 + (2 * shape.layers * ALL_REDUCE_S if tensor > 1 else 0.0),
        step_per_request=20e-6,
        step_per_token=shape.kv_bytes / reading,
        chunk=8192 if device.memory >= LARGE else 2048,
        kv_tokens=int(room / shape.kv_bytes),
        handover_per_token=shape.kv_bytes / shape.layers / link,
        kv_bytes=shape.kv_bytes,
        link=link,
        cold_start=cold_start,
        gpus=tensor,
        pods=pods,
    )


def _with_fp8() -> list[str]:
    return [name for name, device in GPUS.items() if device.fp8]


PRESETS: dict[str, EngineModel] = {
    "h200-8b": roofline("qwen3-8b", "h200"),
    "h200-32b": roofline("qwen3-32b", "h200"),
    "h200-70b-fp8": roofline("llama-3.1-70b-fp8", "h200"),
}
"""One H200 each."""


def preset(name: str) -> EngineModel:
    """One of ``PRESETS``.

    Raises:
        XpydError: there is none of this name.
    """
    if name not in PRESETS:
        raise XpydError(f"no engine model {name}; there are {', '.join(PRESETS)}, or give a file")
    return PRESETS[name]
