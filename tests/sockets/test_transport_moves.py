"""Loops over system calls, compiled and in Python: bytes come to their places, sums are right, bad uses are errors."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from xpyd_sidecar.kv import frames
from xpyd_sidecar.transport import moves, moves_plain

SIZES = [1, 63, 240, 255, 256, 257, 1024, 1025, 1088, 1089, 4096, frames.SUM_BYTES - 1, frames.SUM_BYTES,
         frames.SUM_BYTES + 1, 200_000]


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "plain":
        return moves_plain
    if not moves.COMPILED:
        pytest.skip("not compiled here")
    from xpyd_sidecar.transport import _moves

    return _moves


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def numbers(*found: int) -> array[int]:
    return array("q", found)


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_the_frames(way: ModuleType, size: int) -> None:
    data = content(3 * size)
    assert way.sums(data, size) == frames.sums(data, size)
    for bad in (0, size * 2):
        with pytest.raises(ValueError, match="whole blocks"):
            way.sums(data, bad)


@pytest.mark.parametrize("size", [1, 100, 4096, frames.SUM_BYTES + 5])
def test_what_comes_in_pieces_lies_in_its_places_and_the_rest_in_the_tail(
        way: ModuleType, size: int, pair: tuple[socket.socket, socket.socket]) -> None:
    data, tail, draw = content(5 * size), bytearray(64), random.Random(2)
    memory = bytearray(10 * (size + 3))
    ids = numbers(7, 2, 3, 9, 0)
    scatter = way.Scatter(memory, size, 5, memoryview(ids), size + 3, 2, True)
    with pytest.raises(BlockingIOError):
        scatter.receive(pair[1].fileno(), tail, 0, 1, ())
    stream = data + b"next"
    sent = got = 0
    while got < len(stream):
        if sent < len(stream):
            sent += pair[0].send(stream[sent:sent + draw.randrange(1, 2 * size + 10)])
        while got < sent:
            missing = scatter.missing
            if not missing:
                tail[got - len(data):] = pair[1].recv(64)
                got = sent
                break
            many, _ = scatter.receive(pair[1].fileno(), tail, 0, 1, ())
            assert scatter.missing == missing - min(many, missing)
            got += many
    for n, block in enumerate(ids):
        at = block * (size + 3) + 2
        assert memory[at:at + size] == data[n * size:(n + 1) * size]
    assert sum(map(bool, memory)) <= 5 * size, "nothing beside them"
    assert tail[:4] == b"next"
    assert scatter.sums() == frames.sums(data, size)
    pair[0].close()
    other = way.Scatter(bytearray(4), 4, 1, None, 0, 0, False)
    assert other.receive(pair[1].fileno(), tail, 1, 1, ()) == (0, b"")
    with pytest.raises(OSError, match="Bad file"):
        other.receive(-1, tail, 1, 1, ())


def test_expected_frames_are_received_in_one_call_and_others_end_it(
        way: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    """Frames of random sizes, cut at random; now and then one begins with other bytes than those that are expected."""
    draw, followed = random.Random(6), 0
    for turn in range(60):
        count = draw.randrange(1, 9)
        sizes = [draw.choice([1, 64, 3000, 70_000]) + draw.randrange(9) for _ in range(count)]
        data = [content(size, turn * 100 + n) for n, size in enumerate(sizes)]
        heads = [content(64, turn * 100 + 50 + n) for n in range(count)]
        known = [head[:48] for head in heads]
        odd = draw.randrange(3 * count)
        if odd < count:
            known[odd] = known[odd][:-1] + bytes([known[odd][-1] ^ 1])
        memory = [bytearray(size) for size in sizes]
        places = [way.Scatter(memory[n], sizes[n], 1, None, 0, 0, True) for n in range(count)]
        stream, sent, tail = b"".join(map(bytes.__add__, data, heads)), 0, bytearray(64)
        at = got = 0  # the frame that is received; bytes of the header after it
        while at < count:
            if sent < len(stream):
                sent += pair[0].send(stream[sent:sent + draw.randrange(1, 100_000)])
            with contextlib.suppress(BlockingIOError):
                if places[at].missing:
                    owed = places[at].missing
                    follow = tuple(one for n in range(at, count - 1) for one in (known[n], places[n + 1]))
                    many, taken = places[at].receive(pair[1].fileno(), tail, 1, 1, follow)
                    assert taken == b"".join(heads[at:at + len(taken) // 64])
                    for _ in range(0, len(taken), 64):
                        many -= owed + 64
                        at, followed = at + 1, followed + 1
                        owed = sizes[at]
                    assert places[at].missing == max(0, owed - many)
                    got = max(0, many - owed)
                else:
                    got += pair[1].recv_into(memoryview(tail)[got:])
            if got == 64:
                assert tail == heads[at]
                at, got = at + 1, 0
        assert memory == data
        assert [place.sums() for place in places] == [frames.sums(data[n], sizes[n]) for n in range(count)]
    assert followed > 50 or way is moves_plain


def test_covered_blocks_on_cache_lines_come_to_their_places_however_they_are_cut(
        way: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    """They pass through memory of the thread; between two calls nothing is left there, and nothing else is touched."""
    draw = random.Random(8)
    for turn in range(40):
        size, count = 64 * draw.choice([1, 64, 65, 1000, 1024, 1025, 5000]), draw.randrange(1, 6)
        data = content(size * count, turn)
        with mmap.mmap(-1, size * (count + 1) + 64) as memory:
            memory[:] = b"\xee" * len(memory)
            ids = numbers(*draw.sample(range(count + 1), count))
            scatter = way.Scatter(memory, size, count, ids, size, 0, True)
            sent = got = 0
            while got < len(data):
                if sent < len(data):
                    sent += pair[0].send(data[sent:sent + draw.choice([1, 100, 4096, 65_536, 200_000])])
                with contextlib.suppress(BlockingIOError):
                    got += scatter.receive(pair[1].fileno(), bytearray(64), draw.randrange(2), 1, ())[0]
                done = bytearray(b"\xee") * len(memory)
                for n in range(-(-got // size)):
                    part = data[n * size:min((n + 1) * size, got)]
                    done[ids[n] * size:ids[n] * size + len(part)] = part
                assert memory[:] == done
            assert scatter.sums() == frames.sums(data, size)
            del scatter


def test_a_call_begins_with_the_header_of_an_expected_frame(
        way: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    for cut in (1, 63, 64, 65, 464):
        memory, head, data, tail = bytearray(400), content(64, cut), content(400, cut), bytearray(64)
        place = way.Scatter(memory, 100, 4, None, 0, 0, True)
        pair[0].send((head + data)[:cut])
        many, heads = way.receive(pair[1].fileno(), tail, 1, 1, (head[:48], place), -1)
        assert tail[:min(cut, 64)] == head[:cut]
        assert heads == (head if cut >= 64 and way is not moves_plain else b"")
        pair[0].send((head + data)[cut:])
        if heads:
            assert many == cut
            while place.missing:
                place.receive(pair[1].fileno(), bytearray(64), 1, 1, ())
            assert memory == data
        else:
            pair[1].recv(1000)
            assert memory == bytes(400)
    pair[0].send(b"y" * 70)
    assert way.receive(pair[1].fileno(), tail, 1, 1, (head[:48], place), -1) == (64, b""), "another frame"
    if way is not moves_plain:
        with pytest.raises(ValueError, match="no frame"):
            way.receive(pair[1].fileno(), tail, 1, 1, (), -1)


def test_a_call_ends_when_another_file_is_ready(way: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    if way is moves_plain:
        pytest.skip("never waits")
    other, far = socket.socketpair()
    with other, far, select.epoll() as watch:
        for one in (other, pair[1]):
            watch.register(one, select.EPOLLIN)
        stop = threading.Event()

        def feed() -> None:
            while not stop.is_set():
                with contextlib.suppress(BlockingIOError):
                    pair[0].send(bytes(4096))

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            scatter = way.Scatter(bytearray(1 << 28), 1 << 20, 1 << 8, None, 0, 0, False)
            far.send(b"x")
            while scatter.missing == 1 << 28:
                with contextlib.suppress(BlockingIOError):
                    scatter.receive(pair[1].fileno(), bytearray(64), 2, 1, (), watch.fileno())
            assert scatter.missing > 1 << 27, "it ends long before all has come"
        finally:
            stop.set()
            feeder.join()


@pytest.mark.parametrize("does", ["receive", "send", "nothing"])
def test_a_thread_leaves_the_processor_that_a_peer_beside_works_on_until_it_comes_home(way: ModuleType, does: str) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if way is moves_plain or len(allowed) < 2:
        pytest.skip("never waits" if way is moves_plain else "one processor")
    ended, away, home = threading.Event(), set[frozenset[int]](), set[frozenset[int]]()

    def act(sock: socket.socket) -> None:
        scatter = way.Scatter(bytearray(1 << 20), 1 << 20, 1, None, 0, 0, False)
        while not ended.is_set():
            with contextlib.suppress(BlockingIOError):
                if does == "send":
                    way.send(sock.fileno(), [bytes(1 << 16)], 2, -1, True)
                elif scatter.missing:
                    scatter.receive(sock.fileno(), bytearray(64), 2, 1, (), -1, does == "receive")
                else:
                    scatter = way.Scatter(bytearray(1 << 20), 1 << 20, 1, None, 0, 0, False)
            away.add(frozenset(os.sched_getaffinity(0)))
            way.come_home()
            home.add(frozenset(os.sched_getaffinity(0)))

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        sock, _ = server.accept()
        sock.setblocking(False)
        thread = threading.Thread(target=act, args=[sock])
        rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in allowed[1:]]
        thread.start()
        try:
            until = time.monotonic() + (0.5 if does == "nothing" else 20)
            for turn in itertools.count():
                if len(away) > 1 or time.monotonic() > until:
                    break
                here = allowed[turn // 8 % len(allowed)]
                os.sched_setaffinity(0, [here])  # the others are kept busy: the kernel sees no better place for the thread
                for rival, other in zip(rivals, (one for one in allowed if one != here), strict=True):
                    os.sched_setaffinity(rival.pid, [other])
                if does == "send":
                    peer.recv(1 << 20)
                else:
                    peer.sendall(bytes(1 << 18))
                time.sleep(0.001)
        finally:
            ended.set()
            thread.join()
            os.sched_setaffinity(0, allowed)
            for rival in rivals:
                rival.kill()
                rival.wait()
            sock.close()
    assert all(len(mask) == len(allowed) - 1 for mask in away - home)
    assert len(away) > 1 or does == "nothing"
    assert home == {frozenset(allowed)}, "it may run wherever it could before"


def test_only_frames_and_a_header_may_follow(way: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    if way is moves_plain:
        pytest.skip("takes none")
    one, other = (way.Scatter(bytearray(4), 4, 1, None, 0, 0, False) for _ in range(2))
    bad: tuple[Any, ...]
    for bad in ((b"x" * 48,), (b"x" * 47, other), (bytearray(48), other), (b"x" * 48, None), (b"x" * 48, other) * 65):
        with pytest.raises(ValueError, match="at most 64 frames"):
            one.receive(pair[1].fileno(), bytearray(64), 1, 1, bad)
    with pytest.raises(ValueError, match="no header"):
        one.receive(pair[1].fileno(), bytearray(63), 1, 1, (b"x" * 48, other))
    with pytest.raises(TypeError):
        one.receive(pair[1].fileno(), bytearray(64), 1, 1, [b"x" * 48, other])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("size", "count"), [(16, 3000), (100_000, 20), (3 << 20, 1)])
def test_shared_memory_is_read_while_its_ticket_holds(way: ModuleType, size: int, count: int, threads: int) -> None:
    data = ctypes.create_string_buffer(content(size * count), size * count)
    ticket = ctypes.create_string_buffer(b"t" * 32, 32)
    ids = numbers(*random.Random(3).sample(range(count), count))
    memory = bytearray(size * count)

    def read(expected: bytes) -> tuple[bool, bytes]:
        scatter = way.Scatter(memory, size, count, ids, size, 0, True)
        held = scatter.read(ctypes.addressof(data), ctypes.addressof(ticket), expected, threads)
        assert held == (scatter.missing == 0) or way is moves_plain
        return held, scatter.sums()

    assert read(b"t" * 32) == (True, frames.sums(data.raw, size))
    for n, block in enumerate(ids):
        assert memory[block * size:(block + 1) * size] == data.raw[n * size:(n + 1) * size]
    assert not read(b"u" * 32)[0]


def test_a_helper_that_comes_late_writes_nothing_and_ends(way: ModuleType) -> None:
    """Its processors are taken: it begins in the middle of a call, or when that is over and its memory is another's."""
    if way is moves_plain:
        pytest.skip("has none")
    size, count, ticket = 1 << 16, 64, ctypes.create_string_buffer(b"t" * 32, 32)
    data = ctypes.create_string_buffer(content(size * count), size * count)
    memory, where, before = bytearray(size * count), ctypes.addressof(data), threads_here()
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        for turn in range(100):
            scatter = way.Scatter(memory, size, count, None, 0, 0, True)
            assert scatter.read(where, ctypes.addressof(ticket), b"t" * 32, 2)
            assert scatter.sums() == frames.sums(data.raw, size)
            del scatter
            assert memory == data.raw
            memory[:] = bytes(len(memory))
            if turn % 10 == 0:
                time.sleep(0.01)
                assert not any(memory)
            assert threads_here() <= before + 4
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    deadline = time.monotonic() + 60
    while threads_here() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads_here() <= before
    assert not any(memory)


def threads_here() -> int:
    return len(os.listdir("/proc/self/task"))


def test_copies_of_any_length_and_alignment_are_whole_and_summed_up_as_they_are(way: ModuleType) -> None:
    """Past the caches where the place allows it, through them elsewhere; not a byte beside the blocks is touched."""
    draw = random.Random(5)
    for turn in range(120):
        size = draw.choice([draw.randrange(1, 300), draw.randrange(3900, 4400), draw.randrange(1, 200_000),
                            64 * draw.randrange(60, 3000), 1024 * draw.randrange(4, 200) + draw.randrange(3)])
        count, skip, shift, cover = draw.randrange(1, 4), draw.randrange(128), draw.choice([0, 0, 1, 64, 77]), turn % 3 > 0
        stride = -(-(size + skip) // 64) * 64 + 64 * (turn % 2)
        data = content(size * count + shift, turn)
        source = ctypes.create_string_buffer(data, len(data))
        ids = numbers(*draw.sample(range(count + 2), count))
        memory = bytearray(b"\xee") * (stride * (count + 2) + skip + 64)
        base = -moves_plain.address_of(memoryview(memory)) % 64
        view = memoryview(memory)[base:base + stride * (count + 2) + skip]
        scatter = way.Scatter(view, size, count, ids, stride, skip // 64 * 64 if turn % 4 else skip, cover)
        scatter.copy(ctypes.addressof(source) + shift)
        expected = bytearray(b"\xee") * len(view)
        for n, block in enumerate(ids):
            at = block * stride + (skip // 64 * 64 if turn % 4 else skip)
            expected[at:at + size] = data[shift + n * size:shift + (n + 1) * size]
        assert view == expected, (turn, size, count, skip)
        assert scatter.sums() == (frames.sums(data[shift:], size) if cover else b"")


def test_memory_of_this_process_is_copied(way: ModuleType) -> None:
    data = ctypes.create_string_buffer(content(70_000 * 4), 70_000 * 4)
    memory = bytearray(70_000 * 4)
    scatter = way.Scatter(memory, 70_000, 4, numbers(3, 2, 1, 0), 70_000, 0, True)
    scatter.copy(ctypes.addressof(data))
    assert memory == b"".join(data.raw[n * 70_000:(n + 1) * 70_000] for n in (3, 2, 1, 0))
    assert (scatter.missing, scatter.sums()) == (0, frames.sums(data.raw, 70_000))


@pytest.mark.parametrize("bad", [
    (4, 0, None, 0, 0), (0, 4, None, 0, 0), (30, 4, None, 0, 0), (4, 2, numbers(1), 4, 0), (4, 1, numbers(-1), 4, 0),
    (4, 1, numbers(25), 4, 0), (4, 1, numbers(24), 4, 1), (4, 1, numbers(2 ** 62), 4, 0), (101, 1, numbers(0), 1, 0)])
def test_places_outside_of_the_memory_are_refused(way: ModuleType, bad: tuple[int, int, Any, int, int]) -> None:
    with pytest.raises(ValueError, match=r"outside of the memory|no blocks"):
        way.Scatter(bytearray(100), *bad, False)


def test_a_full_socket_takes_what_fits_and_a_closed_one_is_an_error(
        way: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    views = [memoryview(content(300_000, n)) for n in range(10)]
    whole, got, sent = b"".join(views), b"", 0
    sent = way.send(pair[0].fileno(), views, 1)
    assert 0 < sent < len(whole)
    with pytest.raises(BlockingIOError):
        way.send(pair[0].fileno(), [b"x"], 1)
    while len(got) < sent:
        got += pair[1].recv(1 << 20)
    assert got == whole[:sent]
    assert way.send(pair[0].fileno(), [b"ab", b"", b"c"], 0) == 3
    pair[1].close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        way.send(pair[0].fileno(), views, 1)


def test_nothing_is_kept_of_what_is_done(way: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    memory, ids = bytearray(1 << 20), array("q", range(1024))
    before = sys.getrefcount(memory), sys.getrefcount(ids)
    address = ctypes.addressof(ctypes.c_char.from_buffer(bytearray(1 << 20)))
    most = 0
    for turn in range(400):
        scatter = way.Scatter(memory, 1024, 1024, memoryview(ids), 1024, 0, True)
        with pytest.raises(BlockingIOError):
            scatter.receive(pair[1].fileno(), memoryview(bytearray(8)), 0, 1, ())
        with pytest.raises(ValueError, match="outside"):
            way.Scatter(memory, 1024, 1024, memoryview(ids), 2048, 0, True)
        way.send(pair[0].fileno(), [memoryview(b"x")], 0)
        pair[1].recv(1)
        if turn == 100:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    del scatter, address
    assert (sys.getrefcount(memory), sys.getrefcount(ids)) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 4 << 10, "KiB"
    memory += b"x"  # an exported buffer would forbid it
