"""Prefill's I/O thread over real sockets: copies are bounded in time, strangers are turned away, faults end one session."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from files import no_files
from manifest_ranks import DecodeRank, PrefillRank, key, wait_until
from running_threads import until_none_runs

from xpyd_sidecar.contract.ids import split_host_port
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.manifests import Ask, Busy
from xpyd_sidecar.kv.receiving import Cancel, Confirm
from xpyd_sidecar.kv.wire import Frame, FrameKind, Wire
from xpyd_sidecar.process import resources
from xpyd_sidecar.session import control_connection, publisher
from xpyd_sidecar.session.publisher import RETRY_LEAST_S, RETRY_MOST_S, Publisher, PublisherSettings
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.shm.fetch import ShmFetchLink

IDS = (9, 3, 4, 5, 30, 31)
TIMEOUT_S = 1.5


def stranger_of(p: PrefillRank) -> socket.socket:
    return socket.create_connection(split_host_port(p.publisher.address), timeout=60)


def read_all(sock: socket.socket) -> bytes:
    came = b""
    with contextlib.suppress(ConnectionResetError):  # it is closed with our words unread
        while more := sock.recv(4096):
            came += more
    return came


# --- copies ---

def test_copies_that_nobody_asks_for_are_dropped_after_their_time() -> None:
    with PrefillRank(keep_s=0.2) as p:
        p.compute(key(), 0, 2)
        assert p.store.used_bytes
        (report,) = p.reported()
        assert (report.outcome, report.size) == (Outcome.DEADLINE, 0)
        assert p.store.used_bytes == 0


def test_asking_for_what_was_dropped_fails_at_once_with_the_reason() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        p.compute(key(), 0, 2)
        p.publisher.release(key(), Outcome.OVERFLOW, "more than keep_bytes")
        p.reported()
        d.want(key(), p, IDS)
        assert d.broken_off() == [Outcome.OVERFLOW]
        assert "more than keep_bytes" in d.broken[0].reason
        assert d.broken[0].final


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_decode_rank_that_lives_and_takes_nothing_keeps_no_copies_beyond_its_time(transport: str) -> None:
    """Its fetches stand still; the thread of its sockets says all the time that it lives, and nothing goes on."""
    with PrefillRank(send_s=1.0, transport=transport) as p, DecodeRank(transport=transport) as d:
        d.receiver._fetch = lambda step: None  # type: ignore[method-assign]
        d.machine.goes_on = set  # type: ignore[method-assign]
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        (report,) = p.reported()
        assert (report.outcome, report.reason) == (Outcome.DEADLINE, "decode did not confirm in time")
        wait_until(lambda: not p.store.used_bytes)


def test_copies_are_told_only_once_their_step_has_proved() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        d.want(key(), p, IDS)
        p.compute(key(), 0, 2, hold=3)
        p.compute(key(), 2, 2, hold=4)
        p.publisher.on_copies_proved(2)
        time.sleep(0.1)
        assert not d.has(key(), 0, 1)
        p.publisher.on_copies_proved(3)
        wait_until(lambda: d.has(key(), 0, 2))
        assert not d.has(key(), 2, 1)
        p.publisher.on_copies_proved(4)
        p.compute(key(), 4, 2, hold=4)
        d.whole(key(), 0, IDS)


@pytest.mark.parametrize("retry_s", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, 0.5])
def test_a_decode_that_is_busy_is_not_asked_again_at_once_whatever_time_it_names(retry_s: float) -> None:
    with PrefillRank() as p:
        told: list[float] = []
        p.publisher._machine = SimpleNamespace(on_busy=lambda *args: told.append(args[-1]), open=0)  # type: ignore[assignment]
        session: Any = SimpleNamespace(number=1, life="d", link=None)
        began = time.monotonic()
        p.publisher._relieve = lambda: None  # type: ignore[method-assign]
        p.publisher._asked(session, Frame(FrameKind.BUSY, key(), msgspec.msgpack.encode(Busy(0, retry_s))))
        (until,) = told
        assert until - began >= RETRY_LEAST_S
        assert until - time.monotonic() <= RETRY_MOST_S
        assert retry_s != 0.5 or until - time.monotonic() <= 0.5
        p.publisher._machine = p.machine


# --- sums ---

@pytest.mark.parametrize("cover", [True, False])
def test_sums_are_made_once_where_they_are_wanted_and_before_anybody_asks(cover: bool,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    real = moves.sums

    def sums(data: memoryview, part: int) -> bytes:
        summed.append(len(data))
        return real(data, part)

    monkeypatch.setattr(moves, "sums", sums)
    with PrefillRank(cover=cover) as p, DecodeRank(cover=cover) as d:
        p.compute(key(), 0, 6, layers=1)
        if cover:
            wait_until(lambda: len(summed) == 3)
        d.want(key(), p, IDS)
        d.whole(key(), 0, IDS)
        d.receiver.carry_out(Confirm(key(), 0, 1))
        p.reported()
    assert summed == ([6 * 4 * 256] * 3 if cover else [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_sums_that_cannot_be_made_keep_no_others_from_being_made_and_are_made_anew_for_who_asks(
        when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real, tries = StoredCopy.sum_up, list[StoredCopy]()

    def sum_up(copy: StoredCopy) -> None:
        tries.append(copy)
        if len(tries) == 1:
            raise MemoryError
        real(copy)

    monkeypatch.setattr(StoredCopy, "sum_up", sum_up)
    with PrefillRank() as p, DecodeRank() as d:
        if when == "after":
            d.want(key(), p, IDS)
            wait_until(lambda: p.publisher._by_life)
        p.compute(key(), 0, 6, layers=1)
        if when == "before":
            wait_until(lambda: len(tries) == 3)
            d.want(key(), p, IDS)
        d.whole(key(), 0, IDS)
        wait_until(lambda: p.store.used_bytes == 0)
    assert caplog.text.count("the sums of a copy could not be made") == 1


# --- mistakes of ours ---

@pytest.mark.parametrize("asked_first", [False, True], ids=["computed first", "asked first"])
@pytest.mark.parametrize(("where", "name"), [(Publisher, "_tell"), (ShmFetchLink, "_copy"), (Receiver, "_fetch")],
                         ids=["prefill", "decode", "a step"])
def test_a_mistake_of_ours_ends_the_session_and_not_the_thread(where: Any, name: str, asked_first: bool,
                                                               monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    """Left open, the transfer would wait for its deadline, and what it holds with it."""
    def mistaken(*_: object, **__: object) -> object:
        raise RuntimeError("never thought of")

    with PrefillRank(grace_s=0.2) as p, DecodeRank() as d:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, mistaken)
            if asked_first:
                d.want(key(), p, IDS)
                wait_until(lambda: p.publisher._by_life)
                p.compute(key(), 0, 6)
            else:
                p.compute(key(), 0, 6)
                d.want(key(), p, IDS)
            assert d.broken_off() == [Outcome.PEER_LOST]
            assert [one.outcome for one in p.reported()] == [Outcome.PEER_LOST]
        wait_until(lambda: p.store.used_bytes == 0)
        d.broken.clear()
        p.compute(key(2), 0, 6)
        d.want(key(2), p, IDS)
        d.whole(key(2), 0, IDS)
    assert "RuntimeError: never thought of" in caplog.text


def test_decode_stopped_in_the_middle_is_given_up_and_takes_nothing_for_what_prefill_has_freed() -> None:
    """The peer's thread stands still in place of its process: nothing is taken, nothing is heard."""
    stand, inside = threading.Event(), threading.Event()

    def still() -> None:
        inside.set()
        stand.wait(30)

    with PrefillRank(timeout_s=TIMEOUT_S, grace_s=0.2) as p, DecodeRank() as d:
        d.want(key(), p, IDS)
        wait_until(lambda: p.publisher._by_life)
        d.receiver._loop.post(still)
        assert inside.wait(10)
        p.compute(key(), 0, 6)
        assert [one.outcome for one in p.reported()] == [Outcome.PEER_LOST]
        wait_until(lambda: p.store.used_bytes == 0)
        p.compute(key(2), 0, 6)  # where those bytes were
        stand.set()
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert not d.has(key(), 0, 1)


# --- strangers ---

@pytest.mark.parametrize("words", [
    b"GET / HTTP/1.1\r\nHost: here\r\nUser-Agent: a-client-of-something-else\r\n\r\n", Wire().frame(FrameKind.ASK, b""),
    Wire().frame(FrameKind.HELLO, b"\xc1"), Wire().frame(FrameKind.HELLO, b""), Wire().frame(FrameKind.CHALLENGE, b""),
    Wire().frame(FrameKind.NAME, b"x" * 32), Wire().frame(FrameKind.NAME, b""),
    Wire().frame(FrameKind.HELLO, b"ok")[:5] + b"\xff" * 20,
], ids=["http", "ask first", "no msgpack", "nothing", "challenge", "name", "no name", "no frame"])
def test_a_stranger_gets_a_challenge_and_then_the_door(words: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with PrefillRank() as p, stranger_of(p) as stranger:
        (frame,) = Wire().feed(stranger.recv(4096))
        assert frame.kind is FrameKind.CHALLENGE
        stranger.sendall(words)
        assert {frame.kind for frame in Wire().feed(read_all(stranger))} <= {FrameKind.REJECT}
        wait_until(lambda: not p.publisher._sessions)
    assert "data link to decode ended: 127.0.0.1" in caplog.text


def test_a_stranger_that_says_nothing_is_closed_after_the_timeout() -> None:
    with PrefillRank(timeout_s=TIMEOUT_S) as p, stranger_of(p) as stranger:
        began = time.monotonic()
        read_all(stranger)
        assert time.monotonic() - began < 20 * TIMEOUT_S


def test_strangers_that_say_nothing_keep_no_decode_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "CONNECTIONS_MAX", 16)
    monkeypatch.setattr(publisher, "STRANGERS_MAX", 8)  # more than one session needs at once
    with PrefillRank() as p, DecodeRank(transport="tcp") as d, contextlib.ExitStack() as strangers:
        p.compute(key(), 0, 6)
        for _ in range(32):
            strangers.enter_context(stranger_of(p))
        d.want(key(), p, IDS)
        d.whole(key(), 0, IDS)


# --- bounds, and the end ---

def test_what_a_peer_asks_for_and_cancels_grows_nothing_while_the_engine_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "REPORTS_MAX", 20)
    with PrefillRank() as p, DecodeRank() as d:
        for number in range(60):
            d.want(key(number), p, IDS)
            d.receiver.carry_out(Cancel(key(number), 0, Outcome.ABORTED, "over"))
        p.compute(key(99), 0, 6)
        d.want(key(99), p, IDS)
        d.whole(key(99), 0, IDS)
        d.receiver.carry_out(Confirm(key(99), 0, 1))
        wait_until(lambda: any(one.key == key(99) for one in list(p.publisher._reports)))
        assert len(p.publisher._reports) == len(p.publisher.noted) == 20


def test_a_peer_that_asks_and_does_not_read_is_given_up_before_its_answers_take_all_memory(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_connection, "QUEUED_MAX", 1 << 16)
    with PrefillRank() as p, DecodeRank() as d:
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        d.whole(key(), 0, IDS)
        d.receiver.carry_out(Confirm(key(), 0, 1))
        p.reported()
        (mine,), (theirs,) = d.receiver._sessions.values(), p.publisher._by_life.values()

        def ask() -> None:
            """For what has ended, again and again; it never reads that it is gone."""
            mine.link._loop.watch(mine.link._sock, 0, mine.link._ready)
            for _ in range(500):
                mine.link._out += mine.link._wire.frame(FrameKind.ASK, msgspec.msgpack.encode(Ask(1)), key())
                mine.link._flush()

        most, end = 0, time.monotonic() + 60
        while theirs.link.open:
            assert time.monotonic() < end
            d.receiver._loop.post(ask)
            most = max(most, len(theirs.link._out))
            time.sleep(0.01)
        assert most < 1 << 20


def test_a_rank_without_files_accepts_nobody_for_a_while_and_says_so_once(monkeypatch: pytest.MonkeyPatch,
                                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(publisher, "LACK_S", 0.3)
    monkeypatch.setattr(resources, "SAY_S", 60.0)  # however long it takes here, no second line is due
    with PrefillRank() as p, socket.socket() as late:
        late.settimeout(60)
        with no_files():
            late.connect(split_host_port(p.publisher.address))
            wait_until(lambda: "no file descriptors are left" in caplog.text)
            time.sleep(0.9)
        assert late.recv(4) == b"xpyd", "who came meanwhile is greeted"
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and one.name.startswith("xpyd_")]
    assert [one for one in said if "data link" not in one] == [
        "decode ranks are not accepted for a second: no file descriptors are left to this process"]


def test_a_port_in_use_is_a_clear_error() -> None:
    with PrefillRank() as p:
        host, port = split_host_port(p.publisher.address)
        settings = PublisherSettings(host, port, "auto", 5.0, cover=True)
        with pytest.raises(ConfigError, match=f"data_port: cannot listen on 127.0.0.1 port {port}"):
            Publisher(p.me, settings, p.machine, store=p.store, servers={})


def test_its_thread_ends_and_sessions_close() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        d.want(key(), p, IDS)
        wait_until(lambda: p.publisher._by_life)
        p.publisher.stop()
        assert d.broken_off() == [Outcome.PEER_LOST]
    until_none_runs("xpyd-sender", "xpyd-receiver")


def test_a_decode_that_stands_still_leaves_others_their_share_of_the_store_and_their_speed() -> None:
    """However much of the store waits for it."""
    with (PrefillRank(store_bytes=1 << 20, timeout_s=60) as p, DecodeRank(timeout_s=60) as stopped,
          DecodeRank(timeout_s=60) as other):
        stopped.want(key(), p, IDS)
        wait_until(lambda: p.publisher._by_life)
        stand, inside = threading.Event(), threading.Event()
        stopped.receiver._loop.post(lambda: [inside.set(), stand.wait(60)])  # type: ignore[func-returns-value]
        assert inside.wait(10)
        first = 0
        with contextlib.suppress(AssertionError):  # the store is full for it
            while True:
                p.compute(key(), first, 2, holder="stopped")
                first += 2
        held = p.store.used_bytes
        assert (1 << 20) // 3 < held < 1 << 20
        for number in range(2, 8):
            p.compute(key(number), 0, 6, holder="other")
            other.want(key(number), p, IDS)
            other.whole(key(number), 0, IDS)
            other.receiver.carry_out(Confirm(key(number), 0, 1))
        assert [one.outcome for one in p.reported(6)] == [Outcome.OK] * 6
        assert p.store.used_bytes == held, "what is kept for the stopped one is still there"
        assert stopped.outcomes() == []
        stand.set()
