"""An exchange driven by hand: events in, what it says in short words; instances, a stream and a budget that tests set."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.fleet.member import EngineTarget, FleetMember, Pair
from xpyd_sidecar.router.serving.exchange import Exchange
from xpyd_sidecar.router.serving.instructions import (
    AttemptAnswered,
    AttemptBegun,
    AttemptFailed,
    CancelAttempt,
    Complete,
    Event,
    Fail,
    Instruction,
    Pass,
    Relay,
    RequestLimits,
    RequestOver,
    ResumableStream,
    Resume,
    SendAttempt,
)


def word_of(instruction: Instruction) -> str:
    """Its first word."""
    return type(instruction).__name__.removesuffix("Attempt").lower()


def target(name: str) -> EngineTarget:
    return EngineTarget(InstanceName(name), Incarnation(f"i-{name}"), Fingerprint("f"), HostPort(f"{name}:1"),
                        HostPort(f"{name}:2"), FleetMember(InstanceName(name)))


class FakePicks:
    """The first instance of each role that is not left out."""

    def __init__(self, prefills: int = 2, decodes: int = 2) -> None:
        self.prefills = [f"p{i}" for i in range(prefills)]
        self.decodes = [f"d{i}" for i in range(decodes)]

    def pair(self, *, alone: bool, not_prefill: Collection[InstanceName] = (),
             not_decode: Collection[InstanceName] = ()) -> Pair | None:
        decodes = [name for name in self.decodes if name not in not_decode]
        if not decodes:
            return None
        prefill = None if alone else self.prefill_for(target(decodes[0]), not_prefill)
        return Pair(target(decodes[0]), prefill)

    def prefill_for(self, decode: EngineTarget, not_prefill: Collection[InstanceName] = ()) -> EngineTarget | None:
        return next((target(name) for name in self.prefills if name not in not_prefill), None)

    def why_not(self, role: Role) -> str:
        return f"no {role}"


class FakeStream:
    """A stream that can go on elsewhere, until a test says otherwise."""

    def __init__(self) -> None:
        self.goes_on = True
        self.rest: bytes | None = None

    def tail(self) -> bytes | None:
        return self.rest


class FakeBudget:
    """So many retries."""

    def __init__(self, left: int) -> None:
        self.left = left

    def may_retry(self, now: float) -> bool:
        assert now >= 0
        self.left -= 1
        return self.left >= 0


class Drive:
    """An exchange, and what it said, in short words."""

    def __init__(self, picks: FakePicks | None = None, alone: bool = False, stream: ResumableStream | None = None,
                 budget: FakeBudget | None = None, **limits: Any) -> None:
        self.now = 0.0
        self.exchange = Exchange(TransferId("0" * 32), picks or FakePicks(),
                                 RequestLimits(**({"request_s": 100.0, "pair_s": 10.0} | limits)),
                                 alone=alone, now=0.0, stream=stream,
                                 budget=budget or FakeBudget(1 << 30))
        self.sent: list[SendAttempt] = []
        self.begun = False
        self.said = self._note(self.exchange.start(0.0))

    def _note(self, out: list[Instruction]) -> list[str]:
        words = []
        for i in out:
            match i:
                case SendAttempt(leg=leg, target=to, params=params):
                    self.sent.append(i)
                    words.append(f"send {leg} {to.instance}" + (f" a{params.attempt}" if params else " alone"))
                case Fail(fault=fault):
                    words.append(f"{'break' if self.begun else 'refuse'} {fault.status}")
                case RequestOver(outcome=outcome):
                    words.append(f"over {outcome}")
                case CancelAttempt(leg=leg) | Relay(leg=leg) | Pass(leg=leg):
                    self.begun = self.begun or isinstance(i, Relay)
                    words.append(f"{word_of(i)} {leg}")
                case Complete(tail=tail):
                    words.append("complete" + (f" {tail.decode()}" if tail else ""))
                case Resume():
                    words.append("resume")
        return words

    def on(self, event: Event, at: float | None = None) -> list[str]:
        self.now = self.now if at is None else at
        return self._note(self.exchange.handle(event, self.now))


def lost(leg: int, kind: FailureKind = FailureKind.LOST) -> AttemptFailed:
    return AttemptFailed(leg, kind, FailureReason("it broke", "at 10.1.2.3:8000"))


def begun(**options: Any) -> Drive:
    """A stream that is being relayed, and prefill's leg ended."""
    drive = Drive(**options)
    drive.on(AttemptAnswered(1, 200))
    assert drive.on(AttemptBegun(2)) == ["relay 2"]
    return drive
