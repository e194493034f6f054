"""What engines tell of a transfer when they are asked over their control sockets: real threads and sockets, but no vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from connector_sides import KEY, Engine, decode_leg, idle, making, prefill_leg, request, until

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import HostPort, InstanceName, TransferId
from xpyd_sidecar.contract.timeline import First, TransferSide
from xpyd_sidecar.router.endpoints.traces import ask

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    with making(lambda name, **options: Engine(name, tmp_path, **copies, **options)) as build:
        yield build


@pytest.mark.parametrize("tensor", [1, 2])
def test_both_sides_of_a_transfer_in_two_chunks(make: Callable[..., Engine], tensor: int) -> None:
    p, d = make("p", tensor=tensor), make("d", tensor=tensor)
    transfer = TransferId(uuid.uuid4().hex)
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([5, 9, 3], prompt=7)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([5, 9, 3],), 0)
    p.step(new=((theirs, [5, 9, 3], 0, 32),))
    p.step(cached=((theirs, [], 32, 8),))
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 16) == (24, True), d)
    d.scheduler.on_allocated(ours, ([30, 11, 12],), 24)
    until(lambda: d.recved, p, d)
    d.step(new=((ours, [30, 11, 12], 39, 1),))
    until(lambda: idle(p) and idle(d), p, d)

    engines = {HostPort(p.peer().control): InstanceName("p"), HostPort(d.peer().control): InstanceName("d")}
    heard, silent = ask(KEY, engines, (transfer,), 20.0)
    assert silent == {}
    assert [one.within_s for one in heard] == [0.0, 0.0], "one host, one clock"
    notes = {one.sends: one for each in heard for one in each.told.notes}
    for sends, marks in ((True, ["arrived", "announced", "ended"]),
                         (False, ["arrived", "announced", "allocated", "loaded", "ended", "admitted"])):
        assert (sorted(notes[sends].marks), notes[sends].outcome, notes[sends].tokens) == (sorted(marks), "ok", 41)
    sides = {sends: [msgspec.msgpack.decode(raw, type=TransferSide) for raw in notes[sends].ranks]
             for sends in (True, False)}
    assert [sorted(one.rank for one in sides[sends]) for sends in (True, False)] == [list(range(tensor))] * 2
    for sent, came in zip(*(sorted(sides[sends], key=lambda one: one.rank) for sends in (True, False)), strict=True):
        assert [span.size for span in sent.forwards] == [32, 8]
        assert sent.forwards[-1].until <= sent.marks["done"]
        assert sum(span.size for span in sent.pieces) == 3 * 3 * 512, "all that decode was told of"
        assert sum(span.size for span in came.pieces) == 2 * 3 * 512, "it has the first block already"
        assert {span.link for span in (*sent.pieces, *came.pieces)} <= {"tcp", "shm"}
        assert came.marks["asked"] <= sent.marks["heard"] <= sent.marks["done"]
        assert sent.marks["heard"] <= came.marks["committed"], "at decode's next step, perhaps after DONE was heard"
    assert sum(span.size for one in sides[False] for span in one.pieces) == d.counts[metrics.LOADED_BYTES]
    first = msgspec.msgpack.decode(notes[False].first, type=First)
    assert notes[False].marks["admitted"] <= first.forward.at <= first.forward.until
    assert d.counts[metrics.WAIT_SECONDS] > 0
    assert metrics.RETRIES not in d.counts
