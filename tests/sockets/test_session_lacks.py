"""What this side lacks (files, memory) is its own: no peer is blamed, nothing is lost, and it goes on after it."""

from __future__ import annotations

import logging
import socket
import time

import pytest
from files import no_files
from kv_ranks import DecodeRank, PrefillRank, content, key, until

from xpyd_sidecar import resources
from xpyd_sidecar.contract.ids import HostPort, Incarnation, split_host_port
from xpyd_sidecar.engine import kv_cache
from xpyd_sidecar.engine.worker_side import staging_of
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.session import sender
from xpyd_sidecar.session.lookup_buffer import Expecting, LookupBuffer
from xpyd_sidecar.transport.link import Sums


def test_a_rank_without_files_accepts_nobody_for_a_while_and_says_so_once(monkeypatch: pytest.MonkeyPatch,
                                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sender, "LACK_S", 0.3)
    monkeypatch.setattr(resources, "SAY_S", 60.0)  # however long it takes here, no second line is due
    with PrefillRank() as p, socket.socket() as late:
        late.settimeout(60)
        with no_files():
            late.connect(split_host_port(p.address))
            until(lambda: "no file descriptors are left" in caplog.text)
            time.sleep(0.9)
        assert late.recv(4) == b"xpyd", "who came meanwhile is greeted"
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and one.name.startswith("xpyd_")]
    assert [one for one in said if "data link" not in one] == [
        "decode ranks are not accepted for a second: no file descriptors are left to this process"]


def test_a_load_for_which_there_is_no_file_fails_at_once_and_not_by_its_prefill() -> None:
    with DecodeRank(grace_s=60) as d, no_files():
        d.load("r", key(), HostPort("127.0.0.1:1"), first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OVERFLOW]
        assert d.finished[0].reason == "decode cannot connect: no file descriptors are left to this process"


class NoMemory:
    """Memory that cannot be had the first time."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, size: int) -> Chunk:
        if not self.failed:
            self.failed = True
            raise MemoryError
        return kv_cache.chunk(size, pinned=False)


def test_staging_that_could_not_be_made_at_first_has_whole_chunks_later() -> None:
    staging = staging_of(4 * 4096, 4096, NoMemory())
    with pytest.raises(MemoryError):
        staging.take()
    chunks = [staging.take() for _ in range(5)]
    assert [chunk and len(chunk.view) for chunk in chunks] == [4096] * 4 + [None]


def test_room_in_a_buffer_for_which_no_memory_is_to_be_had_is_not_promised_and_asked_for_again_later(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ahead = LookupBuffer(NoMemory(), buffer_bytes=1 << 20, pool_bytes=0, block_bytes=(4096,), cover=False, ttl_s=9,
                         post=lambda call: call())
    ahead.expect(Expecting(HostPort("h:1"), Incarnation("i"), key(), b"i" * 32, 4), 0.0)
    store = Header(FrameKind.STORE, False, 0, key(), 0, 0, 2, 0)
    assert [ahead.store(store), ahead.store(store)] == [False, False]
    assert ahead.used == (0, 0)
    assert caplog.messages == ["xpyd: nothing can be pushed ahead for 10 s: no memory for the buffer: MemoryError: "]
    monkeypatch.setattr(ahead, "_asks_at", 0.0)
    assert ahead.store(store)
    assert ahead.begin(Header(FrameKind.DATA, False, 8192, key(), 0, 0, 2, 0)) is not None


def test_a_copy_that_could_not_be_cut_is_let_go_and_ends_the_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> memoryview:
        raise MemoryError

    with PrefillRank() as p, DecodeRank() as d:
        p.copy(key(), 0, 0, [content(0, 0)])
        p.copy(key(), 1, 0, [content(1, 0)])
        monkeypatch.setattr(sender, "_cut", none)
        d.load("r", key(), p, first=0, count=1)
        assert d.wait_outcomes() == [Outcome.PEER_LOST]
        p.wait_reports()
        until(lambda: p.sender.store.used == 0)
        monkeypatch.undo()
        p.copy(key("b"), 0, 0, [content(0, 0)])
        p.copy(key("b"), 1, 0, [content(1, 0)])
        d.load("s", key("b"), p, first=0, count=1)
        assert d.wait_outcomes(2) == [Outcome.PEER_LOST, Outcome.OK]


def test_a_sum_that_could_not_be_made_ahead_keeps_no_other_from_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = Sums.make, []

    def make(self: Sums) -> None:
        tries.append(self)
        if len(tries) == 1:
            raise MemoryError
        real(self)

    monkeypatch.setattr(Sums, "make", make)
    with PrefillRank() as p:
        for region in range(2):
            p.copy(key(), region, 0, [content(region, 0)])
        until(lambda: len(tries) >= 2 and tries[1].made and not p.sender._unsummed)
