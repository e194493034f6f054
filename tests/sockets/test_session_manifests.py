"""Prefill's and decode's threads against each other over real sockets: told, fetched, taken, done, and what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from manifest_ranks import DecodeRank, PrefillRank, key, wait_until

from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.receiving import Cancel, Confirm
from xpyd_sidecar.kv.session_bodies import Able
from xpyd_sidecar.kv.wire import Frame, FrameKind
from xpyd_sidecar.memory.allocation import Allocation
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.session.prefill_session import PrefillSession
from xpyd_sidecar.threads.calls import CallThread
from xpyd_sidecar.transport.shm.serve import SharedCopies
from xpyd_sidecar.transport.tcp.pool import STRIPES

IDS = (9, 3, 4, 5, 30, 31)


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for one in made:
        one.stop()


def both(ranks: list[Any], prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None,
         ) -> tuple[PrefillRank, DecodeRank]:
    made = PrefillRank(**prefill or {}), DecodeRank(**decode or {})
    ranks += made
    return made


def reports(prefill: PrefillRank) -> list[tuple[str, Outcome, int]]:
    return [(one.key.transfer[-1], one.outcome, one.size) for one in prefill.publisher.take_reports()]


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("first", ["asked", "computed"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("decode", [{}, {"head": 1, "heads": 2}, {"ring": 1 << 20}, {"piece": 2048}, {"cover": False}])
def test_blocks_come_to_their_places_and_the_store_is_free_again(ranks: list[Any], decode: dict[str, Any], layers: int,
                                                                 first: str, link: str) -> None:
    p, d = both(ranks, decode={**decode, "transport": "auto" if link == "shm" else "tcp"})
    if first == "asked":
        d.want(key(), p, IDS)
    p.compute(key(), 0, 4, layers=layers)
    p.compute(key(), 4, 2, layers=layers)
    if first == "computed":
        d.want(key(), p, IDS)
    wait_until(lambda: d.has(key(), 0, 6))
    assert d.right(key(), 0, IDS)
    assert d.links == {link}
    wait_until(lambda: p.store.used_bytes == 0)
    d.receiver.carry_out(Confirm(key(), 0, 5000))
    found: list[tuple[str, Outcome, int]] = []

    def reported() -> bool:
        found.extend(reports(p))
        return bool(found)

    wait_until(reported)
    assert found == [("1", Outcome.OK, 5000)]
    assert p.machine.open == 0
    assert d.machine.ring.used_bytes == 0


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_decode_that_checks_gets_sums_also_of_a_prefill_that_makes_none_by_itself(ranks: list[Any], link: str) -> None:
    p, d = both(ranks, prefill={"cover": False}, decode={"transport": "auto" if link == "shm" else "tcp"})
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.has(key(), 0, 6))
    assert d.right(key(), 0, IDS)
    wait_until(lambda: p.store.used_bytes == 0)


def test_stripes_may_come_before_the_word_that_they_are_fetched_over(ranks: list[Any]) -> None:
    def first(d: DecodeRank) -> dict[str, Any]:
        def over_tcp(session: Any, owner: Any, welcome: Any, settled: Any) -> bool:
            def made(link: Any, reason: str) -> None:
                if link._greeted < STRIPES:  # prefill has answered those that are
                    session.post(lambda: made(link, reason))
                else:
                    settled(link, reason)

            return d.receiver.over_tcp(session, owner, welcome, made)

        return {"tcp": over_tcp}

    p, d = both(ranks, decode={"transport": "tcp", "others": first})
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.has(key(), 0, 6) or d.broken)
    assert d.right(key(), 0, IDS)
    assert d.broken == []


def test_what_decode_has_already_is_taken_without_being_fetched(ranks: list[Any]) -> None:
    p, d = both(ranks)
    d.want(key(), p, IDS[4:], first=4)
    p.compute(key(), 0, 4)
    p.compute(key(), 4, 2)
    wait_until(lambda: d.has(key(), 4, 2))
    wait_until(lambda: p.store.used_bytes == 0)
    assert not d.caches[0][3].any()


def test_what_is_told_before_there_are_blocks_waits_for_them(ranks: list[Any]) -> None:
    p, d = both(ranks)
    d.want(key(), p, None)
    p.compute(key(), 0, 6)
    wait_until(lambda: p.machine.busy(1) or p.machine.open)
    assert p.store.used_bytes
    d.want(key(), p, IDS)
    wait_until(lambda: d.has(key(), 0, 6))
    assert d.right(key(), 0, IDS)


def test_a_store_that_is_short_has_decode_take_copies_into_its_buffer(ranks: list[Any]) -> None:
    p, d = both(ranks, prefill={"store_bytes": 32 << 10}, decode={"buffer": 1 << 20})
    d.want(key(), p, None, whole=6)
    p.compute(key(), 0, 6)
    wait_until(lambda: p.store.used_bytes <= 16 << 10)
    assert d.machine.buffer.bytes_in_use[0]
    assert not d.caches[0].any()
    d.want(key(), p, IDS, whole=6)
    wait_until(lambda: d.has(key(), 0, 6))
    assert d.right(key(), 0, IDS)
    wait_until(lambda: d.machine.buffer.bytes_in_use == (0, 0))


def test_a_try_whose_bytes_gave_way_in_the_buffer_ends_at_prefill_which_tells_decode(ranks: list[Any]) -> None:
    p, d = both(ranks, decode={"buffer": 1 << 20, "entries": 1, "transport": "tcp"})
    d.want(key(), p, None, whole=6, ahead=True)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.machine.buffer.bytes_in_use[0] and not p.store.used_bytes)
    d.want(key(2), p, None, whole=6, ahead=True)
    found: list[tuple[str, Outcome, int]] = []

    def reported() -> bool:
        found.extend(reports(p))
        return bool(found)

    wait_until(reported)
    assert found == [("1", Outcome.OVERFLOW, 0)]
    d.want(key(), p, IDS)  # its blocks were on their way to this thread
    wait_until(lambda: d.outcomes() == [Outcome.OVERFLOW])


class SlowMemory:
    """That a thread may wait for, and nobody else."""

    def __init__(self, error: Exception | None = None) -> None:
        self.thread = CallThread("test-memory")
        self.goes_on = threading.Event()
        self.ring = Allocation(self.make, 4096, self.thread.tell)
        self._error = error
        self.thread.start()

    def make(self, size: int) -> Chunk:
        assert self.goes_on.wait(60)
        if self._error is not None:
            raise self._error
        return Chunk(None, memoryview(bytearray(size)))

    def stop(self) -> None:
        self.goes_on.set()
        self.thread.stop()


def test_a_link_that_needs_memory_waits_for_it_while_the_thread_goes_on(ranks: list[Any]) -> None:
    slow = SlowMemory()
    p, d = both(ranks, {"timeout_s": 20.0}, {"transport": "tcp", "timeout_s": 20.0})
    ranks.append(slow)
    d.landing.host_ring = slow.ring
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    for _ in range(3):
        done = threading.Event()
        d.receiver._loop.post(done.set)
        assert done.wait(20), "it pings its peers meanwhile"
        time.sleep(0.05)
    assert not d.has(key(), 0, 1)
    slow.goes_on.set()
    wait_until(lambda: d.has(key(), 0, 6))
    assert d.right(key(), 0, IDS)


def test_a_link_whose_memory_cannot_be_had_ends_its_session_by_name(ranks: list[Any],
                                                                    caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowMemory(MemoryError("so much cannot be locked"))
    slow.goes_on.set()
    p, d = both(ranks, decode={"transport": "tcp"})
    ranks.append(slow)
    d.landing.host_ring = slow.ring
    d.want(key(), p, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.PEER_LOST])
    assert "there is no memory here for what comes over tcp" in d.broken[0].reason
    assert "so much cannot be locked" in caplog.text


def test_a_cancelled_load_gives_everything_back(ranks: list[Any]) -> None:
    p, d = both(ranks)
    want = d.want(key(), p, IDS)
    p.compute(key(), 0, 2)
    wait_until(lambda: d.has(key(), 0, 2))
    d.receiver.close(want.request)
    d.receiver.carry_out(Cancel(key(), 0, Outcome.ABORTED, "over"))
    p.compute(key(), 2, 4)
    wait_until(lambda: d.receiver.is_settled(want.request))
    wait_until(lambda: p.store.used_bytes == 0 and p.machine.open == 0)
    assert [(one.outcome, one.size) for one in p.reported()] == [(Outcome.ABORTED, 0)]
    assert not d.has(key(), 2, 1)


def test_what_prefill_lets_go_of_is_broken_for_decode(ranks: list[Any]) -> None:
    p, d = both(ranks)
    d.want(key(), p, IDS)
    p.compute(key(), 0, 2)
    wait_until(lambda: d.has(key(), 0, 2))
    p.publisher.release(key(), Outcome.ABORTED, "its leg ended")
    wait_until(lambda: d.outcomes() == [Outcome.ABORTED])
    assert not d.broken[0].final
    wait_until(lambda: p.store.used_bytes == 0)


def test_a_decode_without_the_key_gets_nothing(ranks: list[Any]) -> None:
    p, d = both(ranks, decode={"data_key": bytes(32)})
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.outcomes() == [Outcome.AUTH])
    assert d.broken[0].final
    assert not any(cache.any() for cache in d.caches)


def test_another_life_of_prefill_is_told_by_name(ranks: list[Any]) -> None:
    p, d = both(ranks)
    real, p.me = p.me, p.me._replace(incarnation="9" * 32)
    d.want(key(), p, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.INCARNATION])
    assert not d.broken[0].final
    assert real.incarnation in d.broken[0].reason


def test_that_all_has_come_is_said_again_where_a_session_ends_before_it_is_read(ranks: list[Any],
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """As prefill ends one when its store is empty: it would wait for a rank that has all that it wanted."""
    p, d = both(ranks, {"grace_s": 60.0})
    frame, unread = PrefillSession.frame, list[Key]()

    def reads(session: PrefillSession, one: Frame) -> None:
        if one.kind is FrameKind.DONE and not unread:
            unread.append(one.key)
            raise PeerGone("d", "the memory of copies is given up")
        frame(session, one)

    monkeypatch.setattr(PrefillSession, "frame", reads)
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.has(key(), 0, 6))
    d.receiver.carry_out(Confirm(key(), 0, 4711))
    assert [(one.outcome, one.size) for one in p.reported()] == [(Outcome.OK, 4711)]
    assert unread == [key()]


@pytest.mark.parametrize("cover", [True, False])
def test_a_store_that_is_given_up_while_decode_chooses_its_link_is_not_mapped(ranks: list[Any], cover: bool,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told later lies in another memory."""
    p, d = both(ranks, {"cover": cover}, {"cover": cover})
    welcome, given_up = PrefillSession._welcome, list[SharedCopies]()

    def welcomed(session: PrefillSession, able: Able) -> None:
        welcome(session, able)
        if not given_up:
            given_up.append(p.shared)
            p.shared = p.shm.copies = SharedCopies(1 << 20)
            p.publisher.end_sessions("shm", "the memory of copies is given up")

    monkeypatch.setattr(PrefillSession, "_welcome", welcomed)
    d.want(key(), p, IDS)
    wait_until(d.outcomes)
    assert (d.outcomes(), d.broken[0].final) == ([Outcome.PEER_LOST], False)
    d.want(key(2), p, IDS)
    p.compute(key(2), 0, 6)
    wait_until(lambda: d.has(key(2), 0, 6))
    assert d.right(key(2), 0, IDS)


def test_a_session_that_ends_goes_on_with_what_was_not_taken(ranks: list[Any]) -> None:
    p, d = both(ranks)
    d.want(key(), p, IDS)
    p.compute(key(), 0, 2)
    wait_until(lambda: d.has(key(), 0, 2))
    p.publisher.end_sessions("shm", "its store is given up")
    p.compute(key(), 2, 4)
    wait_until(lambda: d.has(key(), 0, 6))
    assert d.right(key(), 0, IDS)
    assert d.outcomes() == []
    wait_until(lambda: p.store.used_bytes == 0)


def test_a_prefill_that_is_gone_is_lost(ranks: list[Any]) -> None:
    p, d = both(ranks)
    d.want(key(), p, IDS)
    p.compute(key(), 0, 2)
    wait_until(lambda: d.has(key(), 0, 2))
    p.stop()
    wait_until(lambda: d.outcomes() == [Outcome.PEER_LOST])
    assert not d.broken[0].final


def test_many_transfers_at_once_are_whole(ranks: list[Any]) -> None:
    p, d = both(ranks, decode={"blocks": 512})
    for n in range(40):
        d.want(key(n), p, tuple(range(n * 8, n * 8 + 6)))
    for n in range(40):
        p.compute(key(n), 0, 3, layers=1)
    for n in range(40):
        p.compute(key(n), 3, 3)
    wait_until(lambda: all(d.has(key(n), 0, 6) for n in range(40)))
    assert all(d.right(key(n), 0, tuple(range(n * 8, n * 8 + 6))) for n in range(40))
    wait_until(lambda: p.store.used_bytes == 0)
