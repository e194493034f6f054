"""Copies that prefill cannot keep go into decode's buffer before decode asks for them: real threads and sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from kv_ranks import BLOCK, DecodeRank, PrefillRank, content, key

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.kv.frames import Header
from xpyd_sidecar.kv.keys import Key, Outcome

PAGE = 4096
IDENTITY = b"i" * 32


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def copy(p: PrefillRank, which: Key, blocks: int = 2) -> None:
    for region in range(2):
        p.copy(which, region, 0, [content(region, n) for n in range(blocks)])


def whole(d: DecodeRank, blocks: int = 2) -> bool:
    return all(d.cache[region, 100 + n] == content(region, n) for region in range(2) for n in range(blocks))


@contextmanager
def pair(*, keep: int = 2 * BLOCK, buffer: int = 16 * PAGE, pool: int = 0,
         claim_s: float = 60, keep_s: float = 60, window: int = 0,
         direct: bool = False) -> Iterator[tuple[PrefillRank, DecodeRank]]:
    """``keep``: what prefill may keep; it offers what is above half of it."""
    with PrefillRank(keep_bytes=keep, keep_s=keep_s, timeout_s=40) as p, \
            DecodeRank(buffer_bytes=buffer, pool_bytes=pool, claim_s=claim_s, window=window, load_s=60, timeout_s=40,
                       direct=direct) as d:
        yield p, d


def outcomes(d: DecodeRank, count: int = 1) -> list[Outcome]:
    d.wait(lambda: len(d.finished) >= count, deadline_s=40)
    return [one.outcome for one in d.finished]


def counted(d: DecodeRank, name: str) -> float:
    return d.receiver.ahead.counted[name]


def test_what_prefill_cannot_keep_lies_in_the_buffer_until_a_load_claims_it() -> None:
    with pair(keep=4 * BLOCK) as (p, d):
        d.expect(key(), p, blocks=2)
        copy(p, key())
        wait(lambda: p.sender.store.used <= 2 * BLOCK)
        wait(lambda: counted(d, metrics.BUFFERED_BYTES) == 2 * BLOCK)
        d.load("r", key(), p, first=0, count=2)
        assert outcomes(d) == [Outcome.OK]
        assert whole(d)
        assert d.moved["buffer"] == 2 * BLOCK
        assert d.moved["tcp"] == 2 * BLOCK
        assert p.wait_reports(deadline_s=40)[0].size == 4 * BLOCK
        assert p.sender.store.used == 0
        ahead = d.receiver.ahead
        wait(lambda: ahead.used == (0, 0))


def test_nothing_is_pushed_ahead_while_there_is_room_to_keep_it() -> None:
    with pair(keep=64 * BLOCK) as (p, d):
        d.expect(key(), p, blocks=2)
        copy(p, key())
        d.load("r", key(), p, first=0, count=2)
        assert outcomes(d) == [Outcome.OK]
        assert d.moved == {"tcp": 4 * BLOCK}


@pytest.mark.parametrize("first", [0, 1])
def test_decode_takes_only_the_blocks_that_it_lacks(first: int) -> None:
    with pair(keep=4 * BLOCK) as (p, d):
        d.expect(key(), p, blocks=2)
        copy(p, key())
        wait(lambda: p.sender.store.used <= 2 * BLOCK)
        wait(lambda: counted(d, metrics.BUFFERED_BYTES) == 2 * BLOCK)
        d.load("r", key(), p, first=first, count=2 - first)
        assert outcomes(d) == [Outcome.OK]
        assert set(d.cache) == {(region, 100 + n) for region in range(2) for n in range(first, 2)}
        assert d.moved["buffer"] == (2 - first) * BLOCK


def test_where_buffer_and_pool_are_full_prefill_keeps_and_asks_again() -> None:
    with pair(keep=4 * BLOCK, buffer=PAGE, pool=0) as (p, d):
        d.expect(key("a"), p, blocks=2)
        copy(p, key("a"))
        wait(lambda: p.sender.store.used == 2 * BLOCK)  # one copy is in the buffer, and that is full
        d.expect(key("b"), p, blocks=2)
        p.copy(key("b"), 0, 0, [content(0, n) for n in range(2)])
        wait(lambda: counted(d, metrics.BUFFER_BUSY) >= 2)
        assert p.sender.store.used == 4 * BLOCK
        d.load("ra", key("a"), p, first=0, count=2)
        assert outcomes(d) == [Outcome.OK]
        wait(lambda: p.sender.store.used <= 2 * BLOCK)  # decode may have a copy before prefill gives its memory back
        p.copy(key("b"), 1, 0, [content(1, n) for n in range(2)])
        wait(lambda: p.sender.store.used == 2 * BLOCK)
        d.load("rb", key("b"), p, first=0, count=2)
        assert outcomes(d, 2) == [Outcome.OK, Outcome.OK]
        assert whole(d)
        assert p.sender.spilling.counted[metrics.STORE_RETRIES]


def test_the_host_pool_takes_over_when_the_buffer_is_full() -> None:
    with pair(keep=BLOCK * 4, buffer=PAGE, pool=PAGE) as (p, d):
        ahead = d.receiver.ahead
        for letter in "ab":
            d.expect(key(letter), p, blocks=2)
            copy(p, key(letter), 1)
        p.sender.spilling._store.bound = 1
        wait(lambda: ahead.used == (PAGE, PAGE))


def test_what_no_request_claims_is_dropped_and_prefill_is_told() -> None:
    with pair(keep=4 * BLOCK, claim_s=0.3) as (p, d):
        d.expect(key(), p, blocks=2)
        copy(p, key())
        report = p.wait_reports(deadline_s=40)[0]
        assert (report.outcome, report.size) == (Outcome.DEADLINE, 0)
        assert "no request has claimed it" in report.reason
        ahead = d.receiver.ahead
        wait(lambda: ahead.used == (0, 0))
        wait(lambda: counted(d, metrics.UNCLAIMED))  # counted once they have left
        assert counted(d, metrics.UNCLAIMED) == 1
        wait(lambda: p.sender.store.used == 0)  # the time may have been over before the last copy came


def test_what_prefill_gives_up_leaves_the_buffer() -> None:
    with pair(keep=4 * BLOCK) as (p, d):
        d.expect(key(), p, blocks=2)
        copy(p, key())
        wait(lambda: counted(d, metrics.BUFFERED_BYTES))
        p.sender.release(key(), Outcome.ABORTED, "prefill's leg ended")
        ahead = d.receiver.ahead
        wait(lambda: key() not in ahead and ahead.used == (0, 0))


def test_a_prompt_that_is_whole_in_the_buffer_survives_its_prefill() -> None:
    with pair(keep=1) as (_, d), PrefillRank(keep_bytes=4 * BLOCK, keep_s=60, timeout_s=40) as p:
        d.expect(key(), p, blocks=2, identity=IDENTITY)
        copy(p, key())
        wait(lambda: counted(d, metrics.BUFFERED_BYTES))
        p.sender.spilling._store.bound = 1  # all of it is too much now
        wait(lambda: counted(d, metrics.BUFFERED_BYTES) == 4 * BLOCK)
        p.sender.stop()
        d.load("r", key(), p, first=0, count=2)
        assert outcomes(d) == [Outcome.OK]
        assert whole(d)


def test_the_same_prompt_of_another_try_is_found_by_its_content() -> None:
    with pair(keep=1) as (_, d), PrefillRank(keep_bytes=4 * BLOCK, keep_s=60, timeout_s=40) as p, \
            PrefillRank(keep_s=60, timeout_s=40) as other:
        d.expect(key(attempt=1), p, blocks=2, identity=IDENTITY)
        copy(p, key(attempt=1))
        p.sender.spilling._store.bound = 1
        wait(lambda: counted(d, metrics.BUFFERED_BYTES) == 4 * BLOCK)
        p.sender.stop()
        d.load("r", key(attempt=2), other, first=0, count=2, identity=IDENTITY)
        assert outcomes(d) == [Outcome.OK]
        assert whole(d)
        copy(other, key(attempt=2))
        assert other.wait_reports(deadline_s=40)[0].outcome is Outcome.OK


def test_what_came_ahead_for_one_request_is_not_given_to_another_with_the_same_prompt() -> None:
    """Prefill has let go of what it has stored: the request that it was for would wait for it until its deadline."""
    with pair(keep=4 * BLOCK) as (p, d), PrefillRank(keep_s=60, timeout_s=40) as other:
        d.expect(key("a"), p, blocks=2, identity=IDENTITY)
        copy(p, key("a"))
        p.sender.spilling._store.bound = 1
        wait(lambda: counted(d, metrics.BUFFERED_BYTES) == 4 * BLOCK)
        copy(other, key("b"))
        d.load("rb", key("b"), other, first=0, count=2, identity=IDENTITY)
        assert outcomes(d) == [Outcome.OK]
        assert d.moved == {"tcp": 4 * BLOCK}
        d.load("ra", key("a"), p, first=0, count=2, identity=IDENTITY)
        assert outcomes(d, 2) == [Outcome.OK, Outcome.OK]
        assert d.moved == {"tcp": 4 * BLOCK, "buffer": 4 * BLOCK}


@pytest.mark.parametrize("window", [1, 2, 5])
def test_decode_may_pull_and_then_gets_no_more_than_its_window_at_once(window: int) -> None:
    with pair(keep=64 * BLOCK, window=window) as (p, d):
        copy(p, key(), 5)
        d.load("r", key(), p, first=0, count=5)
        time.sleep(0.1)
        assert len(d.receiver.inbox) <= 2 * min(window, 5)
        assert outcomes(d) == [Outcome.OK]
        assert whole(d, 5)
        assert p.wait_reports(deadline_s=40)[0].size == 10 * BLOCK
        assert p.sender.store.used == 0


@pytest.mark.parametrize(("first", "count"), [(0, 5), (1, 4), (4, 1)])
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("direct", [False, True])
def test_a_load_that_begins_while_blocks_that_were_granted_room_are_on_their_way(
        first: int, count: int, window: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for some of them: what comes beside those is let pass."""
    with pair(keep=10 * BLOCK, window=window, direct=direct) as (p, d):
        granted, asked = threading.Event(), threading.Event()
        store = d.receiver.ahead.store

        def store_and_wait(header: Header) -> bool:
            room = store(header)
            granted.set()
            assert asked.wait(30)
            return room

        monkeypatch.setattr(d.receiver.ahead, "store", store_and_wait)
        d.expect(key(), p, blocks=5)
        copy(p, key(), 4)
        assert granted.wait(30)
        for region in range(2):
            p.copy(key(), region, 4, [content(region, 4)])
        d.load("r", key(), p, first=first, count=count)
        asked.set()
        assert outcomes(d) == [Outcome.OK]
        for region in range(2):
            for n in range(first, first + count):
                assert d.cache[region, 100 + n] == content(region, n)
        wait(lambda: p.sender.store.used == 0)
        assert counted(d, metrics.BUFFERED_BYTES) == 0
        assert all(d.staging.take() for _ in range(8))
        wait(lambda: d.receiver.ahead.used == (0, 0))


def test_the_buffer_and_pulling_together() -> None:
    with pair(keep=10 * BLOCK, window=1) as (p, d):
        d.expect(key(), p, blocks=4)
        copy(p, key(), 4)
        wait(lambda: p.sender.store.used <= 5 * BLOCK)
        d.load("r", key(), p, first=1, count=3)
        assert outcomes(d) == [Outcome.OK]
        assert all(d.cache[region, 101 + n] == content(region, 1 + n) for region in range(2) for n in range(3))
        wait(lambda: p.sender.store.used == 0)
