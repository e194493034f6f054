"""Orders in which messages, calls of engines' threads, time and lost connections meet.

    XPYD_SEEDS=2000 XPYD_FIRST_SEED=10000 pytest tests/sockets/test_session_orders.py      others, and more of them
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from held_session import Held
from kv_ranks import BLOCK, P_LIFE, REGIONS, content, key, whole
from session_orders import Orders

from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import ArrayKind
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import From, Order

SEEDS = int(os.environ.get("XPYD_SEEDS", "100"))
FIRST = int(os.environ.get("XPYD_FIRST_SEED", "0"))
PAGE = 4096


def test_no_order_ends_a_session_fails_a_load_or_leaves_anything_behind(tmp_path: Path) -> None:
    outcomes: Counter[Outcome] = Counter()
    buffered = 0
    for seed in range(FIRST, FIRST + SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            orders = Orders(seed, tmp_path, patch)
            orders.explore()
            outcomes.update(orders.outcomes)
            buffered += orders.buffered
    assert outcomes[Outcome.OK] > SEEDS / 2  # not all orders are of failures
    assert len(outcomes) > 1
    assert buffered > SEEDS / 8  # nor without what is pushed ahead


def test_what_was_pushed_ahead_over_a_lost_connection_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill reads what comes over the new connection before it sees the end of the old one."""
    with Held(monkeypatch) as held:
        p, d = held.prefill("p", timeout_s=60), held.decode(buffer_bytes=16 * PAGE, grace_s=0.1)
        d.expect(key(), p, blocks=4)
        held.flow()
        for region in range(2):
            p.copy(key(), region, 0, [content(region, n) for n in range(2)])
            p.copy(key(), region, 2, [content(region, n) for n in range(2, 4)])
        p.store.bound = 4 * BLOCK  # half of what there is has to leave
        held.flow()
        assert d.receiver.ahead.used[0]
        (old,) = held.wires
        old.to_p.lost = old.to_d.lost = True
        old.to_d.end()  # decode sees it
        held.loops["d"].run_all()
        d.load("r", key(), p, first=0, count=4)
        old.to_p.over = True  # prefill does not
        held.flow()
        held.now += 1
        d.carry_out(d.machine.tick(held.now))
        assert [one.outcome for one in d.finished] == [Outcome.PEER_LOST]
        assert p.store.used == 0


def test_a_try_that_decode_has_given_up_and_asks_for_after_all_ends_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with Held(monkeypatch) as held:
        p, d = held.prefill("p", timeout_s=60), held.decode(buffer_bytes=16 * PAGE, timeout_s=60)
        d.expect(key(), p, blocks=1)
        held.flow()
        for region in range(REGIONS):
            p.copy(key(), region, 0, [content(region, 0)])
            p.mark()
        p.store.bound = 1
        held.loops["p"].run_all()
        held.loops["p"].tick(held.now)  # it asks for room
        (wire,) = held.wires
        wire.to_d.move(1 << 30)
        held.loops["d"].run_all()
        d.receiver._unclaimed([key()], "too many others are waited for")
        d.receiver.ahead.forget(key())
        d.load("r", key(), p, first=0, count=1)
        held.flow()  # prefill hears of room, of the end and of the load at once, and has sent nothing in between
        assert held.closed == []
        assert [one.outcome for one in d.finished] == [Outcome.OK]


def test_a_rank_that_has_its_blocks_and_asks_for_nothing_of_a_newer_try_leaves_nothing_behind(
        monkeypatch: pytest.MonkeyPatch) -> None:
    with Held(monkeypatch) as held:
        p, d = held.prefill("p", timeout_s=60), held.decode(direct=True, timeout_s=60)
        d.load("r", key(), p, first=0, count=1)
        for region in range(REGIONS):
            p.copy(key(), region, 0, [content(region, 0)])
        held.flow()
        assert d.receiver.settled("r")
        again = key(attempt=2)
        shared = From(p.address, P_LIFE, whole(REGIONS, BLOCK), takers=2)
        d.carry_out(d.machine.load(Order("r", again, (TableSpan(0, (100,)),), (shared,)), held.now))
        held.flow()
        assert p.sender._machine._early[again]
        p.sender.release(again, Outcome.STALE, "another rank has it")
        held.flow()
        assert not any(d.left().values())
        assert [one.outcome for one in d.finished] == [Outcome.OK]


def test_a_rank_that_has_its_blocks_keeps_nobody_waiting_whose_word_was_lost_with_its_connection(
        monkeypatch: pytest.MonkeyPatch) -> None:
    with Held(monkeypatch) as held:
        p = held.prefill("p", timeout_s=60, kinds=[ArrayKind("uint8", 1, (BLOCK,), BLOCK, 1)] * REGIONS)
        done, waits = held.decode("done", timeout_s=60), held.decode("waits", timeout_s=60)
        done.load("r", key(), p, first=0, count=1)
        for region in range(REGIONS):
            p.copy(key(), region, 0, [content(region, 0)])
        held.flow()
        assert [one.outcome for one in done.finished] == [Outcome.OK]
        (wire,) = held.wires
        wire.cut(at_once=False)  # and nobody sees it yet
        shared = From(p.address, P_LIFE, whole(REGIONS, BLOCK), takers=2)
        for d in (done, waits):
            d.carry_out(d.machine.load(Order("r", key(attempt=2), (TableSpan(0, (100,)),), (shared,)), held.now))
        for region in range(REGIONS):
            p.copy(key(attempt=2), region, 0, [content(region, 0)])
        held.flow()
        assert [one.outcome for one in waits.finished] == [Outcome.OK]


@pytest.mark.parametrize("first", ["done", "waits"])
def test_a_rank_that_has_its_blocks_counts_once_where_prefill_does_not_know_yet_that_its_connection_is_lost(
        monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    with Held(monkeypatch) as held:
        p = held.prefill("p", timeout_s=60, kinds=[ArrayKind("uint8", 1, (BLOCK,), BLOCK, 1)] * REGIONS)
        ranks = {name: held.decode(name, timeout_s=60, grace_s=0.1) for name in ("done", "waits")}
        ranks["done"].load("r", key(), p, first=0, count=1)
        for region in range(REGIONS):
            p.copy(key(), region, 0, [content(region, 0)])
        held.flow()
        shared = From(p.address, P_LIFE, whole(REGIONS, BLOCK), takers=2)
        order = Order("r", key(attempt=2), (TableSpan(0, (100,)),), (shared,))
        p.copy(key(attempt=2), 0, 0, [content(0, 0)])
        for name in sorted(ranks, key=lambda name: name != first):
            ranks[name].carry_out(ranks[name].machine.load(order, held.now))
            if name == "done":
                held.flow()
                wire = held.wires[0]
                wire.to_p.lost = wire.to_d.lost = True
                wire.to_d.end()  # decode sees it, prefill does not
                held.loops["done"].run_all()
                ranks["done"].poll()
                wire.to_p.over = True
            held.flow()
        p.copy(key(attempt=2), 1, 0, [content(1, 0)])
        held.flow()
        assert len(held.wires) == 3
        assert [one.outcome for one in ranks["waits"].finished] == [Outcome.OK]
