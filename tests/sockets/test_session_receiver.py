"""Decode's I/O thread against a real sender: bytes in place, faults named, nothing waited for beyond its time."""

from __future__ import annotations

import os
import random
import selectors
import threading
import time

import pytest
from kv_ranks import REGIONS, TIMEOUT_S, DecodeRank, PrefillRank, content, key, push, until
from running_threads import running, until_none_runs
from wire import Wire

from xpyd_sidecar.contract.ids import HostPort, Incarnation, split_host_port
from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.session import endpoint
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.tcp.frame_reader import FrameReader


def test_missing_blocks_arrive_in_their_places_and_prefill_hears_of_it() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        push(p, count=2)
        d.load("r", key(), p, first=1, count=3)
        push(p, first=2, count=2)
        assert d.wait_outcomes() == [Outcome.OK]
        assert d.cache == {(region, 100 + n): content(region, n) for region in range(REGIONS) for n in (1, 2, 3)}
        (report,) = p.wait_reports()
        assert (report.outcome, report.size) == (Outcome.OK, REGIONS * 3 * 1000)
        assert p.sender.store.used == 0


def test_ready_may_come_before_anything_is_computed() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        d.load("r", key(), p, first=0, count=4)
        time.sleep(0.1)
        push(p)
        assert d.wait_outcomes() == [Outcome.OK]


def test_one_connection_serves_many_loads_and_lives_through_idle_times() -> None:
    with PrefillRank(timeout_s=TIMEOUT_S) as p, DecodeRank(timeout_s=TIMEOUT_S) as d:
        for at, letter in enumerate("abc"):
            push(p, letter)
            d.load(letter, key(letter), p, first=0, count=4)
            d.wait_outcomes(at + 1)
            time.sleep(TIMEOUT_S * 1.2 if letter == "a" else 0)
        assert d.wait_outcomes(3) == [Outcome.OK] * 3


def test_a_session_without_work_is_ended_by_decode_which_may_ask_over_it_in_that_moment() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        p.wait_reports()
        later, looked = time.monotonic() + endpoint.IDLE_S + 1, threading.Event()
        p.sender._loop.post(lambda: p.sender._tick(later))
        p.sender._loop.post(looked.set)
        assert looked.wait(10)
        assert len(p.sender._peers) == 1
        d.receiver._loop.post(lambda: d.receiver._tick(later))
        d.wait(lambda: not p.sender._peers)


def test_large_blocks_with_two_chunks_of_staging_only_slow_it_down() -> None:
    size = 1 << 20
    with PrefillRank(keep_bytes=64 << 20, block=size) as p, DecodeRank(chunks=2, block=size) as d:
        blocks = [os.urandom(size) for _ in range(12)]
        for region in range(REGIONS):
            p.copy(key(), region, 0, blocks)
        d.load("r", key(), p, first=0, count=12)
        until(lambda: len(d.receiver.inbox) == 2)
        time.sleep(0.3)
        assert len(d.receiver.inbox) == 2  # the rest waits in the kernel and at prefill
        assert d.wait_outcomes() == [Outcome.OK]
        assert d.cache == {(region, 100 + n): blocks[n] for region in range(REGIONS) for n in range(12)}


def test_a_stuck_engine_thread_is_not_mistaken_for_a_dead_peer() -> None:
    size = 1 << 20
    with (PrefillRank(keep_bytes=64 << 20, block=size, timeout_s=TIMEOUT_S) as p,
          DecodeRank(chunks=2, block=size, timeout_s=TIMEOUT_S) as d):
        for region in range(REGIONS):
            p.copy(key(), region, 0, [os.urandom(size) for _ in range(8)])
        d.load("r", key(), p, first=0, count=8)
        time.sleep(2.5 * TIMEOUT_S)  # no poll: staging is full, nothing is read
        assert d.wait_outcomes() == [Outcome.OK]


def test_a_frame_of_a_load_that_was_given_up_keeps_no_memory_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection may have nothing to bring for minutes."""
    real, comes, is_given_up = FrameReader._receive, threading.Event(), threading.Event()

    def given_up(self: FrameReader, beside: bool) -> tuple[int, bytes]:
        if self._header is not None and self._header.kind is FrameKind.DATA and not is_given_up.is_set():
            comes.set()
            assert is_given_up.wait(30)
            raise BlockingIOError  # the rest of the frame comes later
        return real(self, beside)

    monkeypatch.setattr(FrameReader, "_receive", given_up)
    with PrefillRank() as p, PrefillRank() as other, DecodeRank(chunks=1) as d:
        d.load("r", key("a"), p, first=0, count=4)
        time.sleep(0.2)
        push(p, "a")
        assert comes.wait(30)
        d.abandon("r")  # by this thread, to which the machine belongs
        is_given_up.set()
        assert d.wait_outcomes() == [Outcome.ABORTED]
        monkeypatch.undo()
        push(other, "b")
        d.load("s", key("b"), other, first=0, count=4)
        assert d.wait_outcomes(2) == [Outcome.ABORTED, Outcome.OK]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_side_that_was_held_up_itself_does_not_call_its_peer_late_with_its_greeting(side: str) -> None:
    hasty = {"timeout_s": TIMEOUT_S}
    with PrefillRank(**(hasty if side == "prefill" else {})) as p, DecodeRank(**(hasty if side == "decode" else {})) as d:
        push(p)
        held, watched = threading.Event(), threading.Event()
        if side == "prefill":
            accept = p.sender._accept

            def accepted(events: int) -> None:
                accept(events)
                time.sleep(1.5 * TIMEOUT_S)
                held.set()

            p.sender._loop.post(lambda: p.sender._loop.watch(p.sender._listener, selectors.EVENT_READ, accepted))
            p.sender._loop.post(watched.set)
            assert watched.wait(30)  # one look may find both that call and the connection
        d.load("r", key(), p, first=0, count=4)
        if side == "decode":
            d.receiver._loop.post(lambda: held.set() or time.sleep(1.5 * TIMEOUT_S))  # type: ignore[func-returns-value]
        assert d.wait_outcomes() == [Outcome.OK]
        assert held.is_set()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_without_the_key_is_refused_on_either_side(side: str, caplog: pytest.LogCaptureFixture) -> None:
    other = bytes(32)
    with (PrefillRank(data_key=other if side == "prefill" else bytes(range(32))) as p,
          DecodeRank(data_key=other if side == "decode" else bytes(range(32))) as d):
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.AUTH]
        assert d.cache == {}
    assert "does not hold the service key" in caplog.text


def test_another_life_of_prefill_is_refused() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        push(p)
        d.load("r", key(), p, first=0, count=4, life=Incarnation("9" * 32))
        assert d.wait_outcomes() == [Outcome.INCARNATION]


@pytest.mark.parametrize("cover", [True, False])
def test_a_corrupted_payload_is_noticed_only_with_checksums(cover: bool) -> None:
    with PrefillRank(cover=cover) as p, DecodeRank(cover=cover) as d, Wire(split_host_port(p.address)[1]) as wire:
        wire.corrupt = 1
        push(p)
        d.load("r", key(), HostPort(f"127.0.0.1:{wire.port}"), first=0, count=4)
        assert d.wait_outcomes() == [Outcome.CHECKSUM if cover else Outcome.OK]
        if not cover:
            assert d.cache[0, 100] == bytes(1000)


def drawn(region: int, n: int, size: int) -> bytes:
    """As ``content``, for large blocks."""
    return random.Random(region * 1000 + n).randbytes(size)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[Header]:
    """Frames, of 64 KiB, that were received in one call with the one before them."""
    monkeypatch.setattr(frames, "DIRECT_BYTES", 64 << 10)
    found: list[Header] = []
    real = FrameReader._next

    def following(self: FrameReader, raw: bytes) -> None:
        real(self, raw)
        found.append(frames.decode(raw))

    monkeypatch.setattr(FrameReader, "_next", following)
    return found


@pytest.mark.parametrize("cover", [True, False], ids=["covered", "bare"])
def test_frames_come_to_their_places_in_whatever_order_and_cut_prefill_sends_them(
        cover: bool, followed: list[Header]) -> None:
    """Chunks of any size, some before READY and some after: what decode expects to follow is right only now and then."""
    draw = random.Random(7)
    for turn in range(8):
        block, count = draw.choice([1000, 5000, 30_000, 70_000]), draw.randrange(2, 30)
        with (PrefillRank(keep_bytes=64 << 20, block=block, cover=cover) as p,
              DecodeRank(block=block, cover=cover, direct=True) as d):
            first = draw.randrange(2)
            d.load("r", key(), p, first=first, count=count - first)
            at = 0
            while at < count:
                many = min(draw.choice([1, 3, 40]), count - at)
                for region in draw.sample(range(REGIONS), REGIONS):
                    p.copy(key(), region, at, [drawn(region, at + n, block) for n in range(many)])
                at += many
                time.sleep(draw.choice([0, 0.01]))
            assert d.wait_outcomes() == [Outcome.OK], turn
            assert d.cache == {(region, 100 + n): drawn(region, n, block)
                               for region in range(REGIONS) for n in range(first, count)}
    assert followed or not moves.COMPILED


@pytest.mark.parametrize(("fault", "outcome"), [
    ("corrupt", Outcome.CHECKSUM), ("half", Outcome.PEER_LOST), (9, Outcome.CHECKSUM), (32, Outcome.CHECKSUM),
    (50, Outcome.CHECKSUM), (60, Outcome.CHECKSUM)])
def test_a_fault_in_a_frame_that_followed_ends_the_load_and_not_the_next(
        fault: str | int, outcome: Outcome, followed: list[Header]) -> None:
    block = 30_000
    with (PrefillRank(keep_bytes=64 << 20, block=block) as p, DecodeRank(block=block, direct=True) as d,
          Wire(split_host_port(p.address)[1]) as wire):
        for at, name in enumerate("abc"):
            for region in range(REGIONS):
                p.copy(key(name), region, 0, [drawn(region, n, block) for n in range(12)])
            if name == "b":
                wire.spare = 5
                wire.corrupt, wire.half = int(fault == "corrupt"), int(fault == "half")
                wire.ruin_header, wire.ruin_at = int(isinstance(fault, int)), fault if isinstance(fault, int) else 0
            d.load(name, key(name), HostPort(f"127.0.0.1:{wire.port}"), first=0, count=12)
            d.wait_outcomes(at + 1)
        assert [one.outcome for one in d.finished] == [Outcome.OK, outcome, Outcome.OK]
        assert d.cache == {(region, 100 + n): drawn(region, n, block) for region in range(REGIONS) for n in range(12)}
    assert followed or not moves.COMPILED


def test_the_first_frame_is_expected_as_soon_as_it_was_asked_for(followed: list[Header]) -> None:
    with PrefillRank(keep_bytes=64 << 20, block=30_000) as p, DecodeRank(block=30_000, direct=True) as d:
        for at, name in enumerate("ab"):
            d.load(name, key(name), p, first=0, count=4)
            time.sleep(0.05)
            for region in range(REGIONS):
                p.copy(key(name), region, 0, [drawn(region, n, 30_000) for n in range(4)])
            assert d.wait_outcomes(at + 1)[at] is Outcome.OK
    if moves.COMPILED:
        assert (key("b"), 0) in [(header.key, header.region) for header in followed]


def test_decode_gets_checksums_when_it_alone_wants_them() -> None:
    with PrefillRank(cover=False) as p, DecodeRank() as d, Wire(split_host_port(p.address)[1]) as wire:
        wire.corrupt = 1
        push(p)
        d.load("r", key(), HostPort(f"127.0.0.1:{wire.port}"), first=0, count=4)
        assert d.wait_outcomes() == [Outcome.CHECKSUM]


def test_a_broken_connection_fails_the_load_after_the_grace_and_the_next_one_connects_anew() -> None:
    with PrefillRank() as p, DecodeRank() as d, Wire(split_host_port(p.address)[1]) as wire:
        place = HostPort(f"127.0.0.1:{wire.port}")
        push(p, "b")
        d.load("first", key("b"), place, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        wire.hold.set()
        push(p)
        d.load("r", key(), place, first=0, count=4)
        until(lambda: key() in p.sender._sent)
        wire.cut()
        assert d.wait_outcomes(2)[1] is Outcome.PEER_LOST
        assert [one.outcome for one in p.wait_reports(2)] == [Outcome.OK, Outcome.PEER_LOST]
        wire.hold.clear()
        push(p, "c")
        d.load("s", key("c"), place, first=0, count=4)
        assert d.wait_outcomes(3)[2] is Outcome.OK


def test_a_silent_peer_is_given_up_and_delays_no_other() -> None:
    with (PrefillRank() as p, PrefillRank() as q, DecodeRank(timeout_s=TIMEOUT_S) as d,
          Wire(split_host_port(p.address)[1]) as wire):
        wire.hold.set()
        push(p)
        began = time.monotonic()
        d.load("stuck", key(), HostPort(f"127.0.0.1:{wire.port}"), first=0, count=4)
        push(q, "b")
        d.load("free", key("b"), q, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        assert d.wait_outcomes(2) == [Outcome.OK, Outcome.PEER_LOST]
        assert TIMEOUT_S <= time.monotonic() - began < 20 * TIMEOUT_S


def test_nobody_listens() -> None:
    with DecodeRank() as d:
        d.load("r", key(), HostPort("127.0.0.1:1"), first=0, count=4)
        assert d.wait_outcomes() == [Outcome.PEER_LOST]
        assert "refused" in d.finished[0].reason


@pytest.mark.parametrize("address", ["prefill.example:1", "127.0.0.1", "127.0.0.1:0"])
def test_an_address_that_cannot_be_used_fails_the_load(address: str) -> None:
    with DecodeRank() as d:
        d.load("r", key(), HostPort(address), first=0, count=4)
        assert d.wait_outcomes() == [Outcome.PEER_LOST]
        assert address in d.finished[0].reason


def test_a_newer_try_replaces_one_in_progress_and_late_bytes_of_the_old_are_dropped() -> None:
    with PrefillRank() as p, PrefillRank() as q, DecodeRank() as d, Wire(split_host_port(p.address)[1]) as wire:
        wire.hold.set()
        push(p)
        d.load("r", key(), HostPort(f"127.0.0.1:{wire.port}"), first=0, count=4)
        time.sleep(0.1)  # the wire shows nothing of prefill, also no greeting
        for region in range(REGIONS):
            q.copy(key(attempt=2), region, 0, [content(region, 50 + n) for n in range(4)])
        d.load("r", key(attempt=2), q, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        wire.hold.clear()
        time.sleep(0.2)
        d.poll()
        assert d.cache == {(region, 100 + n): content(region, 50 + n) for region in range(REGIONS) for n in range(4)}
        assert p.wait_reports()[0].outcome is Outcome.STALE


def test_after_an_abandoned_load_nothing_is_written() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        d.load("r", key(), p, first=0, count=4)
        d.abandon("r")
        push(p)
        time.sleep(0.2)
        d.poll()
        assert d.cache == {}
        assert p.wait_reports()[0].outcome is Outcome.ABORTED
        until(lambda: p.sender.store.used == 0)


def test_its_thread_ends() -> None:
    with DecodeRank():
        assert running("xpyd-receiver")
    until_none_runs("xpyd-receiver")


def test_a_frame_of_another_size_than_its_blocks_ends_the_link_and_reaches_no_cache() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        p.copy(key(), 0, 0, [b"too short"])
        d.load("r", key(), p, first=0, count=1)
        assert d.wait_outcomes() == [Outcome.PROTOCOL]
        assert "9 bytes for 1 blocks, not 1000" in d.finished[0].reason
        assert not d.cache
