"""What an exchange is given, hears and says: its limits, its events and its instructions."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import msgspec

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason, HttpFault
from xpyd_sidecar.router.fleet.member import EngineTarget

# ---- given


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


class ResumableStream(Protocol):
    """A stream that may go on elsewhere, and what the client has of it (``generation.Generation``)."""

    @property
    def goes_on(self) -> bool:
        """Whether it can."""

    def tail(self) -> bytes | None:
        """What is missing, where the client has its finish reason and the rest can be made without an engine."""


# ---- events


class AttemptBegun(msgspec.Struct, frozen=True):
    """The first event of decode's stream is there, and it is no error."""

    leg: int


class AttemptAnswered(msgspec.Struct, frozen=True):
    """A whole answer is there."""

    leg: int
    status: int
    aborted: bool = False
    """A 2xx answer whose finish reason is ``abort``."""


class AttemptEnded(msgspec.Struct, frozen=True):
    """The relayed answer came to its proper end. ``failure``: what it says itself of how the engine failed;
    ``client_fault``: it says that the request was wrong.
    """

    leg: int
    failure: str = ""
    client_fault: bool = False

    @property
    def outcome(self) -> str:
        """Of its request."""
        return "failed" if self.failure else "client_error" if self.client_fault else "ok"


class AttemptFailed(msgspec.Struct, frozen=True):
    """A leg will give nothing more."""

    leg: int
    kind: FailureKind
    reason: FailureReason


class AttemptLeaves(msgspec.Struct, frozen=True):
    """The instance of a leg ends soon. It still works."""

    leg: int


class AttemptStalls(msgspec.Struct, frozen=True):
    """A leg is silent for too long, or its instance was found to hang. It may still answer: it is left for another alone.

    ``free``: the retry budget does not pay for that, since it is known to hang.
    """

    leg: int
    free: bool = False


class GivenUp(msgspec.Struct, frozen=True):
    """Nobody waits for the answer any longer, or no engine may be asked. ``fault``: for its client; None: it has gone."""

    outcome: str
    fault: HttpFault | None = None


class DeadlinePassed(msgspec.Struct, frozen=True):
    """``Exchange.deadline`` has come."""


LegEvent = AttemptBegun | AttemptAnswered | AttemptEnded | AttemptFailed
LEG_EVENTS = frozenset(get_args(LegEvent))
Event = LegEvent | AttemptLeaves | AttemptStalls | GivenUp | DeadlinePassed

# ---- instructions


class SendAttempt(msgspec.Struct, frozen=True):
    """Open a leg. ``params`` is None where decode also prefills."""

    leg: int
    role: Role
    target: EngineTarget
    params: legs.Leg | None


class CancelAttempt(msgspec.Struct, frozen=True):
    """Close a leg's connection, so that the engine aborts it; no event of it is wanted any more."""

    leg: int
    attempt: int
    """The last one of its transfer."""


class Resume(msgspec.Struct, frozen=True):
    """The legs that follow go on behind what the client has: derive the request from it."""


class Relay(msgspec.Struct, frozen=True):
    """Send the client a response head unless it has one, what came of this leg's body, and all that follows."""

    leg: int


class Pass(msgspec.Struct, frozen=True):
    """Send the client the whole answer of this leg as it is."""

    leg: int


class Fail(msgspec.Struct, frozen=True):
    """Answer with an error; a stream that the client has begun to read ends with it, as an event."""

    fault: HttpFault


class Complete(msgspec.Struct, frozen=True):
    """The relayed stream is whole, with ``tail`` (whole events) behind it."""

    tail: bytes = b""


class RequestOver(msgspec.Struct, frozen=True):
    """Nothing is open any more; ``outcome`` for metrics and log."""

    outcome: str
    detail: str = ""


Instruction = SendAttempt | CancelAttempt | Resume | Relay | Pass | Fail | Complete | RequestOver
