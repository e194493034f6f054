"""Decode's sessions over real sockets: faults are named, nothing is waited for beyond its time, and the next goes on."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable

import pytest
from files import no_files
from manifest_ranks import At, Behind, DecodeRank, PrefillRank, key, wait_until
from running_threads import running, until_none_runs
from wire import Wire

from xpyd_sidecar.contract.ids import HostPort, Incarnation, split_host_port
from xpyd_sidecar.kv import wire as kv_wire
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.receiving import Cancel, Confirm
from xpyd_sidecar.kv.session_keys import stripe_name
from xpyd_sidecar.kv.wire import FrameKind
from xpyd_sidecar.session import decode_session
from xpyd_sidecar.transport.shm.fetch import ShmFetchLink
from xpyd_sidecar.transport.tcp.pool import STRIPES

IDS = (9, 3, 4, 5, 30, 31)
TIMEOUT_S = 3.0
"""Of tests that wait for somebody's silence."""


def behind(p: PrefillRank) -> Wire:
    return Wire(split_host_port(p.publisher.address)[1])


def through(p: PrefillRank, wire: Wire) -> Behind:
    return Behind(p, port=wire.port)


def elsewhere(count: int) -> tuple[int, ...]:
    """Blocks that no other try of the test has."""
    return tuple(range(40, 40 + count))


def on_loop(rank: DecodeRank | PrefillRank, call: Callable[[], object]) -> None:
    """Have a call made on a rank's thread, and wait for it."""
    over = threading.Event()
    loop = (rank.receiver if isinstance(rank, DecodeRank) else rank.publisher)._loop
    loop.post(lambda: [call(), over.set()])  # type: ignore[func-returns-value]
    assert over.wait(20)


def test_one_session_serves_many_tries_and_lives_through_idle_times() -> None:
    with PrefillRank(timeout_s=TIMEOUT_S) as p, DecodeRank(timeout_s=TIMEOUT_S, transport="tcp") as d:
        for number in range(3):
            p.compute(key(number), 0, 6)
            d.want(key(number), p, IDS)
            d.whole(key(number), 0, IDS)
            d.receiver.carry_out(Confirm(key(number), 0, 1))
            time.sleep(TIMEOUT_S * 1.2 if not number else 0)
        assert len(d.receiver._numbers) == 1
        assert [one.outcome for one in p.reported(3)] == [Outcome.OK] * 3


def test_a_session_without_work_is_ended_by_decode_which_may_ask_over_it_in_that_moment() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        d.whole(key(), 0, IDS)
        d.receiver.carry_out(Confirm(key(), 0, 1))
        p.reported()
        later = time.monotonic() + decode_session.IDLE_S + 1
        on_loop(p, lambda: p.publisher._tick(later))
        assert len(p.publisher._sessions) == 1
        on_loop(d, lambda: d.receiver._tick(later))
        wait_until(lambda: not p.publisher._sessions)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_side_that_was_held_up_itself_does_not_call_its_peer_late_with_its_greeting(side: str) -> None:
    slow, patient = {"timeout_s": TIMEOUT_S}, {"timeout_s": 4 * TIMEOUT_S}
    with (PrefillRank(**(slow if side == "prefill" else patient)) as p,
          DecodeRank(**(slow if side == "decode" else patient)) as d):
        p.compute(key(), 0, 6)
        held = threading.Event()
        if side == "prefill":
            accept = p.publisher._accept

            def accepted(events: int) -> None:
                accept(events)
                time.sleep(1.5 * TIMEOUT_S)
                held.set()

            on_loop(p, lambda: p.publisher._loop.watch(p.publisher._listener, selectors.EVENT_READ, accepted))
        d.want(key(), p, IDS)
        if side == "decode":
            d.receiver._loop.post(lambda: [held.set(), time.sleep(1.5 * TIMEOUT_S)])  # type: ignore[func-returns-value]
        d.whole(key(), 0, IDS)
        assert held.is_set()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_without_the_key_is_refused_on_either_side(side: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = {name: {"data_key": bytes(32)} if name == side else {} for name in ("prefill", "decode")}
    with PrefillRank(**keys["prefill"]) as p, DecodeRank(**keys["decode"]) as d:  # type: ignore[arg-type]
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        assert d.broken_off() == [Outcome.AUTH]
        assert d.broken[0].final
        assert not any(cache.any() for cache in d.caches)
    assert "does not hold the service key" in caplog.text


@pytest.mark.parametrize("cover", [True, False])
def test_bytes_that_were_ruined_on_their_way_are_noticed_only_with_sums_and_the_next_try_is_whole(cover: bool) -> None:
    with PrefillRank() as p, DecodeRank(cover=cover, transport="tcp") as d, behind(p) as wire:
        wire.corrupt = 1
        p.compute(key(), 0, 6)
        d.want(key(), through(p, wire), IDS)
        if not cover:
            wait_until(lambda: d.has(key(), 0, 6))
            assert not d.right(key(), 0, IDS)
            return
        assert d.broken_off() == [Outcome.CHECKSUM]
        assert d.broken[0].final
        d.broken.clear()
        p.compute(key(2), 0, 6)
        d.want(key(2), through(p, wire), IDS)
        d.whole(key(2), 0, IDS)


@pytest.mark.parametrize(("what", "at"), [("ruin_piece", 0), ("ruin_piece", 4), ("ruin_piece", 8), ("ruin_header", 0),
                                          ("ruin_header", 4), ("ruin_header", 8)])
def test_a_header_that_was_ruined_on_its_way_ends_the_session_by_name_and_not_the_next(what: str, at: int) -> None:
    """Of a piece: the number of its fetch, its own, its length. Of a frame: that it is one, its version, its length."""
    with PrefillRank() as p, DecodeRank(transport="tcp") as d, behind(p) as wire:
        p.compute(key(), 0, 6)
        d.want(key(), through(p, wire), IDS)
        d.whole(key(), 0, IDS)
        d.receiver.carry_out(Confirm(key(), 0, 1))
        p.reported()
        wire.ruin_at = at
        setattr(wire, what, 1)
        p.compute(key(2), 0, 6)
        d.want(key(2), through(p, wire), elsewhere(6))
        assert d.broken_off() == [Outcome.PROTOCOL]
        d.broken.clear()
        p.compute(key(3), 0, 6)
        d.want(key(3), through(p, wire), IDS)
        d.whole(key(3), 0, IDS)


def test_half_a_piece_is_no_piece_and_the_rest_comes_by_another_session() -> None:
    with PrefillRank() as p, DecodeRank(transport="tcp") as d, behind(p) as wire:
        wire.half = 1
        p.compute(key(), 0, 6, layers=1)
        d.want(key(), through(p, wire), IDS)
        d.whole(key(), 0, IDS)
        wait_until(lambda: p.store.used_bytes == 0)


def test_a_session_that_breaks_goes_on_once_and_once_more_only_after_something_has_come() -> None:
    with PrefillRank() as p, DecodeRank(transport="tcp") as d, behind(p) as wire:
        d.want(key(), through(p, wire), IDS)
        wait_until(lambda: p.publisher._by_life)
        p.compute(key(), 0, 2)
        wait_until(lambda: d.has(key(), 0, 2))
        for first in (2, 4):
            (life,) = p.publisher._by_life.values()
            wire.cut()
            wait_until(lambda life=life: [one for one in p.publisher._by_life.values() if one is not life])
            p.compute(key(), first, 2)
            wait_until(lambda first=first: d.has(key(), first, 2))
        assert d.outcomes() == []
        d.receiver.carry_out(Confirm(key(), 0, 1))
        p.reported()
        wire.hold.set()
        d.want(key(2), through(p, wire), elsewhere(2))
        for ends in (4, 2):  # with a data connection; without one, since nothing comes through
            wait_until(lambda ends=ends: len(wire._ends) >= ends)
            wire.cut()
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert d.broken[0].key == key(2)
        assert not d.broken[0].final


def test_a_silent_peer_is_given_up_and_delays_no_other() -> None:
    timeout_s = 2 * TIMEOUT_S  # within which the other is done
    with PrefillRank() as p, PrefillRank() as q, DecodeRank(timeout_s=timeout_s) as d, behind(p) as wire:
        wire.hold.set()
        p.compute(key(), 0, 6)
        q.compute(key(2), 0, 6)
        began = time.monotonic()
        d.want(key(), through(p, wire), elsewhere(6))
        d.want(key(2), q, IDS)
        d.whole(key(2), 0, IDS)
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert timeout_s <= time.monotonic() - began < 10 * timeout_s


def test_one_that_falls_silent_in_the_middle_is_given_up_too() -> None:
    with PrefillRank() as p, DecodeRank(timeout_s=TIMEOUT_S, transport="tcp") as d, behind(p) as wire:
        d.want(key(), through(p, wire), IDS)
        p.compute(key(), 0, 2)
        wait_until(lambda: d.has(key(), 0, 2))
        wire.hold.set()
        p.compute(key(), 2, 4)
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert f"silent for {TIMEOUT_S} s" in d.broken[0].reason or "no connection within" in d.broken[0].reason


def test_a_fetch_that_takes_longer_than_prefill_waits_for_a_word_goes_on() -> None:
    send_s = 3.0  # decode says every 1.5 s that it goes on
    slow = {"timeout_s": 6.0}
    with PrefillRank(send_s=send_s, **slow) as p, DecodeRank(transport="tcp", **slow) as d, behind(p) as wire:
        wire.slow_piece_s = send_s + 0.5  # one alone takes longer
        p.compute(key(), 0, 6)
        d.want(key(), through(p, wire), IDS)
        d.whole(key(), 0, IDS)
        assert p.publisher.take_reports() == []


def test_nobody_listens() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        d.want(key(), Behind(p, port=1), IDS)
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert "refused" in d.broken[0].reason


@pytest.mark.parametrize("address", ["prefill.example:1", "127.0.0.1", "127.0.0.1:0"])
def test_an_address_that_cannot_be_used_breaks_the_try_with_it(address: str) -> None:
    with PrefillRank() as p, DecodeRank() as d:
        d.want(key(), At(HostPort(address), p.me.incarnation), IDS)
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert address in d.broken[0].reason


def test_another_life_of_prefill_is_refused() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        p.compute(key(), 0, 6)
        d.want(key(), Behind(p, life=Incarnation("9" * 32)), IDS)
        assert d.broken_off() == [Outcome.INCARNATION]
        assert p.store.used_bytes


def test_a_load_for_which_there_is_no_file_fails_at_once_and_not_by_its_prefill() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        with no_files():
            d.want(key(), p, IDS)
            assert d.broken_off() == [Outcome.OVERFLOW]
        assert d.broken[0].reason == "decode cannot connect: no file descriptors are left to this process"
        assert d.broken[0].final


def test_its_thread_ends() -> None:
    with DecodeRank():
        assert running("xpyd-receiver")
    until_none_runs("xpyd-receiver")


# --- whose blocks are written ---

@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first read out of shared memory takes its time: that it has begun, and that it may go on."""
    inside, go_on = threading.Event(), threading.Event()
    real = ShmFetchLink._read

    def read(self: ShmFetchLink, *args: object) -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(60)
        real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ShmFetchLink, "_read", read)
    return inside, go_on


def test_a_load_is_settled_only_when_nobody_writes_into_its_blocks(slow: tuple[threading.Event, threading.Event]) -> None:
    inside, go_on = slow
    with PrefillRank() as p, DecodeRank() as d:
        p.compute(key(), 0, 6)
        want = d.want(key(), p, IDS)
        assert inside.wait(20)
        d.receiver.close(want.request)
        d.receiver.carry_out(Cancel(key(), 0, Outcome.ABORTED, "over"))
        time.sleep(0.05)
        assert not d.receiver.is_settled(want.request)
        go_on.set()
        wait_until(lambda: d.receiver.is_settled(want.request))
        seen = [cache.copy() for cache in d.caches]
        assert [one.outcome for one in p.reported()] == [Outcome.ABORTED]
        assert all((cache == before).all() for cache, before in zip(d.caches, seen, strict=True))


def test_a_newer_try_is_not_overwritten_by_an_older_one(slow: tuple[threading.Event, threading.Event]) -> None:
    inside, go_on = slow
    with PrefillRank() as p, PrefillRank(transport="tcp") as q, DecodeRank() as d:
        newer = key(generation=2)
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        assert inside.wait(20)
        d.receiver.carry_out(Cancel(key(), 0, Outcome.STALE, "a newer try has taken its place"))
        d.want(newer, q, IDS)
        for first in (0, 3):
            q.compute(newer, first, 3)
        go_on.set()
        d.whole(newer, 0, IDS)
        assert [one.outcome for one in p.reported()] == [Outcome.STALE]
        assert d.right(newer, 0, IDS)


def test_a_stripe_that_names_nobody_is_closed_and_so_is_a_second_one_of_a_name_alone(
        caplog: pytest.LogCaptureFixture) -> None:
    with PrefillRank() as p, DecodeRank(transport="tcp") as d:
        p.compute(key(), 0, 2)
        d.want(key(), p, IDS)
        wait_until(lambda: d.has(key(), 0, 2))
        (mine,) = d.receiver._numbers.values()
        assert mine.keys is not None
        for name, words in ((b"n" * 32, "names no session of this rank"), (b"n", "names no session of this rank"),
                            (stripe_name(mine.keys, STRIPES), "names no session of this rank"),
                            (stripe_name(mine.keys, 0), "")):
            caplog.clear()
            with socket.create_connection(split_host_port(p.publisher.address), timeout=20) as stranger:
                stranger.sendall(kv_wire.Wire().frame(FrameKind.NAME, name))
                while stranger.recv(4096):
                    pass
            wait_until(lambda words=words: words in caplog.text)
            wait_until(lambda: len(p.publisher._sessions) == 1)
        assert mine.link.open
        p.compute(key(), 2, 4)
        d.whole(key(), 0, IDS)
