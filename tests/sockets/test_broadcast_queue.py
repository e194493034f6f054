"""The broadcast queue: every message to every reader, and what happens when one of them is gone or stuck."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import queue_peers
from queue_peers import CHUNK, KEY, Joined, start
from queues import JOIN_S, WAYS, Make, making

from xpyd_sidecar.broadcast import message, remote, wire
from xpyd_sidecar.broadcast.errors import NothingCame, QueueClosed, ReadCancelled, ReaderDropped, ReaderStuck
from xpyd_sidecar.broadcast.local import QueueLink
from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import join
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import OurFault, PeerGone


@pytest.fixture
def make() -> Iterator[Make]:
    yield from making()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", [KEY, None], ids=["curve", "plain"])
def test_messages_of_all_sizes_and_counts_of_parts_come_as_they_were_sent(make: Make, way: str,
                                                                          key: ServiceKey | None) -> None:
    queue = make(way, key)
    pool = os.urandom(300_000)
    sizes = (0, 1, 63, 64, 65, CHUNK - 65, CHUNK - 64, CHUNK - 63, CHUNK, 20_000, 300_000, 7)
    for size in sizes:
        for parts in ([pool[:size]], [b"head", bytearray(pool[:size]), memoryview(pool)[5:size]], [b""] * 9):
            queue.writer.send(*parts)
            for reader in queue.each():
                assert reader.recv(20) == [bytes(part) for part in parts]


@pytest.mark.parametrize("way", ["local", "remote"])
def test_taken_views_are_without_a_copy_read_only_and_end_with_the_block(make: Make, way: str) -> None:
    queue = make(way)
    for payload in (b"small", os.urandom(10_000)):
        queue.writer.send(payload, b"second")
        for reader in queue.each():
            with reader.take(5) as views:
                assert [bytes(view) for view in views] == [payload, b"second"]
                assert all(view.readonly for view in views)
            with pytest.raises(ValueError, match="released"):
                bytes(views[0])


def test_parts_can_be_viewed_as_arrays_of_any_type(make: Make) -> None:
    queue = make()
    queue.writer.send(b"x", memoryview(bytes(8 * 5)))
    with queue.each()[0].take(5) as (_, numbers):
        assert list(numbers.cast("d")) == [0.0] * 5


def test_the_writer_may_change_its_buffers_once_send_returns(make: Make) -> None:
    queue = make("both")
    for size in (100, 50_000):
        buffer = bytearray(b"a" * size)
        queue.writer.send(buffer)
        buffer[:] = b"b" * size
        assert [reader.recv(20) for reader in queue.each()] == [[b"a" * size]] * 4


@pytest.mark.parametrize("way", WAYS)
def test_notes_of_readers_reach_the_writer(make: Make, way: str) -> None:
    queue = make(way)
    assert queue.notes == {name: name.encode() for name in queue.readers}
    assert set(queue.writer.live) == set(queue.readers)


@pytest.mark.parametrize("way", ["local", "remote"])
def test_idle_for_longer_than_any_timeout_the_queue_goes_on_working(make: Make, way: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "HEARTBEAT_MS", 50)
    monkeypatch.setattr(remote, "SILENCE_MS", 3000)
    queue = make(way)
    reader = queue.each()[0]
    with pytest.raises(NothingCame, match=r"nothing from the writer of q in 0\.1"):
        reader.recv(0.1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.recv, None)
        time.sleep(4.0)
        queue.writer.send(b"late")
        assert waiting.result(20) == [b"late"]
    with pytest.raises(TimeoutError):
        reader.recv(0)


@pytest.mark.parametrize("way", ["local", "remote"])
def test_a_reader_that_lives_and_does_not_read_is_named_and_nobody_gets_the_message(make: Make, way: str) -> None:
    queue = make(way, chunks=3)
    busy, stuck = queue.each()
    for number in range(3):
        queue.writer.send(bytes([number]))
        assert busy.recv(20) == [bytes([number])]
    began = time.monotonic()
    with pytest.raises(ReaderStuck, match=r"message 1 not given back for 0\.3 s") as caught:
        queue.writer.send(b"x", timeout_s=0.3)
    assert 0.25 < time.monotonic() - began < 10
    assert caught.value.readers == (stuck.name,)
    with pytest.raises(NothingCame):
        busy.recv(0.05)
    assert [stuck.recv(20) for _ in range(3)] == [[b"\0"], [b"\1"], [b"\2"]]
    queue.writer.send(b"again")
    assert [reader.recv(20) for reader in queue.each()] == [[b"again"]] * 2
    assert queue.dropped == []


def test_messages_larger_than_a_chunk_wait_for_their_segments_too(make: Make) -> None:
    queue = make(chunks=10)
    big = os.urandom(9000)
    queue.writer.send(big)
    queue.writer.send(big)
    with pytest.raises(ReaderStuck, match="message 1"):
        queue.writer.send(big, timeout_s=0.1)
    queue.writer.send(b"small ones pass")
    for reader in queue.each():
        assert [reader.recv(20) for _ in range(3)] == [[big], [big], [b"small ones pass"]]
    queue.writer.send(big)
    assert [reader.recv(20) for reader in queue.each()] == [[big]] * 2


def test_while_waiting_is_called(make: Make) -> None:
    queue = make(chunks=2)
    calls: list[float] = []

    def read() -> None:
        calls.append(time.monotonic())
        for reader in queue.each():
            reader.recv(0.5)

    for _ in range(3):
        queue.writer.send(b"x", timeout_s=10, while_waiting=read)
    assert len(calls) == 1


@pytest.mark.parametrize("way", ["local", "remote"])
def test_a_dropped_reader_is_told_and_the_others_go_on(make: Make, way: str) -> None:
    queue = make(way, chunks=2)
    good, bad = queue.each()
    queue.writer.drop(bad.name, "it is slow")
    queue.writer.drop(bad.name, "again")
    for number in range(20):
        queue.writer.send(bytes([number]))
        assert good.recv(20) == [bytes([number])]
    with pytest.raises(ReaderDropped):  # noqa: PT012 (what was sent before may still come)
        for _ in range(3):
            bad.recv(20)
    assert queue.dropped == [(bad.name, "it is slow")]
    assert queue.writer.lost == {bad.name: "it is slow"}
    assert queue.writer.live == (good.name,)
    with pytest.raises(ValueError, match="'nobody' is not one of its readers"):
        queue.writer.drop("nobody", "")


def test_a_reader_that_is_dropped_while_it_reads_learns_that_its_bytes_may_be_torn(make: Make) -> None:
    queue = make()
    queue.writer.send(b"x")
    with pytest.raises(ReaderDropped, match="may be torn"), queue.each()[1].take(5):
        queue.writer.drop("l1", "test")


@pytest.mark.parametrize("way", ["local", "remote"])
def test_a_reader_whose_process_is_killed_is_dropped_and_never_blocks_for_good(way: str) -> None:
    dropped: list[tuple[str, str]] = []
    names: dict[str, tuple[str, ...]] = {way: ("dies",)}
    writer = Writer("q", local=("lives", *names.get("local", ())), remote=names.get("remote", ()), chunks=2, key=KEY,
                    on_drop=lambda *event: dropped.append(event))
    process, told = start(queue_peers.hold, writer.handle, "dies")
    with ThreadPoolExecutor() as pool:
        living = pool.submit(join, writer.handle, "lives", timeout_s=JOIN_S)
        writer.wait_ready(JOIN_S)
        reader = living.result()
    assert told.recv() == "joined"
    writer.send(b"0")
    assert reader.recv(20) == [b"0"]
    assert told.recv() == "read"
    process.kill()
    process.join()
    began = time.monotonic()
    for number in range(1, 10):
        writer.send(bytes([number]), timeout_s=15)
        assert reader.recv(20) == [bytes([number])]
    assert time.monotonic() - began < 10
    assert [name for name, _ in dropped] == ["dies"]
    reader.close()
    with pytest.raises(PeerGone, match="every reader is gone"):  # noqa: PT012 (once the ring is full)
        for _ in range(5):
            writer.send(b"x", timeout_s=5)
    writer.close()


def test_check_finds_dead_readers_without_sending() -> None:
    writer = Writer("q", local=("a",), remote=("b",), key=KEY)
    peers = [start(queue_peers.hold, writer.handle, name) for name in ("a", "b")]
    writer.wait_ready(JOIN_S)
    for process, _ in peers:
        process.kill()
        process.join()
    end = time.monotonic() + JOIN_S
    while len(writer.lost) < 2 and time.monotonic() < end:
        writer.check()
        time.sleep(0.05)
    assert sorted(writer.lost) == ["a", "b"]
    writer.close()


def test_a_dead_reader_is_noticed_though_a_child_of_it_holds_its_connection_open() -> None:
    writer = Writer("q", local=("a",))
    process, told = start(queue_peers.hold_with_child, writer.handle, "a")
    writer.wait_ready(JOIN_S)
    writer.send(b"x")
    child = told.recv()
    process.kill()
    process.join()
    try:
        writer.check()
        assert writer.lost == {"a": "its process has ended"}
    finally:
        os.kill(child, signal.SIGKILL)
        writer.close()


def remains(needle: str) -> list[str]:
    """Mappings and descriptors of living processes, files and sockets that have the needle in their name."""
    found = [str(path) for path in Path("/dev/shm").iterdir() if needle in path.name]
    found += [line for line in Path("/proc/net/unix").read_text().splitlines() if needle in line]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found += [line for line in maps.read_text().splitlines() if needle in line]
        except OSError:
            continue
    return found


def test_a_killed_writer_loses_nothing_that_it_published_and_nothing_stays_behind() -> None:
    process, told = start(queue_peers.write, ("a",), 6, 20)
    handle = told.recv()
    reader = join(handle, "a", timeout_s=JOIN_S)
    assert told.recv() == "written"
    door = wire.read_handle(handle).door
    assert remains("xpyd-killed")
    assert remains(door)
    process.kill()
    process.join()
    assert [int.from_bytes(reader.recv(20)[0][:8], "little") for _ in range(6)] == list(range(6))
    began = time.monotonic()
    with pytest.raises(PeerGone, match="writer of killed: its process has ended"):
        reader.recv(None)
    assert time.monotonic() - began < 10
    reader.close()
    del reader
    assert remains("xpyd-killed") == []
    assert remains(door) == []


def two(reader: Joined) -> list[list[bytes]]:
    return [reader.recv(20), reader.recv(20)]


@pytest.mark.parametrize("way", WAYS)
def test_close_lets_readers_read_everything_and_then_says_so(make: Make, way: str) -> None:
    queue = make(way)
    big = os.urandom(10_000)
    queue.writer.send(b"1")
    queue.writer.send(big)
    with ThreadPoolExecutor() as pool:
        got = [pool.submit(two, reader) for reader in queue.each()]
        queue.writer.close(5)
        assert [each.result() for each in got] == [[[b"1"], [big]]] * len(got)
    for reader in queue.each():
        with pytest.raises(QueueClosed, match="after message 2"):
            reader.recv(20)
    with pytest.raises(OurFault, match="sent after close"):
        queue.writer.send(b"x")


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_writer_that_ends_while_a_reader_looks_whether_it_lives_is_not_taken_for_dead(
        make: Make, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    queue = make()
    reader = queue.readers["l0"]
    looked = QueueLink.gone

    def gone(link: QueueLink) -> bool:
        if end == "close":
            queue.writer.close()
        else:
            queue.writer.drop("l0", "test")
        return looked(link)

    monkeypatch.setattr(QueueLink, "gone", gone)
    with pytest.raises(QueueClosed if end == "close" else ReaderDropped):
        reader.recv(20)


def test_local_readers_still_get_what_a_closed_writer_published(make: Make) -> None:
    queue = make()
    queue.writer.send(b"1")
    queue.writer.close()
    assert [reader.recv(20) for reader in queue.each()] == [[b"1"]] * 2


@pytest.mark.parametrize("way", ["local", "remote"])
def test_another_thread_can_end_a_wait_and_the_reader_can_be_used_again(make: Make, way: str) -> None:
    queue = make(way)
    reader = queue.each()[0]
    timer = threading.Timer(0.3, reader.cancel)
    timer.start()
    with pytest.raises(ReadCancelled):
        reader.recv(None)
    queue.writer.send(b"x")
    assert reader.recv(20) == [b"x"]


def test_a_parked_reader_and_writer_use_next_to_no_processor(make: Make) -> None:
    queue = make(chunks=2)
    for _ in range(2):
        queue.writer.send(b"x")
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            queue.readers["l0"].recv(20)
        parked = pool.submit(queue.readers["l0"].recv, None)
        before, began = time.process_time(), time.monotonic()
        with pytest.raises(ReaderStuck):
            queue.writer.send(b"y", timeout_s=2.0)
        used, took = time.process_time() - before, time.monotonic() - began
        queue.readers["l1"].recv(20)
        queue.writer.send(b"z")
        assert parked.result(20) == [b"z"]
    assert used / took < 0.05


def test_messages_out_of_bounds_are_refused_and_the_queue_goes_on(make: Make) -> None:
    queue = make("both", message_max=10_000)
    for parts in ([], [b""] * (message.PARTS_MAX + 1), [bytes(5000), bytes(5001)], [b""] * 600):
        with pytest.raises(ValueError, match="parts"):
            queue.writer.send(*parts)
    with pytest.raises((TypeError, BufferError)):
        queue.writer.send(memoryview(bytes(10))[::2])
    queue.writer.send(b"x")
    assert [reader.recv(20) for reader in queue.each()] == [[b"x"]] * 4


def test_where_the_copy_for_remote_readers_finds_no_memory_nobody_gets_the_message(
        make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make("both")

    def none_left(_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("xpyd_sidecar.broadcast.queue.bytes", none_left, raising=False)
        with pytest.raises(MemoryError):
            queue.writer.send(b"nobody gets this")
    queue.writer.send(b"all get this")
    for reader in queue.each():
        assert reader.recv(20) == [b"all get this"]
