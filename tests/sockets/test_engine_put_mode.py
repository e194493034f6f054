"""Mode put: a step ends when its copies are taken, and what is late holds up no step after it."""

from __future__ import annotations

import threading
import time

import pytest
from manifest_ranks import DecodeRank, PrefillRank, key, wait_until

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.engine.worker.put_mode import PutMode, Tally
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.offers import Push


def push(which: Key, holder: str = "d") -> Push:
    return Push(which, 0, (1,), InstanceName(holder))


def test_the_step_goes_on_when_all_copies_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    put, waits, wait = PutMode(20, 60), threading.Event(), Tally.wait_none
    gone = [put.tally(key(1)) for _ in range(2)]

    def waiting(tally: Tally, seconds: float) -> bool:
        waits.set()
        return wait(tally, seconds)

    def leave() -> None:
        assert waits.wait(20)
        time.sleep(0.05)
        for one in gone:
            one()

    monkeypatch.setattr(Tally, "wait_none", waiting)
    left = threading.Thread(target=leave)
    left.start()
    counts = put.wait_left([push(key(1))])
    left.join()
    assert metrics.PUT_LATE not in counts
    assert counts[metrics.PUT_WAIT_SECONDS] > 0.04


def test_a_late_transfer_goes_on_without_waiting_and_so_do_others_of_its_peer() -> None:
    put = PutMode(0.05, 60)
    put.tally(key(1))
    put.tally(key(2))
    counts = put.wait_left([push(key(1)), push(key(2), "other")])
    assert counts[metrics.PUT_LATE] == 2, "both have waited for the same time"
    for which, holder in ((key(1), "d"), (key(3), "d"), (key(2), "third")):
        put.tally(which)
        counts = put.wait_left([push(which, holder)])
        assert metrics.PUT_LATE not in counts


def test_after_a_while_a_late_peer_is_waited_for_again() -> None:
    put = PutMode(0.01, 0.05)
    put.tally(key(1))
    put.wait_left([push(key(1))])
    time.sleep(0.06)
    put.tally(key(2))
    assert put.wait_left([push(key(2))])[metrics.PUT_LATE] == 1


def test_steps_without_copies_count_nothing() -> None:
    assert PutMode(1, 1).wait_left([]) == {}


@pytest.mark.parametrize("asked", [True, False])
def test_copies_are_taken_within_the_step_if_decode_asks_and_are_late_else(asked: bool) -> None:
    p, d = PrefillRank(timeout_s=40), DecodeRank(timeout_s=40)
    try:
        if asked:
            d.want(key(), p, (5, 3))
        put = PutMode(40 if asked else 0.05, 60)
        p.compute(key(), 0, 2, layers=1, gone=lambda: put.tally(key()))
        counts = put.wait_left([push(key())])
        assert counts.get(metrics.PUT_LATE, 0) == (0 if asked else 1)
        if not asked:
            d.want(key(), p, (5, 3))
        wait_until(lambda: d.has(key(), 0, 2))
        assert d.right(key(), 0, (5, 3))
    finally:
        d.stop()
        p.stop()
