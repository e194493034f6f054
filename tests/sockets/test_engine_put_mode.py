from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from copies import after_looks, at_once
from kv_ranks import DecodeRank, PrefillRank, content, key

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.engine.put_mode import PutMode
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Push
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.staging import Tally


def push(which: Key, holder: str = "d") -> Push:
    return Push(which, 0, (1,), InstanceName(holder))


def test_the_step_goes_on_when_all_copies_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    put, waits, wait = PutMode(20, 60), threading.Event(), Tally.wait_none
    gone = put.tally(key("a"), 2)

    def waiting(tally: Tally, seconds: float) -> bool:
        waits.set()
        return wait(tally, seconds)

    def leave() -> None:
        assert waits.wait(20)
        time.sleep(0.05)
        gone()
        gone()

    monkeypatch.setattr(Tally, "wait_none", waiting)
    left = threading.Thread(target=leave)
    left.start()
    counts = put.wait_left([push(key("a"))])
    left.join()
    assert metrics.PUT_LATE not in counts
    assert counts[metrics.PUT_WAIT_SECONDS] > 0.04


def test_a_late_transfer_goes_on_without_waiting_and_so_do_others_of_its_peer() -> None:
    put = PutMode(0.05, 60)
    put.tally(key("a"), 1)
    put.tally(key("b"), 1)
    counts = put.wait_left([push(key("a")), push(key("b"), "other")])
    assert counts[metrics.PUT_LATE] == 2, "both have waited for the same time"
    for which, holder in ((key("a"), "d"), (key("c"), "d"), (key("b"), "third")):
        put.tally(which, 1)
        counts = put.wait_left([push(which, holder)])
        assert metrics.PUT_LATE not in counts


def test_after_a_while_a_late_peer_is_waited_for_again() -> None:
    put = PutMode(0.01, 0.05)
    put.tally(key("a"), 1)
    put.wait_left([push(key("a"))])
    time.sleep(0.06)
    put.tally(key("b"), 1)
    assert put.wait_left([push(key("b"))])[metrics.PUT_LATE] == 1


def test_steps_without_copies_count_nothing() -> None:
    assert PutMode(1, 1).wait_left([]) == {}


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("marks", [at_once, after_looks])
def test_copies_leave_with_ready_and_are_late_without(asked: bool, marks: Callable[[], CopyMark]) -> None:
    with PrefillRank(timeout_s=40, marks=marks) as p, DecodeRank(timeout_s=40, load_s=60) as d:
        if asked:
            d.load("r", key(), p, first=0, count=2)
        put = PutMode(40 if asked else 0.05, 60)
        gone = put.tally(key(), 2)
        for region in range(2):
            p.copy(key(), region, 0, [content(region, 0), content(region, 1)], gone=gone)
        counts = put.wait_left([push(key())])
        assert counts.get(metrics.PUT_LATE, 0) == (0 if asked else 1)
        if not asked:
            d.load("r", key(), p, first=0, count=2)
        d.wait(lambda: d.finished, deadline_s=40)
        assert [one.outcome for one in d.finished] == [Outcome.OK]
