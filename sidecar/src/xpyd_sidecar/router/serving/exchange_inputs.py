"""What an exchange is given: its limits, and whom it asks (``exchange``).

Belongs here: interfaces and bounds. Does not belong here: who fulfils them: ``picker.Selection`` and the classes around it
are ``Picks``, ``retry_budget.RetryBudget`` is a ``RetryAllowance``, ``serving.generation.Generation`` a ``Course``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Protocol

import msgspec

from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.router.fleet.target import EngineTarget, Pair


class RequestLimits(msgspec.Struct, frozen=True):
    """Bounds of every request. Times in seconds."""

    request_s: float
    """From its arrival to the end of its answer."""
    pair_s: float
    """How long decode may wait for prefill to announce its KV, all prefill attempts together."""
    load_s: float = 0.0
    """How much longer prefill may take for it. Where it makes no progress decode ends that wait: here nobody sees it."""

    @property
    def prefill_s(self) -> float:
        """What a prefill leg may take."""
        return self.pair_s + self.load_s

    on_no_prefill: Literal["decode", "reject"] = "decode"
    prefill_legs: int = 3
    decode_legs: int = 3
    stream_legs: int = 5
    """Decode legs of a stream that has begun, from the last on that brought it further: nobody but the router can ask
    again for the rest of it."""
    error_retries: int = 1
    """How often a decode engine's 5xx is answered by trying elsewhere."""
    linger_s: float = 2.0
    """How long a prefill leg may take to end by itself after the answer (its KV has arrived by then)."""


class Picks(Protocol):
    """What the exchange asks for its request (``picker.Selection``)."""

    def pair(self, *, alone: bool, not_prefill: Collection[InstanceName] = (),
             not_decode: Collection[InstanceName] = ()) -> Pair | None:
        """Decode and prefill."""

    def prefill_for(self, decode: EngineTarget, not_prefill: Collection[InstanceName] = ()) -> EngineTarget | None:
        """Another prefill for a waiting decode leg."""

    def why_not(self, role: Role) -> str:
        """Why nobody can be picked."""


class Course(Protocol):
    """A stream that may go on elsewhere, and what the client has of it."""

    @property
    def goes_on(self) -> bool:
        """Whether it can."""

    def tail(self) -> bytes | None:
        """What is missing, where the client has its finish reason and the rest can be made without an engine."""


class RetryAllowance(Protocol):
    """Retries of all requests together (``retry_budget.RetryBudget``)."""

    def may_retry(self, now: float) -> bool:
        """Whether one may be made now; if so it is taken."""


class Boundless:
    """A budget that never ends."""

    def may_retry(self, now: float) -> bool:  # noqa: ARG002 (the protocol's name)
        """Yes."""
        return True
