"""Sessions over stripes: unequal heads, many peers at once, connections that break one by one, and what is bounded."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import time
from pathlib import Path

import pytest
from manifest_ranks import COMPILED, HEADS, LAYERS, Behind, DecodeRank, PrefillRank, key, wait_until
from wire import Wire

from xpyd_sidecar.contract.ids import split_host_port
from xpyd_sidecar.kv import wire as frames
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.wire import FrameKind
from xpyd_sidecar.transport.tcp import pool as tcp_pool
from xpyd_sidecar.transport.tcp.pool import STRIPES, THREADS_MOST

pytestmark = pytest.mark.skipif(not COMPILED, reason="the link tcp was not compiled here")
IDS = (9, 3, 4, 5, 30, 31)


def stripe_threads() -> int:
    """Of this process."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            found += (task / "comm").read_text().startswith("xpyd-stripe")
    return found


@pytest.mark.parametrize(("head", "heads"), [(0, HEADS), (1, 2), (3, 1)])
@pytest.mark.parametrize("ring", [0, 64 << 10])
def test_ranks_of_other_sizes_get_their_heads(head: int, heads: int, ring: int) -> None:
    with PrefillRank(transport="tcp") as p, DecodeRank(transport="tcp", head=head, heads=heads, ring=ring, piece=700) as d:
        p.compute(key(), 0, 3, layers=1)
        d.want(key(), p, IDS)
        p.compute(key(), 3, 3)
        d.whole(key(), 0, IDS)
        assert d.links == {"tcp"}
        wait_until(lambda: p.store.used_bytes == 0)


def test_many_sessions_at_one_rank_have_few_threads_and_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # records that are kept for a report keep errors, and these the ranks
    threads, files = stripe_threads(), len(os.listdir("/proc/self/fd"))
    with PrefillRank(transport="tcp", store_bytes=8 << 20) as p, contextlib.ExitStack() as stack:
        decodes = [stack.enter_context(DecodeRank(transport="tcp")) for _ in range(12)]
        for number, d in enumerate(decodes):
            p.compute(key(number), 0, 6)
            d.want(key(number), p, IDS)
        for number, d in enumerate(decodes):
            d.whole(key(number), 0, IDS)
        server = p.publisher.tcp._pool
        assert server is not None
        stripes = server._pool
        wait_until(lambda pool=stripes: pool.stripes == STRIPES * 12)  # bytes may have come over the first ones
        assert stripe_threads() - threads <= THREADS_MOST * (1 + len(decodes))
        began = time.monotonic()
    assert time.monotonic() - began < 60
    wait_until(lambda: stripe_threads() <= threads)  # the kernel shows one that was joined for a moment longer
    del server, stripes, d, decodes, stack, p
    wait_until(lambda: gc.collect() is not None and len(os.listdir("/proc/self/fd")) <= files)


def test_one_decode_takes_from_many_sources_at_once() -> None:
    with DecodeRank(transport="tcp", blocks=128) as d, contextlib.ExitStack() as stack:
        sources = [stack.enter_context(PrefillRank(transport="tcp")) for _ in range(8)]
        ids = [tuple(range(6 * number, 6 * number + 6)) for number in range(len(sources))]
        for number, p in enumerate(sources):
            p.compute(key(number), 0, 6)
            d.want(key(number), p, ids[number])
        for number in range(len(sources)):
            d.whole(key(number), 0, ids[number])
        assert stripe_threads() <= THREADS_MOST * (1 + len(sources))


@pytest.mark.parametrize("which", range(1 + STRIPES))
def test_a_connection_that_breaks_ends_its_session_and_the_load_goes_on_in_the_next(which: int) -> None:
    with PrefillRank(transport="tcp") as p, DecodeRank(transport="tcp") as d, Wire(int(p.place[0].split(":")[1])) as wire:
        p.compute(key(), 0, 3)
        d.want(key(), Behind(p, port=wire.port), IDS)
        wait_until(lambda: d.has(key(), 0, 3) and len(wire._ends) >= 2 * (1 + which))
        for sock in wire._ends[2 * which:2 * which + 2]:
            with contextlib.suppress(OSError):  # the end of one may have closed the other
                sock.shutdown(socket.SHUT_RDWR)
        p.compute(key(), 3, 3)
        d.whole(key(), 0, IDS)
        wait_until(lambda: p.store.used_bytes == 0)


@pytest.mark.parametrize("fault", ["corrupt", "ruin_piece", "half"])
def test_bytes_that_are_ruined_on_their_way_are_never_taken(fault: str) -> None:
    with PrefillRank(transport="tcp") as p, DecodeRank(transport="tcp") as d, Wire(int(p.place[0].split(":")[1])) as wire:
        setattr(wire, fault, 1)
        wire.ruin_at = 3  # of the serial
        p.compute(key(), 0, 6)
        d.want(key(), Behind(p, port=wire.port), IDS)
        wait_until(lambda: d.has(key(), 0, 6) or d.outcomes())
        if d.outcomes():
            assert d.outcomes() == [{"corrupt": Outcome.CHECKSUM, "ruin_piece": Outcome.PROTOCOL}[fault]]
        else:
            assert fault == "half", "only a connection that closes is made again"
            assert d.right(key(), 0, IDS)


def test_a_peer_that_passes_no_byte_is_given_up_though_its_words_come() -> None:
    with PrefillRank(transport="tcp", timeout_s=8.0) as p, DecodeRank(transport="tcp") as d, \
            Wire(int(p.place[0].split(":")[1])) as wire:  # its words come every two seconds
        wire.slow_piece_s = 60.0
        p.compute(key(), 0, 6)
        began = time.monotonic()
        d.want(key(), Behind(p, port=wire.port), IDS)
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert time.monotonic() - began < 45
        assert "has moved no byte for 5.0 s" in d.broken[0].reason


def test_more_sessions_than_there_is_room_for_get_one_stripe_each_and_then_a_refusal_by_name(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_pool, "STRIPES_MOST", 8)
    with PrefillRank(transport="tcp") as p, contextlib.ExitStack() as stack:
        monkeypatch.undo()
        decodes = [stack.enter_context(DecodeRank(transport="tcp")) for _ in range(6)]
        p.compute(key(), 0, 6)
        for number, d in enumerate(decodes):
            p.compute(key(number + 2), 0, 6)
            d.want(key(number + 2), p, IDS)
            if number < 5:
                d.whole(key(number + 2), 0, IDS)
        assert p.publisher.tcp._pool is not None
        server = p.publisher.tcp._pool._pool
        wait_until(lambda: server.stripes == 4 + 4)
        assert decodes[5].broken_off() == [Outcome.PEER_LOST]
        assert "tcp: too many data connections at prefill" in decodes[5].broken[0].reason
        assert not decodes[5].broken[0].final
        assert not decodes[5].receiver.refused, "the two may meet again as soon as there is room"


def test_who_says_more_than_the_name_of_a_stripe_ends_alone() -> None:
    with PrefillRank(transport="tcp") as p, DecodeRank(transport="tcp") as d:
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        d.whole(key(), 0, IDS)
        (session,) = p.publisher._by_life.values()
        host, port = split_host_port(p.place[0])
        for more in (b"x", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, port), timeout=10) as stranger:
                stranger.sendall(bytes(frames.Wire().frame(FrameKind.NAME, session.names[0])) + more)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
        assert [*p.publisher._by_life.values()] == [session]
        p.compute(key(2), 0, 6)
        d.want(key(2), p, IDS)
        d.whole(key(2), 0, IDS)


def test_a_load_that_ends_in_the_middle_of_a_fetch_leaves_its_blocks_alone() -> None:
    with PrefillRank(transport="tcp", store_bytes=64 << 20, head_bytes=256 << 10) as p, DecodeRank(
            transport="tcp", head_bytes=256 << 10) as d:
        p.compute(key(), 0, 6)
        want = d.want(key(), p, IDS)
        wait_until(lambda: any(cache[9].any() for cache in d.caches))
        d.receiver.close(want.request)
        wait_until(lambda: d.receiver.is_settled(want.request))
        for cache in d.caches:
            cache[list(IDS)] = 0x55
        time.sleep(0.3)
        assert all((cache[list(IDS)] == 0x55).all() for cache in d.caches), "nothing writes there any more"
        assert len(d.caches) == LAYERS
