"""What decode fetches before there are blocks for it: from a prefill that is short of room, or over a link that is slow."""

from __future__ import annotations

import threading

import pytest
from manifest_ranks import LAYERS, DecodeRank, PrefillRank, key, wait_until

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.receiving import Confirm
from xpyd_sidecar.transport.shm.fetch import ShmFetchLink

IDS = (9, 3, 4, 5, 30, 31)
BYTES = 6 * LAYERS * 4 * 256
"""Of six blocks."""
SHORT = {"store_bytes": 24 << 10}
"""Six blocks are more than half of it."""


def ahead_of(d: DecodeRank) -> int:
    """Bytes that lie in the buffer or the pool."""
    return sum(d.receiver.buffered_bytes)


def waits(d: DecodeRank, p: PrefillRank, number: int = 1, *, ahead: bool = False) -> None:
    """A request waits for blocks."""
    d.want(key(number), p, None, whole=6, ahead=ahead)


def test_what_a_short_prefill_has_lies_in_the_buffer_until_a_load_claims_it() -> None:
    with PrefillRank(**SHORT) as p, DecodeRank(buffer=1 << 16) as d:
        waits(d, p)
        p.compute(key(), 0, 6, layers=1)
        wait_until(lambda: p.store.used_bytes <= p.store.bound // 2 and ahead_of(d))
        assert not any(cache.any() for cache in d.caches)
        assert d.receiver.counted.take()[metrics.BUFFERED_BYTES] < BYTES, "no more than has to leave"
        d.want(key(), p, IDS, whole=6)
        d.whole(key(), 0, IDS)
        d.receiver.carry_out(Confirm(key(), 0, BYTES))
        assert p.reported()[0].size == BYTES
        wait_until(lambda: not p.store.used_bytes and not ahead_of(d))


@pytest.mark.parametrize(("transport", "ahead"), [("tcp", True), ("tcp", False), ("auto", True)])
def test_while_prefill_has_room_only_what_would_come_late_comes_before_there_are_blocks(transport: str,
                                                                                       ahead: bool) -> None:
    with PrefillRank() as p, DecodeRank(buffer=1 << 16, transport=transport) as d:
        waits(d, p, ahead=ahead)
        p.compute(key(), 0, 6)
        if transport == "tcp" and ahead:
            wait_until(lambda: ahead_of(d) and not p.store.used_bytes)
        else:
            wait_until(lambda: p.machine.busy(next(iter(p.publisher._sessions), 0)))
        d.want(key(), p, IDS, whole=6)
        d.whole(key(), 0, IDS)
        assert (metrics.BUFFERED_BYTES in d.receiver.counted.take()) == (transport == "tcp" and ahead)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_of_what_came_ahead_only_the_blocks_go_anywhere_that_decode_lacks(first: int) -> None:
    with PrefillRank() as p, DecodeRank(buffer=1 << 16, transport="tcp") as d:
        waits(d, p, ahead=True)
        p.compute(key(), 0, 6)
        wait_until(lambda: not p.store.used_bytes)
        d.want(key(), p, IDS[first:], first=first, whole=6)
        d.whole(key(), first, IDS[first:])
        assert all(not cache[block].any() for cache in d.caches for block in IDS[:first])
        wait_until(lambda: not ahead_of(d))


def test_where_buffer_and_pool_are_full_prefill_keeps_and_presses_again() -> None:
    with PrefillRank(**SHORT) as p, DecodeRank(buffer=4 << 10, pool=0) as d:
        waits(d, p)
        p.compute(key(), 0, 6)
        wait_until(lambda: d.receiver.counted.take().get(metrics.BUFFER_BUSY))
        wait_until(lambda: d.receiver.counted.take().get(metrics.BUFFER_BUSY), 20)
        assert p.publisher.counted.take()[metrics.STORE_RETRIES]
        assert p.store.used_bytes >= BYTES
        d.want(key(), p, IDS, whole=6)
        d.whole(key(), 0, IDS)


def test_the_host_pool_takes_over_where_the_buffer_is_full() -> None:
    with PrefillRank() as p, DecodeRank(buffer=8 << 10, pool=64 << 10, transport="tcp") as d:
        waits(d, p, ahead=True)
        p.compute(key(), 0, 6)
        wait_until(lambda: not p.store.used_bytes)
        assert all(d.receiver.buffered_bytes)
        d.want(key(), p, IDS, whole=6)
        d.whole(key(), 0, IDS)
        wait_until(lambda: d.receiver.buffered_bytes == (0, 0))


def test_what_no_request_claims_is_dropped_and_prefill_is_told() -> None:
    with PrefillRank(**SHORT) as p, DecodeRank(buffer=1 << 16, claim_s=2.0) as d:
        waits(d, p)
        p.compute(key(), 0, 6)
        (report,) = p.reported()
        assert (report.outcome, report.size) == (Outcome.DEADLINE, 0)
        assert "no request has claimed it" in report.reason
        wait_until(lambda: not ahead_of(d) and not p.store.used_bytes)
        assert d.receiver.counted.take()[metrics.UNCLAIMED] == 1


def test_what_prefill_gives_up_leaves_the_buffer_once_its_request_has_ended() -> None:
    with PrefillRank() as p, DecodeRank(buffer=1 << 16, transport="tcp") as d:
        waits(d, p, ahead=True)
        p.compute(key(), 0, 2)
        wait_until(lambda: ahead_of(d))
        p.publisher.release(key(), Outcome.ABORTED, "prefill's leg ended")
        assert d.broken_off() == [Outcome.ABORTED]
        wait_until(lambda: not ahead_of(d))


def test_a_request_that_goes_on_without_a_try_leaves_nothing_of_it_and_tells_prefill_why() -> None:
    with PrefillRank() as p, DecodeRank(buffer=1 << 16, transport="tcp") as d:
        waits(d, p, ahead=True)
        p.compute(key(), 0, 6)
        wait_until(lambda: ahead_of(d))
        d.receiver.drop_try(key(), Outcome.UNUSED, "decode computes the prompt itself")
        report, = p.reported()
        assert (report.outcome, report.reason) == (Outcome.UNUSED, "decode computes the prompt itself")
        wait_until(lambda: not ahead_of(d))


def test_a_prompt_that_is_whole_in_the_buffer_survives_its_prefill_and_serves_another_try() -> None:
    with PrefillRank() as other, DecodeRank(buffer=1 << 16, transport="tcp") as d:
        p = PrefillRank()
        waits(d, p, ahead=True)
        p.compute(key(), 0, 6)
        wait_until(lambda: ahead_of(d) and not p.store.used_bytes)
        p.stop()
        assert d.broken_off() == [Outcome.PEER_LOST]
        d.broken.clear()
        newer = key(generation=2)
        d.want(newer, other, IDS, whole=6)
        wait_until(lambda: d.has(newer, 0, 6))
        assert d.right(key(), 0, IDS), "what the first prefill has computed: the same prompt"
        d.receiver.carry_out(Confirm(newer, 0, 1))
        other.compute(newer, 0, 6)
        assert other.reported()[0].outcome is Outcome.OK
        wait_until(lambda: not ahead_of(d))


def test_what_came_ahead_for_one_request_is_not_given_to_another() -> None:
    """Prefill has let go of it: the request that it was for would wait for it until its deadline."""
    with PrefillRank() as p, DecodeRank(buffer=1 << 16, transport="tcp") as d:
        waits(d, p, ahead=True)
        p.compute(key(), 0, 6)
        wait_until(lambda: ahead_of(d) and not p.store.used_bytes)
        before = ahead_of(d)
        p.compute(key(2), 0, 6)
        elsewhere = tuple(range(40, 46))
        d.want(key(2), p, elsewhere, whole=6)
        d.whole(key(2), 0, elsewhere)
        assert ahead_of(d) == before
        d.want(key(), p, IDS, whole=6)
        d.whole(key(), 0, IDS)


def test_a_load_that_begins_while_something_is_on_its_way_to_the_buffer_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = ShmFetchLink._bring

    def bring(self: ShmFetchLink, *args: object) -> None:
        inside.set()
        assert go_on.wait(20)
        real(self, *args)  # type: ignore[arg-type]

    with PrefillRank(**SHORT) as p, DecodeRank(buffer=1 << 16, piece=2048) as d:
        monkeypatch.setattr(ShmFetchLink, "_bring", bring)
        waits(d, p)
        p.compute(key(), 0, 6, layers=1)
        assert inside.wait(20)
        d.want(key(), p, IDS[2:], first=2, whole=6)
        go_on.set()
        d.whole(key(), 2, IDS[2:])
        assert all(not cache[block].any() for cache in d.caches for block in IDS[:2])
        wait_until(lambda: not p.store.used_bytes and not ahead_of(d))


def test_an_engine_whose_caches_are_reset_uses_nothing_that_came_before() -> None:
    with PrefillRank() as p, DecodeRank(buffer=1 << 16, transport="tcp") as d:
        waits(d, p, ahead=True)
        p.compute(key(), 0, 6)
        wait_until(lambda: ahead_of(d) and not p.store.used_bytes)
        d.receiver.reset()
        wait_until(lambda: not ahead_of(d))
        assert p.reported()[0].outcome is Outcome.OVERFLOW
        d.want(key(), p, IDS, whole=6)
        assert d.broken_off() == [Outcome.OVERFLOW]
        assert not any(cache.any() for cache in d.caches)


def test_an_engine_that_has_no_use_for_the_buffer_takes_nothing_into_it_and_gives_its_memory_back() -> None:
    with PrefillRank() as p, DecodeRank(buffer=1 << 16, transport="tcp") as d:
        waits(d, p, ahead=True)
        p.compute(key(), 0, 6)
        wait_until(lambda: ahead_of(d) and not p.store.used_bytes)
        tiers = d.landing.buffers._tiers
        d.receiver.spare(spare=True)
        d.want(key(), p, IDS, whole=6)
        d.whole(key(), 0, IDS)
        wait_until(lambda: not any(tier.made for tier in tiers))
        waits(d, p, 2, ahead=True)
        p.compute(key(2), 0, 6)
        elsewhere = tuple(range(40, 46))
        wait_until(lambda: key(2) in p.machine)
        d.want(key(2), p, elsewhere, whole=6)
        d.whole(key(2), 0, elsewhere)
        assert not any(tier.made for tier in tiers)
        d.receiver.spare(spare=False)
        waits(d, p, 3, ahead=True)
        p.compute(key(3), 0, 6)
        wait_until(lambda: ahead_of(d))
