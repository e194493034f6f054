"""Timelines from a router's record and engines' notes: one clock, in order, whatever is missing."""

from __future__ import annotations

import msgspec
import pytest

from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.timeline import First, Notes, Span, TracedAnswer, TransferSide
from xpyd_sidecar.router.observing import timeline
from xpyd_sidecar.router.observing.record import LegRecord, Record
from xpyd_sidecar.router.observing.timeline import EngineNotes

T = TransferId("a" * 32)


def record(**changes: object) -> Record:
    made = {"request_id": "r1", "transfer": T, "api": "completions", "stream": True, "arrived": 100.0, "arrived_unix": 5.0,
            "outcome": "ok", "status": 200, "first_at": 100.5, "last_at": 101.0, "tokens": 9, "prompt_tokens": 300,
            "legs": [LegRecord(Role.DECODE, InstanceName("d"), 1, 100.01, 100.5, 101.0, "2xx"),
                     LegRecord(Role.PREFILL, InstanceName("p"), 1, 100.01, 100.4, 100.4, "2xx")], **changes}
    return msgspec.convert(made, Record)


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def heard(ahead: float = 1000.0, clock: float = 50.0, side_clock: float = 50.0) -> list[EngineNotes]:
    base = 100.0 + ahead
    behind = clock - side_clock  # of a rank on another host
    sent = TransferSide(0, {"heard": base + 0.1 + behind, "done": base + 0.42 + behind},
                        [Span(base + 0.2 + behind, base + 0.21 + behind, 4096, 2, "tcp")],
                        [Span(base + 0.05 + behind, base + 0.4 + behind, 300)], side_clock)
    prefill = Notes(T, True, Attempt(1), 300, "ok", {"arrived": base + 0.02, "announced": base + 0.04}, (packed(sent),))
    came = TransferSide(0, {"asked": base + 0.06, "committed": base + 0.43},
                        [Span(base + 0.22, base + 0.22, 4096, 1, "tcp")], [Span(base + 0.07, base + 0.08, 8)], clock)
    decode = Notes(T, False, Attempt(1), 300, "ok", {"arrived": base + 0.02, "ended": base + 0.44}, (packed(came),),
                   packed(First(Span(base + 0.45, base + 0.47, 1), clock)))
    return [EngineNotes(TracedAnswer(InstanceName("p"), base, clock, (prefill,)), ahead, 0.001),
            EngineNotes(TracedAnswer(InstanceName("d"), base, clock, (decode,)), ahead, 0.001)]


@pytest.mark.parametrize(("ahead", "side_clock"), [(0.0, 50.0), (1e6, 50.0), (-70.0, 50.0), (3.0, -4e5)])
def test_everything_stands_on_the_routers_clock(ahead: float, side_clock: float) -> None:
    line = timeline.of_request(record(), heard(ahead, 50.0, side_clock))
    at = {(event.row, event.name): event for event in line.events}
    assert at["p", "prefill forward"].at == pytest.approx(0.05, abs=1e-6)
    assert at["p", "prefill forward"].seconds == pytest.approx(0.35, abs=1e-6)
    assert at["p", "push"].at == pytest.approx(0.2, abs=1e-6)
    assert at["d", "first decode forward"].at == pytest.approx(0.45, abs=1e-6)
    assert at["d", "forward of others"].at == pytest.approx(0.07, abs=1e-6)
    assert at["router", "decode's first event"].at == pytest.approx(0.5)
    assert at["d", "ended"].note == "ok"
    assert "4096 bytes over tcp, 2 pieces" in at["p", "push"].note
    assert [event.at for event in line.events] == sorted(event.at for event in line.events)
    assert (line.request, line.ttft_s, line.total_s, line.tokens) == ("r1", pytest.approx(0.5), pytest.approx(1.0), 9)


def test_clocks_of_one_host_are_not_set_by_the_wall_clock() -> None:
    line = timeline.of_request(record(), heard(0.0, 50.0, 50.0))
    moved = heard(0.0, 50.0, 50.0)
    told = moved[0].told
    side = msgspec.msgpack.decode(told.notes[0].ranks[0], type=TransferSide)
    stepped = msgspec.structs.replace(side, clock=50.02)
    notes = msgspec.structs.replace(told.notes[0], ranks=(packed(stepped),))
    moved[0] = moved[0]._replace(told=msgspec.structs.replace(told, notes=(notes,)))
    assert timeline.of_request(record(), moved).events == line.events


def test_without_engines_the_routers_part_is_there() -> None:
    line = timeline.of_request(record(queued_s=0.25), [])
    assert {event.row for event in line.events} == {"router"}
    assert ("queued", 0.25) in {(event.name, event.seconds) for event in line.events}
    assert {event.note for event in line.events if event.name.endswith("leg")} == {"to p 2xx", "to d 2xx"}


def test_a_transfer_of_another_router_begins_with_its_first_mark() -> None:
    line = timeline.of_transfer(T, heard(7.0))
    assert line is not None
    assert (line.request, line.outcome, line.prompt_tokens) == ("", "ok", 300)
    assert min(event.at for event in line.events) == pytest.approx(0.0, abs=1e-6)
    assert line.arrived_unix == pytest.approx(100.02 + 7.0 + 50.0)
    assert timeline.of_transfer(TransferId("b" * 32), heard()) is None


def test_the_last_and_the_slowest_are_found_among_those_that_went_to_engines() -> None:
    records = [record(request_id=str(n), first_at=100 + ttft) for n, ttft in enumerate((0.1, 0.9, 0.5))]
    refused = record(request_id="refused", legs=[])
    assert [one.request_id for one in timeline.select([*records, refused], "last", 2)] == ["2", "1"]
    assert [one.request_id for one in timeline.select([*records, refused], "slowest", 2)] == ["1", "2"]
