"""What one instance can do: the engine model of the simulation.

    prefill     start + (L - c) / rate + (L² - c²) * quadratic  seconds for a prompt of L tokens, c of them in the prefix
                                                                cache, one prompt after the other
    decode      base + n * per_request + kv * per_token         seconds of a step for n requests with kv tokens of KV
    both        max(base, prefill of the chunk) + n * per_request + kv * per_token
                                                                seconds of a step that computes a chunk of prompts besides:
                                                                weights are read once for both
    handover    latency + L * per_token                         seconds that the KV of a prompt adds after its prefill
    link        L * kv_bytes / link                             seconds that it takes the links of both instances, one
                                                                prompt after the other, from the prefill's beginning on

In a prefill instance chunks of several prompts take as long in all as one prompt after the other; that they share the
engine is left out. A request is admitted to decode while there is room for its whole context.

``hardware`` derives models from data sheets.
"""

from __future__ import annotations

from typing import NamedTuple

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
    chunk: int = 8192
    """Most tokens of one step, where prompts are computed beside a batch (``max_num_batched_tokens``)."""
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
    cold_spread: float = 0.0
    """A start takes so much more or less of ``cold_start`` at most, evenly; 0 to 1. A group is as late as its last pod."""
    cold_failures: float = 0.0
    """Share of the starts of a pod that fail at their end and begin anew; 0 to below 1."""
    switch: float = 2.0
    """From the end of an instance's old work until it serves in the other role."""
    gpus: int = 1
    """Devices of an instance: what an hour of it costs."""
    pods: int = 1
    """Pods of an instance, which start together."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise XpydError(f"engine model: {name} must be a number from 0 on, not {value}")
        for name in ("prefill_rate", "step_base", "max_requests", "chunk", "kv_tokens", "gpus", "pods"):
            if getattr(self, name) <= 0:
                raise XpydError(f"engine model: {name} must be above 0")
        if self.cold_spread > 1:
            raise XpydError(f"engine model: cold_spread must be at most 1, not {self.cold_spread}")
        if self.cold_failures > MOST_FAILURES:
            raise XpydError(f"engine model: cold_failures must be at most {MOST_FAILURES}, not {self.cold_failures}")

    def prefill_s(self, prompt: int, cached: int = 0) -> float:
        """Seconds that a prompt takes of which the first ``cached`` tokens are known."""
        return self.prefill_start + self.chunk_s(cached, prompt)

    def chunk_s(self, begin: int, end: int) -> float:
        """Seconds of computing that the tokens of a prompt from ``begin`` to ``end`` take."""
        return (end - begin) / self.prefill_rate + (end * end - begin * begin) * self.prefill_quadratic

    def step_s(self, requests: int, kv: float) -> float:
        """Seconds of one decode step."""
        return self.step_base + requests * self.step_per_request + kv * self.step_per_token

    def handover_s(self, prompt: int) -> float:
        """Seconds from the end of the prefill until decode may begin, over links that nobody else uses."""
        return self.handover + prompt * self.handover_per_token

    def link_s(self, tokens: int) -> float:
        """Seconds that the KV of so many tokens takes a link."""
        return tokens * self.kv_bytes / self.link if self.link else 0.0


MOST_FAILURES = 0.9
"""With more than that nothing ever starts."""


class Pools(NamedTuple):
    """The instances of both roles."""

    prefill: EngineModel
    decode: EngineModel

    @property
    def are_alike(self) -> bool:
        """An instance of one can become one of the other."""
        return self.prefill == self.decode

    @property
    def gpus(self) -> tuple[int, int]:
        """Devices of an instance of each role."""
        return self.prefill.gpus, self.decode.gpus

    @property
    def cold_start(self) -> float:
        """Seconds that the slower of both takes to start, on average."""
        return max(each.cold_start for each in self)


Engines = EngineModel | Pools
"""One model for both roles, or one of each."""


def pools_of(engines: Engines) -> Pools:
    """One of each role."""
    return engines if isinstance(engines, Pools) else Pools(engines, engines)
