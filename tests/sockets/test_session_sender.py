"""Prefill's I/O thread: copies are bounded in bytes and time, strangers are turned away, it ends when told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from kv_ranks import TIMEOUT_S, DecodeRank, PrefillRank, content, key, until
from running_threads import until_none_runs

from xpyd_sidecar.contract.ids import Attempt, TransferId, split_host_port
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.frames import NO_TRANSFER, FrameKind
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.session import sender
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.threads import loop
from xpyd_sidecar.transport.tcp import connection


def test_copies_that_nobody_asks_for_are_dropped_after_their_time() -> None:
    with PrefillRank(keep_s=0.2) as p:
        copies = p.made(0, 0, [content(0, 0)])
        assert p.sender.store.used == 1000
        p.sender.push(key(), copies)
        (report,) = p.wait_reports()
        assert (report.outcome, report.size) == (Outcome.DEADLINE, 0)
        assert p.sender.store.used == 0


def test_asking_for_what_was_dropped_fails_at_once_with_the_reason() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        p.copy(key(), 0, 0, [content(0, 0)])
        p.sender.release(key(), Outcome.OVERFLOW, "more than keep_bytes")
        p.wait_reports()
        d.load("r", key(), p, first=0, count=1)
        assert d.wait_outcomes() == [Outcome.OVERFLOW]
        assert "more than keep_bytes" in d.finished[0].reason


def test_releasing_in_the_middle_tells_decode() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        p.copy(key(), 0, 0, [content(0, 0)])
        d.load("r", key(), p, first=0, count=2)
        until(lambda: key() in p.sender._sent)
        p.sender.release(key(), Outcome.DEADLINE, "x")
        assert d.wait_outcomes() == [Outcome.DEADLINE]


def test_another_geometry_is_refused_and_named() -> None:
    with PrefillRank() as p, DecodeRank(block=999) as d:
        p.copy(key(), 0, 0, [content(0, 0)])
        d.load("r", key(), p, first=0, count=1)
        assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
        assert "2000 bytes a block here, 2 of 1998 there" in d.finished[0].reason


@pytest.mark.parametrize("words", [
    b"GET / HTTP/1.1\r\nHost: here\r\nUser-Agent: a-client-of-something-else\r\n\r\n" + b" " * 56,
    frames.encode(FrameKind.READY, NO_TRANSFER, b""),
    frames.encode(FrameKind.DATA, NO_TRANSFER, b"x") + b"x",
    frames.encode(FrameKind.HELLO, NO_TRANSFER, b"\xc1") + b"\xc1",
    frames.encode(FrameKind.HELLO, NO_TRANSFER, b"ok")[:-1] + b"!" + b"ok",
], ids=["http", "ready first", "data", "no msgpack", "bad checksum"])
def test_a_stranger_gets_a_challenge_and_then_the_door(words: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with PrefillRank() as p, socket.create_connection(split_host_port(p.address), timeout=60) as stranger:
        assert frames.decode(stranger.recv(frames.HEADER_BYTES)).kind is FrameKind.CHALLENGE
        stranger.sendall(words)
        with contextlib.suppress(ConnectionResetError):  # it closes with our words unread
            while stranger.recv(4096):
                pass
    assert "data link to decode ended: 127.0.0.1" in caplog.text


def test_a_stranger_that_says_nothing_is_closed_after_the_timeout() -> None:
    with (PrefillRank(timeout_s=TIMEOUT_S) as p,
          socket.create_connection(split_host_port(p.address), timeout=60) as stranger):
        began = time.monotonic()
        while stranger.recv(4096):
            pass
        assert time.monotonic() - began < 20 * TIMEOUT_S


def test_strangers_that_say_nothing_keep_no_decode_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(sender, "STRANGERS_MAX", 4)
    with PrefillRank() as p, DecodeRank() as d, contextlib.ExitStack() as strangers:
        p.copy(key(), 0, 0, [content(0, 0)])
        p.copy(key(), 1, 0, [content(1, 0)])
        for _ in range(16):
            strangers.enter_context(socket.create_connection(split_host_port(p.address)))
        d.load("r", key(), p, first=0, count=1)
        assert d.wait_outcomes() == [Outcome.OK]


@pytest.mark.parametrize("ways", [LinkOptions("tcp"), LinkOptions("shm")], ids=["tcp", "shm"])
def test_a_decode_rank_that_lives_and_takes_nothing_keeps_no_copies_beyond_its_time(ways: LinkOptions) -> None:
    """Its engine's thread hangs, so its staging is full; the thread of its sockets says all the time that it lives."""
    size = 1 << 20
    with (PrefillRank(keep_bytes=40 << 20, block=size, ways=ways, send_s=1.0) as p,
          DecodeRank(chunks=1, block=size, ways=ways, load_s=60) as d):
        for region in range(2):
            p.copy(key(), region, 0, [bytes(size)] * 16)
        d.load("r", key(), p, first=0, count=16)
        (report,) = p.wait_reports()
        assert (report.outcome, report.reason) == (Outcome.DEADLINE, "decode did not confirm in time")
        until(lambda: not p.sender.store.used)


def test_a_port_in_use_is_a_clear_error() -> None:
    with PrefillRank() as p:
        host, port = split_host_port(p.address)
        with pytest.raises(ConfigError, match=f"data_port: cannot listen on 127.0.0.1 port {port}"):
            type(p.sender)(p.sender.me, p.sender._machine, host=host, port=port, store=p.store)


def test_its_thread_ends_and_connections_close() -> None:
    with PrefillRank() as p, DecodeRank() as d:
        d.load("r", key(), p, first=0, count=1)
        until(lambda: p.sender._peers)
        p.sender.stop()
        assert d.wait_outcomes() == [Outcome.PEER_LOST]
    until_none_runs("xpyd-sender", "xpyd-receiver")


class Slow:
    """The mark of a copy that is not complete yet. How often it is asked is counted."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.looks = self.waits = 0

    def done(self) -> bool:
        self.looks += 1
        return self.passed.is_set()

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return self.passed.wait(seconds)


def test_a_copy_that_is_complete_later_is_noticed_without_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TICK_S", 3600.0)
    mark = Slow()
    with PrefillRank(marks=lambda: mark) as p:
        p.copy(key(), 0, 0, [content(0, 0)])
        until(lambda: mark.waits)
        assert not p.sender._machine.open
        mark.passed.set()
        until(lambda: p.sender._machine.open)


def test_nobody_looks_again_and_again_at_a_copy_that_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TICK_S", 0.01)
    mark = Slow()
    with PrefillRank(marks=lambda: mark) as p:
        p.copy(key(), 0, 0, [content(0, 0)])
        until(lambda: mark.waits)
        time.sleep(0.3)
        assert (mark.looks, mark.waits) == (1, 1)
        mark.passed.set()


def test_what_a_peer_asks_for_and_cancels_grows_nothing_while_the_engine_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "REPORTS_MAX", 20)
    with PrefillRank() as p, DecodeRank() as d:
        for number in range(60):
            name = Key(TransferId(f"{number:032x}"), Attempt(1), 1)
            d.load(f"r{number}", name, p, first=0, count=1)
            d.carry_out(d.machine.abandon(f"r{number}"))
        last = Key(TransferId("f" * 32), Attempt(1), 1)
        for region in range(2):
            p.copy(last, region, 0, [content(region, 0)])
        d.load("last", last, p, first=0, count=1)
        d.wait(lambda: any(one.key == last for one in list(p.sender._reports)))
        assert len(p.sender._reports) == len(p.sender.noted) == 20


def test_a_peer_that_asks_and_does_not_read_is_given_up_before_its_answers_take_all_memory(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WORDS_MAX", 1000)
    monkeypatch.setattr(connection, "SOCKET_BUFFER", 4096)
    with PrefillRank(timeout_s=60) as p, DecodeRank(timeout_s=60) as d:
        for region in range(2):
            p.copy(key(), region, 0, [content(region, 0)])
        d.load("r", key(), p, first=0, count=1)
        assert d.wait_outcomes() == [Outcome.OK]
        (link,) = d.receiver._sources.values()
        (peer,) = p.sender._peers.values()

        def ask() -> None:
            """For what has ended, again and again; it never reads that it is gone."""
            link.link._in.paused = True
            link.link._watch()
            for _ in range(2000):
                link.link.say(FrameKind.READY, Ready(0, 1, 2, 2000, checksum=True), key())
            asked.set()

        asked, waiting, end = threading.Event(), [0], time.monotonic() + 60

        def looked() -> bool:
            waiting.append(peer.link._out.words)
            return asked.is_set() or not peer.link.open

        while peer.link.open:
            assert time.monotonic() < end
            asked.clear()
            d.receiver._loop.post(ask)
            until(looked)  # on a full machine more of them would only wait for each other
        assert max(waiting) < 3000
        until(lambda: peer.link._out.words == 0)  # it is closed first, and forgets then
