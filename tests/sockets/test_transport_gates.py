"""Gates: a load's blocks are settled only when nobody writes into them any more."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from kv_ranks import REGIONS, TCP, DecodeRank, PrefillRank, content, key, push

from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.shm.decode import ShmTaker


def test_a_closed_gate_lets_nobody_in_and_says_when_the_last_has_left() -> None:
    gate = Gate()
    assert not gate.done()
    assert gate.enter()
    gate.close()
    assert not gate.done()
    gate.leave()
    assert gate.done()
    assert not gate.enter()
    assert gate.done()


def test_a_load_is_reported_only_when_nobody_writes_into_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that takes its time: the load is abandoned meanwhile, its blocks are settled only when the read is over."""
    inside, go_on = threading.Event(), threading.Event()
    real = ShmTaker._bring

    def slow(self: ShmTaker, *args: Any) -> str:
        inside.set()
        go_on.wait(10)
        return real(self, *args)

    monkeypatch.setattr(ShmTaker, "_bring", slow)
    with PrefillRank(ways=LinkOptions("shm")) as p, DecodeRank(ways=LinkOptions("shm"), direct=True) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert inside.wait(10)
        d.abandon("r")
        assert not d.receiver.settled("r")
        go_on.set()
        d.wait(lambda: d.receiver.settled("r"))
        d.poll()
        assert d.cache == {}


def test_a_newer_try_is_not_overwritten_by_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = ShmTaker._bring

    def slow(self: ShmTaker, *args: Any) -> str:
        if not inside.is_set():
            inside.set()
            go_on.wait(10)
        return real(self, *args)

    monkeypatch.setattr(ShmTaker, "_bring", slow)
    shm = LinkOptions("shm")
    with PrefillRank(ways=shm) as p, PrefillRank(ways=TCP) as q, DecodeRank(ways=LinkOptions("auto"), direct=True) as d:
        push(p)
        for region in range(REGIONS):
            q.copy(key(attempt=2), region, 0, [content(region, 50 + n) for n in range(4)])
        d.load("r", key(), p, first=0, count=4)
        assert inside.wait(10)
        d.load("r", key(attempt=2), q, first=0, count=4)
        time.sleep(0.1)
        go_on.set()
        assert d.wait_outcomes() == [Outcome.OK]
        d.wait(lambda: d.receiver.settled("r"))
        assert d.cache == {(region, 100 + n): content(region, 50 + n) for region in range(REGIONS) for n in range(4)}
        assert [bytes(m[100 * 1000:101 * 1000]) for m in d.memory] == [content(region, 50) for region in range(REGIONS)]
