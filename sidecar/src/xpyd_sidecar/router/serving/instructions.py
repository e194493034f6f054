"""What an exchange hears and says: its events and its instructions."""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.fleet.target import EngineTarget
from xpyd_sidecar.router.stream.failures import FailureKind, FailureReason

# ---- events


class Begun(msgspec.Struct, frozen=True):
    """The first event of decode's stream is there, and it is no error."""

    leg: int


class Answered(msgspec.Struct, frozen=True):
    """A whole answer is there."""

    leg: int
    status: int
    aborted: bool = False
    """A 2xx answer whose finish reason is ``abort``."""


class AttemptEnded(msgspec.Struct, frozen=True):
    """The relayed answer came to its proper end. ``failure``: what it says itself of how the engine failed."""

    leg: int
    failure: str = ""


class AttemptFailed(msgspec.Struct, frozen=True):
    """A leg will give nothing more."""

    leg: int
    kind: FailureKind
    reason: FailureReason


class AttemptLeaves(msgspec.Struct, frozen=True):
    """The instance of a leg ends soon. It still works."""

    leg: int


class GivenUp(msgspec.Struct, frozen=True):
    """Nobody waits for the answer any longer, or no engine may be asked. ``fault``: for its client; None: it has gone."""

    outcome: str
    fault: HttpFault | None = None


class DeadlinePassed(msgspec.Struct, frozen=True):
    """``Exchange.deadline`` has come."""


LegEvent = Begun | Answered | AttemptEnded | AttemptFailed
Event = LegEvent | AttemptLeaves | GivenUp | DeadlinePassed

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
