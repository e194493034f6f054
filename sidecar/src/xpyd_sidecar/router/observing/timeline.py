"""One request as a timeline: the router's record of it, and what the engines have noted, on the router's clock. Pure.

    engine's clock - ahead = router's clock          (``ahead`` by an exchange of messages: ``endpoints.traces``)
    rank's clock + (rank's wall - engine's wall) = engine's clock, for ranks on other hosts only: within one host all
    processes have the same monotonic clock
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from xpyd_sidecar.contract.ids import Role, TransferId
from xpyd_sidecar.contract.timeline import Event, First, Notes, Span, Timeline, TracedAnswer, TransferSide
from xpyd_sidecar.router.observing.record import Record

SAME_HOST_S: Final = 0.05
"""Clocks of one host differ by less, whoever asks them; those of two hosts count from when these were started."""
_SIDE: Final = msgspec.msgpack.Decoder(TransferSide)
_FIRST: Final = msgspec.msgpack.Decoder(First)
_SENDS: Final = {"arrived": "prefill leg comes", "announced": "ANNOUNCE", "ended": "ended"}
_RECEIVES: Final = {"arrived": "decode leg comes", "announced": "ANNOUNCE heard", "allocated": "blocks allocated",
                    "loaded": "loaded", "admitted": "admitted", "ended": "ended"}
_RANKS: Final = {"heard": "ASK heard", "done": "confirmed", "asked": "ASK", "committed": "committed"}


class EngineNotes(NamedTuple):
    """An engine's answer. ``ahead``: its monotonic clock minus the router's; ``within_s``: how far that may be off."""

    told: TracedAnswer
    ahead: float
    within_s: float


def select(records: Sequence[Record], which: str, number: int) -> list[Record]:
    """The ``last`` or the ``slowest`` ones of those that went to engines, the latest or slowest first."""
    sent = [record for record in records if record.legs]
    if which == "slowest":
        sent.sort(key=lambda record: -(record.measures()[1] or record.measures()[0]))
    else:
        sent.reverse()
    return sent[:number]


def of_request(record: Record, heard: Iterable[EngineNotes]) -> Timeline:
    """What is known of a request."""
    seconds, ttft, _ = record.measures()
    events = [*_routed(record), *(event for one in heard for event in _noted(one, record.transfer, record.arrived))]
    return Timeline(record.request_id, record.transfer, record.outcome, record.arrived_unix, ttft, seconds,
                    record.prompt_tokens, record.tokens, _ordered(events))


def of_transfer(transfer: TransferId, heard: Sequence[EngineNotes]) -> Timeline | None:
    """A transfer whose request went through another router: what the engines know, from their first mark on."""
    marks = [(min(notes.marks.values()) - one.ahead, one) for one in heard for notes in one.told.notes
             if notes.transfer == transfer and notes.marks]
    if not marks:
        return None
    base, one = min(marks, key=lambda mark: mark[0])
    events = _ordered(event for each in heard for event in _noted(each, transfer, base))
    outcome = next((notes.outcome for each in heard for notes in each.told.notes
                    if notes.transfer == transfer and not notes.sends), "")
    tokens = max(notes.tokens for each in heard for notes in each.told.notes if notes.transfer == transfer)
    return Timeline("", transfer, outcome, base + one.ahead + one.told.clock, None,
                    max(event.at + event.seconds for event in events), tokens or -1, -1, events)


def _ordered(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: (event.at, -event.seconds)))


def _routed(record: Record) -> Iterable[Event]:
    def since(at: float) -> float:
        return at - record.arrived

    yield Event("router", "request", 0.0, max(0.0, since(record.last_at)), note=record.outcome)
    if record.queued_s > 0:
        yield Event("router", "queued", 0.0, record.queued_s)
    for leg in record.legs:
        ended = record.last_at if math.isnan(leg.ended) else leg.ended
        note = " ".join(part for part in (f"to {leg.instance}", f"attempt {leg.attempt}" if leg.attempt > 1 else "",
                                          leg.result) if part)
        yield Event("router", f"{leg.role} leg", since(leg.opened), max(0.0, ended - leg.opened), note=note)
        if leg.role is Role.DECODE and not math.isnan(leg.first_at):
            yield Event("router", "decode's first event", since(leg.first_at))


def _noted(one: EngineNotes, transfer: TransferId, base: float) -> Iterable[Event]:
    for notes in one.told.notes:
        if notes.transfer == transfer:
            yield from _of_engine(one, notes, base + one.ahead)


def _of_engine(one: EngineNotes, notes: Notes, base: float) -> Iterable[Event]:
    row, names = str(one.told.instance), _SENDS if notes.sends else _RECEIVES
    for mark, at in notes.marks.items():
        note = notes.outcome if mark == "ended" else f"{notes.tokens} tokens" if mark == "arrived" else ""
        yield Event(row, names.get(mark, mark), at - base, note=note)
    for raw in notes.ranks:
        side = _SIDE.decode(raw)
        start = base - _elsewhere(side.clock, one.told.clock)
        where = f"{row}/{side.rank}" if len(notes.ranks) > 1 else row
        for mark, at in side.marks.items():
            yield Event(where, _RANKS.get(mark, mark), at - start)
        for span in side.forwards:
            yield _event(where, "prefill forward" if notes.sends else "forward of others", span, start, "tokens")
        for span in side.pieces:
            yield _event(where, "push" if notes.sends else "came", span, start, "bytes")
    if notes.first:
        first = _FIRST.decode(notes.first)
        yield _event(row, "first decode forward", first.forward, base - _elsewhere(first.clock, one.told.clock), "tokens")


def _elsewhere(clock: float, engine: float) -> float:
    """What to add to a rank's times to have them on its engine's clock."""
    return clock - engine if abs(clock - engine) > SAME_HOST_S else 0.0


def _event(row: str, name: str, span: Span, base: float, unit: str) -> Event:
    note = f"{span.size} {unit}" + (f" over {span.link}" if span.link else "") + (
        f", {span.count} pieces" if span.count > 1 else "")
    return Event(row, name, span.at - base, max(0.0, span.until - span.at), span.size, note)
