"""What an exchange is given: its limits, and what the client has of a stream (``exchange``)."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec


class RequestLimits(msgspec.Struct, frozen=True):
    """Bounds of every request. Times in seconds."""

    request_s: float
    """From its arrival to the end of its answer."""
    pair_s: float
    """How long decode may wait for prefill to announce its KV, all prefill attempts together."""
    load_s: float = 0.0
    """How much longer prefill may take for it. Where it makes no progress decode ends that wait: here nobody sees it."""
    on_no_prefill: Literal["decode", "reject"] = "decode"
    prefill_legs: int = 3
    decode_legs: int = 3
    stream_legs: int = 5
    """Decode legs of a stream that has begun, from the last on that brought it further: nobody but the router can ask
    again for the rest of it."""
    linger_s: float = 2.0
    """How long a prefill leg may take to end by itself after the answer (its KV has arrived by then)."""

    @property
    def prefill_s(self) -> float:
        """What a prefill leg may take."""
        return self.pair_s + self.load_s


class Course(Protocol):
    """A stream that may go on elsewhere, and what the client has of it (``generation.Generation``)."""

    @property
    def goes_on(self) -> bool:
        """Whether it can."""

    def tail(self) -> bytes | None:
        """What is missing, where the client has its finish reason and the rest can be made without an engine."""
