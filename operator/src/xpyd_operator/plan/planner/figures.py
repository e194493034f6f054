"""What was observed within one interval, and what is aimed for. Times in seconds, lengths in tokens."""

from __future__ import annotations

import msgspec


class RoleFigures(msgspec.Struct, frozen=True):
    """One role, averaged over the interval."""

    ready: int = 0
    """Instances that serve, at its end."""
    busy: float = 0.0
    """Instances that had work."""
    running: float = 0.0
    """Requests in the engines' batches."""
    kv_usage: float = 0.0
    """Share of KV in use, 0 to 1, mean of the instances that had work."""

    @property
    def batch(self) -> float:
        """Requests in the batch of an instance that has work; 0 where none has."""
        return self.running / self.busy if self.busy > 0 else 0.0


class Figures(msgspec.Struct, frozen=True):
    """What routers and instances told of one interval, added up."""

    over_s: float
    arrivals: int = 0
    arrived_tokens: float = 0.0
    """Prompt tokens of those that arrived, as their size tells; the exact lengths are known when requests end."""
    ended: int = 0
    """Requests that ended well, of which lengths are known."""
    prompt_tokens: int = 0
    """Of those that ended."""
    prompt_squares: float = 0.0
    """Sum of the squared prompt lengths."""
    output_tokens: int = 0
    cached_share: float = 0.0
    """Of the prompt tokens that prefill instances read, those that they did not compute, as their prefix caches had them or
    decode sent them; 0 to 1, and 0 also where that is not told.
    """
    queued: int = 0
    """Requests that wait for a prefill instance at the end of the interval, in routers and engines."""
    link_bytes: float = 0.0
    """KV that came into decode instances within the interval, bytes; 0: none, or that is not told."""
    parked: int = 0
    """Requests that are through prefill and wait at decode, at the end of the interval: for their KV, or for room."""
    handover_s: float = 0.0
    """Mean from the end of the prefill until decode's first event: it grows when decode has no room."""
    ttft_p95: float = 0.0
    """0: nothing was measured."""
    tpot_p95: float = 0.0
    tpot_mean: float = 0.0
    tokens_per_step: float = 1.0
    """Of one request at decode: 1 and the drafts that were accepted."""
    prefill: RoleFigures = RoleFigures()
    decode: RoleFigures = RoleFigures()


class Goals(msgspec.Struct, frozen=True):
    """What is aimed for, and what a change takes."""

    ttft_s: float | None = None
    """95th percentile; None: no goal."""
    tpot_s: float | None = None
    interval_s: float = 30.0
    late_cost: float = 10.0
    """What a late request costs, in requests that are answered in the same instance time; from 1 on."""
    cold_start_s: float = 180.0
    """From the wish for an instance until it serves, as seen before."""
    switching: bool = True
    """An instance can take the other role."""


class Bounds(msgspec.Struct, frozen=True):
    """Which counts may be chosen."""

    prefill: tuple[int, int] = (1, 1000)
    decode: tuple[int, int] = (1, 1000)
    total: int | None = None
