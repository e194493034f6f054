"""What one instance can do: the engine model of the simulation.

    prefill     start + L / rate + L² * quadratic               seconds for a prompt of L tokens, one prompt after the other
    decode      base + n * per_request + kv * per_token         seconds of a step for n requests with kv tokens of KV
    handover    latency + L * per_token                         seconds that the KV of a prompt adds after its prefill
    link        L * kv_bytes / link                             seconds that it takes the links of both instances, one
                                                                prompt after the other, from the prefill's beginning on

Chunked prefill of several prompts at once takes as long in all as one after the other; that it shares the engine among them
is left out. A request is admitted to decode while there is room for its whole context.

``roofline`` derives a model from what is known of device and weights: a step reads all weights and the KV once, prefill is
bound by arithmetic (two operations per weight and token; attention adds two per layer, hidden size and pair of tokens,
halved by the causal mask, for scores and values each). ``calibrated`` takes measured figures instead.
"""

from __future__ import annotations

import msgspec

from xpyd_operator.errors import XpydError


class EngineModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance. Times in seconds, lengths in tokens."""

    prefill_start: float = 0.01
    """Fixed part of a prefill."""
    prefill_rate: float
    """Tokens a second of short prompts."""
    prefill_quadratic: float = 0.0
    """Seconds per squared token: attention."""
    step_base: float
    """A decode step with an empty batch: reading the weights."""
    step_per_request: float = 0.0
    step_per_token: float = 0.0
    """Per token of KV in the batch."""
    max_requests: int = 256
    """Most requests in decode's batch (``max_num_seqs``)."""
    kv_tokens: int
    """Tokens of KV that one instance holds."""
    handover: float = 0.01
    handover_per_token: float = 0.0
    """What is left to send when the prefill is over."""
    kv_bytes: float = 0.0
    """KV of one token."""
    link: float = 0.0
    """Bytes a second out of a prefill instance, and into a decode instance; 0: as many as there are."""
    cold_start: float = 120.0
    """From the wish for an instance until it serves."""
    switch: float = 2.0
    """From the end of an instance's old work until it serves in the other role."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise XpydError(f"engine model: {name} must be a number from 0 on, not {value}")
        for name in ("prefill_rate", "step_base", "max_requests", "kv_tokens"):
            if getattr(self, name) <= 0:
                raise XpydError(f"engine model: {name} must be above 0")

    def prefill_s(self, prompt: int) -> float:
        """Seconds that a prompt takes."""
        return self.prefill_start + prompt / self.prefill_rate + prompt * prompt * self.prefill_quadratic

    def step_s(self, requests: int, kv: float) -> float:
        """Seconds of one decode step."""
        return self.step_base + requests * self.step_per_request + kv * self.step_per_token

    def handover_s(self, prompt: int) -> float:
        """Seconds from the end of the prefill until decode may begin, over links that nobody else uses."""
        return self.handover + prompt * self.handover_per_token

    def link_s(self, prompt: int) -> float:
        """Seconds that the KV of a prompt takes a link."""
        return prompt * self.kv_bytes / self.link if self.link else 0.0


def roofline(
    *, parameters: float, weight_bytes: float, layers: int, hidden: int, kv_bytes: float, flops: float, bandwidth: float,
    memory: float, compute_share: float = 0.45, bandwidth_share: float = 0.7, link: float = 25e9, cold_start: float = 180.0,
) -> EngineModel:
    """From the data sheet.

    Args:
        parameters: of the model.
        weight_bytes: all weights together.
        layers: of the model.
        hidden: query heads times head size.
        kv_bytes: KV of one token.
        flops: operations a second of the device in the weights' type.
        bandwidth: bytes a second of its memory.
        memory: bytes of it.
        compute_share: what prefill reaches of ``flops``.
        bandwidth_share: what decode reaches of ``bandwidth``.
        link: bytes a second out of and into an instance.
        cold_start: seconds.
    """
    arithmetic, reading = flops * compute_share, bandwidth * bandwidth_share
    return EngineModel(
        prefill_start=0.015,
        prefill_rate=arithmetic / (2 * parameters),
        prefill_quadratic=2 * layers * hidden / arithmetic,
        step_base=weight_bytes / reading + 0.002,
        step_per_request=20e-6,
        step_per_token=kv_bytes / reading,
        max_requests=256,
        kv_tokens=int((memory * 0.9 - weight_bytes) / kv_bytes),
        handover=0.01,
        handover_per_token=kv_bytes / layers / link,
        kv_bytes=kv_bytes,
        link=link,
        cold_start=cold_start,
    )


_H200 = {"bandwidth": 4.8e12, "memory": 141e9}
PRESETS: dict[str, EngineModel] = {
    "h200-8b": roofline(parameters=8.2e9, weight_bytes=16.4e9, layers=36, hidden=4096, kv_bytes=147456, flops=989e12,
                        **_H200),
    "h200-32b": roofline(parameters=32.8e9, weight_bytes=65.6e9, layers=64, hidden=8192, kv_bytes=262144, flops=989e12,
                         **_H200),
    "h200-70b-fp8": roofline(parameters=70.6e9, weight_bytes=70.6e9, layers=80, hidden=8192, kv_bytes=327680, flops=1979e12,
                             **_H200),
}
"""One H200 (989 TFLOPS bf16, 1979 fp8, 141 GB at 4.8 TB/s) and dense models shaped as Qwen3 8B and 32B and Llama 70B."""


def preset(name: str) -> EngineModel:
    """One of ``PRESETS``.

    Raises:
        XpydError: there is none of this name.
    """
    if name not in PRESETS:
        raise XpydError(f"no engine model {name}; there are {', '.join(PRESETS)}, or give a file")
    return PRESETS[name]
