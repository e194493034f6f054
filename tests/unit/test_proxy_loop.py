"""The router's loop: connections that C reads behave as asyncio's own, and nothing else waits because of them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from xpyd_sidecar.proxy import fast, loop
from xpyd_sidecar.proxy.leg import descriptor_of

LOOPS = ("asyncio", "uvloop", "router")
ours = pytest.mark.skipif(not loop.COMPILED, reason="nothing was compiled here")
LIMIT_S = 5.0


class Heard(asyncio.Protocol):
    """Has the loop read for it, and remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.data = b""
        self.ended = asyncio.get_running_loop().create_future()
        self.on_data: Callable[[Heard, bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        loop.adopt(asyncio.get_running_loop(), self, self.transport, descriptor_of(transport))

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.on_data is not None:
            self.on_data(self, data)

    def eof_received(self) -> None:
        self.told.append("eof")

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        loop.release(asyncio.get_running_loop(), self)
        self.told.append("lost" if exc is None else type(exc))
        self.ended.set_result(None)

    async def has(self, data: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.data != data:  # noqa: ASYNC110 (any number of reads may bring it)
                await asyncio.sleep(0.001)


async def connected(kind: type[Heard] = Heard) -> tuple[Heard, socket.socket]:
    """A connection, and its other end, which blocks for a limited time."""
    near, far = socket.socketpair()
    far.settimeout(LIMIT_S)
    _, heard = await asyncio.get_running_loop().create_connection(kind, sock=near)
    return heard, far


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Heard, socket.socket]]:
    heard, far = await connected()
    yield heard, far
    far.close()
    heard.transport.abort()
    async with asyncio.timeout(LIMIT_S):
        await heard.ended


async def test_what_comes_is_given_on_and_the_end_is_told(pair: tuple[Heard, socket.socket]) -> None:
    heard, far = pair
    for part in (b"one", b"two", b"x" * 300_000):
        far.setblocking(True)
        await asyncio.to_thread(far.sendall, part)
    await heard.has(b"onetwo" + b"x" * 300_000)
    far.close()
    async with asyncio.timeout(LIMIT_S):
        await heard.ended
    assert heard.told == ["eof", "lost"]


async def test_a_broken_connection_is_told_with_its_reason(pair: tuple[Heard, socket.socket]) -> None:
    heard, far = pair
    heard.transport.write(b"unread")
    await asyncio.sleep(0)
    far.close()  # with bytes unread: a reset
    async with asyncio.timeout(LIMIT_S):
        await heard.ended
    assert heard.told[-1] in (ConnectionResetError, BrokenPipeError, "lost")


async def test_nothing_is_read_while_reading_is_paused(pair: tuple[Heard, socket.socket]) -> None:
    heard, far = pair
    heard.transport.pause_reading()
    far.sendall(b"kept")
    await asyncio.sleep(0.05)
    assert heard.data == b""
    heard.transport.resume_reading()
    await heard.has(b"kept")


async def test_who_is_paused_by_another_of_the_same_turn_hears_nothing() -> None:
    """Both have something to be read; who is first pauses the other."""
    (one, far_one), (two, far_two) = await connected(), await connected()
    one.on_data = lambda _, __: two.transport.pause_reading()
    two.on_data = lambda _, __: one.transport.pause_reading()
    far_one.sendall(b"a")
    far_two.sendall(b"a")
    await asyncio.sleep(0.05)
    assert sorted((one.data, two.data)) == [b"", b"a"]
    one.on_data = two.on_data = None
    for each in (one, two):
        if not each.data:
            each.transport.resume_reading()
    await one.has(b"a")
    await two.has(b"a")
    for heard, far in ((one, far_one), (two, far_two)):
        far.close()
        heard.transport.abort()
        await heard.ended


async def test_who_is_aborted_by_another_of_the_same_turn_hears_nothing_more() -> None:
    (one, far_one), (two, far_two) = await connected(), await connected()
    one.on_data = lambda _, __: two.transport.abort()
    two.on_data = lambda _, __: one.transport.abort()
    far_one.sendall(b"a")
    far_two.sendall(b"a")
    await asyncio.sleep(0.05)
    assert sorted((one.data, two.data)) == [b"", b"a"]
    for heard, far in ((one, far_one), (two, far_two)):
        far.close()
        heard.transport.abort()
        await heard.ended


async def test_one_reads_and_writes_at_once_with_a_peer_that_is_slow_to_read(pair: tuple[Heard, socket.socket]) -> None:
    heard, far = pair
    heard.transport.set_write_buffer_limits(high=1000)
    answer = os.urandom(4 << 20)
    heard.transport.write(answer)
    assert heard.told == ["pause"]
    far.sendall(b"asked meanwhile")
    await heard.has(b"asked meanwhile")

    def read() -> bytes:
        got = bytearray()
        while len(got) < len(answer):
            got += far.recv(1 << 16)
        return bytes(got)

    assert await asyncio.to_thread(read) == answer
    async with asyncio.timeout(LIMIT_S):
        while heard.told != ["pause", "resume"]:  # noqa: ASYNC110 (told by the loop)
            await asyncio.sleep(0.001)
    far.sendall(b", and after")
    await heard.has(b"asked meanwhile, and after")


async def test_a_protocol_that_fails_costs_its_own_connection_alone(pair: tuple[Heard, socket.socket]) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    heard, far = pair
    other, far_other = await connected()

    def fail(heard: Heard, data: bytes) -> None:
        raise RuntimeError("a bug")

    heard.on_data = fail
    far.sendall(b"a")
    async with asyncio.timeout(LIMIT_S):
        await heard.ended
    assert [str(context["exception"]) for context in told] == ["a bug"]
    assert told[0]["protocol"] is heard
    far_other.sendall(b"b")
    await other.has(b"b")
    far_other.close()
    await other.ended


async def test_descriptors_of_closed_connections_serve_the_next_ones() -> None:
    seen = set()
    for number in range(50):
        heard, far = await connected()
        seen.add(heard.transport.get_extra_info("socket").fileno())
        far.sendall(b"%d" % number)
        await heard.has(b"%d" % number)
        far.close()
        async with asyncio.timeout(LIMIT_S):
            await heard.ended
    assert len(seen) < 10


class Relayed(fast.Leg, asyncio.Protocol):
    """A leg that relays events as they are."""

    def __init__(self, outlet: fast.Outlet) -> None:
        stream = fast.Scanner()
        stream._clean, stream._framed, stream._way = True, True, fast.PLAIN
        self.rest = b""
        self.relay(stream, outlet)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        loop.adopt(asyncio.get_running_loop(), self, cast("asyncio.Transport", transport), descriptor_of(transport))

    def received(self, data: bytes) -> None:
        self.rest += data

    def connection_lost(self, exc: Exception | None) -> None:
        loop.release(asyncio.get_running_loop(), self)


EVENT = b'data: {"id":"a"}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


@ours
async def test_nothing_waits_for_a_stream_without_end() -> None:
    """Turns follow each other in C; timers, other threads, callbacks and signals are heard all the same."""
    running = asyncio.get_running_loop()
    client, far_client = await connected()
    outlet = fast.Outlet()
    outlet.open(client.transport, descriptor_of(client.transport))
    near, far = socket.socketpair()
    await running.create_connection(lambda: Relayed(outlet), sock=near)
    over = threading.Event()
    relayed = 0

    def engine() -> None:
        while not over.is_set():
            far.sendall(CHUNK)

    def reader() -> None:
        nonlocal relayed
        while data := far_client.recv(1 << 16):
            relayed += len(data)

    threads = [threading.Thread(target=each, daemon=True) for each in (engine, reader)]
    for each in threads:
        each.start()
    try:
        heard = asyncio.Event()
        running.add_signal_handler(signal.SIGUSR1, heard.set)
        late = []
        for _ in range(50):
            began = time.monotonic()
            await asyncio.sleep(0.002)
            late.append(time.monotonic() - began)
        async with asyncio.timeout(LIMIT_S):
            assert await running.run_in_executor(None, lambda: 7) == 7
            os.kill(os.getpid(), signal.SIGUSR1)
            await heard.wait()
    finally:
        running.remove_signal_handler(signal.SIGUSR1)
        over.set()
        await asyncio.to_thread(threads[0].join, LIMIT_S)
        far.close()
        await asyncio.sleep(0.05)
        client.transport.abort()
        await client.ended
        await asyncio.to_thread(threads[1].join, LIMIT_S)
        far_client.close()
    assert sorted(late)[25] < 0.05
    assert relayed > 100 * len(CHUNK)


@ours
async def test_a_cancellation_out_of_place_is_a_failure_as_any_other(pair: tuple[Heard, socket.socket]) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    heard, far = pair

    def fail(heard: Heard, data: bytes) -> None:
        raise asyncio.CancelledError

    heard.on_data = fail
    far.sendall(b"a")
    async with asyncio.timeout(LIMIT_S):
        await heard.ended
    assert [type(context["exception"]) for context in told] == [asyncio.CancelledError]


@ours
async def test_an_interrupt_while_bytes_are_given_on_ends_the_loop_in_order() -> None:
    made = loop.Loop()

    def interrupt(heard: Heard, data: bytes) -> None:
        raise KeyboardInterrupt

    async def serve() -> None:
        heard, far = await connected()
        heard.on_data = interrupt
        far.sendall(b"a")
        await heard.ended

    def run() -> None:
        task = made.create_task(serve())
        with pytest.raises(KeyboardInterrupt):
            made.run_until_complete(task)
        task.cancel()
        made.run_until_complete(asyncio.gather(task, return_exceptions=True))
        made.close()

    await asyncio.to_thread(run)


@ours
async def test_a_closed_loop_keeps_no_connection() -> None:
    def run() -> weakref.ref[Heard]:
        made = loop.Loop()

        async def leave_it_open() -> weakref.ref[Heard]:
            heard, _ = await connected()
            return weakref.ref(heard)

        left = made.run_until_complete(leave_it_open())
        made.close()
        return left

    left = await asyncio.to_thread(run)
    with pytest.warns(ResourceWarning):
        gc.collect()
    assert left() is None


@ours
def test_a_number_that_is_no_descriptor_is_refused() -> None:
    reads = loop._loop.Reads()
    for number in (-1, 1 << 30):
        with pytest.raises(ValueError, match="no descriptor"):
            reads.adopt(number, asyncio.Protocol())
    reads.release(5)  # never adopted: nothing to do


@ours
def test_tls_and_missing_parts_take_the_other_loop() -> None:
    assert loop.maker() is loop.Loop
    assert loop.maker(encrypted=True) is not loop.Loop


class Told(Heard):
    """Writes through an outlet, as the router's connections do."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.outlet = fast.Outlet()
        self.outlet.open(transport, descriptor_of(transport))


def all_of(far: socket.socket, size: int) -> bytes:
    """So many bytes, or what came until the end."""
    far.settimeout(LIMIT_S)
    got = bytearray()
    while len(got) < size and (data := far.recv(1 << 16)):
        got += data
    return bytes(got)


async def told_at_once(count: int, answer: Callable[[Told, bytes], None]) -> list[tuple[Told, socket.socket]]:
    """So many connections that hear something in one turn, and answer it."""
    pairs = [await connected(Told) for _ in range(count)]
    for heard, far in pairs:
        heard.on_data = cast("Callable[[Heard, bytes], None]", answer)
        far.sendall(b"%d" % far.fileno())
    return cast("list[tuple[Told, socket.socket]]", pairs)


async def shut(pairs: list[tuple[Told, socket.socket]]) -> None:
    for heard, far in pairs:
        far.close()
        heard.transport.abort()
        await heard.ended


async def test_many_that_hear_in_one_turn_write_in_their_order() -> None:
    """More than are held at a time, who write more than is gathered at a time."""
    def answer(one: Told, data: bytes) -> None:
        for number in range(5):
            one.outlet.write(b"%b-%d " % (data, number))

    pairs = await told_at_once(50, answer)
    for _, far in pairs:
        wanted = b"".join(b"%d-%d " % (far.fileno(), number) for number in range(5))
        assert await asyncio.to_thread(all_of, far, len(wanted)) == wanted
    await shut(pairs)


async def test_what_was_written_leaves_before_its_connection_is_closed() -> None:
    def answer(one: Told, data: bytes) -> None:
        one.outlet.write(b"first ")
        one.outlet.write(b"last")
        one.outlet.shut()
        one.outlet.write(b"nobody")
        one.transport.close()

    pairs = await told_at_once(3, answer)
    for _, far in pairs:
        assert await asyncio.to_thread(all_of, far, 1 << 16) == b"first last"
    await shut(pairs)


async def test_who_is_full_in_a_turn_is_paused_and_loses_nothing() -> None:
    """The socket takes a part of the first write, and all others lie behind it."""
    large = [os.urandom(1 << 20) for _ in range(6)]

    def answer(one: Told, _: bytes) -> None:
        one.transport.set_write_buffer_limits(high=1000)
        for each in large:
            one.outlet.write(each)
        one.outlet.write(memoryview(b"the end"))

    pairs = await told_at_once(2, answer)
    for heard, far in pairs:
        wanted = b"".join(large) + b"the end"
        assert await asyncio.to_thread(all_of, far, len(wanted)) == wanted
        assert heard.told[0] == "pause"
    await shut(pairs)


async def test_what_a_full_one_does_when_it_is_told_so_is_done_at_once() -> None:
    """Told in the midst of what leaves: what it writes then goes behind what was written before, and it may shut."""
    large = os.urandom(6 << 20)

    class Shuts(Told):
        def pause_writing(self) -> None:
            super().pause_writing()
            self.outlet.write(b"paused")
            self.outlet.shut()
            self.outlet.write(b"nobody")

    def answer(one: Heard, _: bytes) -> None:
        assert isinstance(one, Shuts)
        one.outlet.write(large)
        one.outlet.write(b"more")

    heard, far = await connected(Shuts)
    heard.on_data = answer
    far.sendall(b"a")
    gathers = isinstance(asyncio.get_running_loop(), loop.Loop)
    wanted = large + (b"morepaused" if gathers else b"paused")
    assert await asyncio.to_thread(all_of, far, len(wanted)) == wanted
    assert heard.told[0] == "pause"
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    await shut([(cast("Told", heard), far)])


async def test_who_is_paused_by_another_of_the_same_turn_and_resumed_in_it_hears_all_in_order() -> None:
    """Also where the one that resumes it is its only hope: nobody sends anything more."""
    (one, far_one), (two, far_two), (three, far_three) = [await connected() for _ in range(3)]
    first: list[Heard] = []

    def on_data(heard: Heard, _: bytes) -> None:
        first.append(heard)
        others = [each for each in (one, two, three) if each not in first]
        for each in others:
            if len(first) == 1:
                each.transport.pause_reading()
        if len(first) == 1:
            asyncio.get_running_loop().call_later(0.02, others[0].transport.resume_reading)
            asyncio.get_running_loop().call_later(0.02, others[1].transport.resume_reading)

    for heard, far in ((one, far_one), (two, far_two), (three, far_three)):
        heard.on_data = on_data
        far.sendall(b"a")
    await asyncio.sleep(0.01)
    for far in (far_one, far_two, far_three):
        far.sendall(b"b")
    for heard in (one, two, three):
        await heard.has(b"ab")
    for heard, far in ((one, far_one), (two, far_two), (three, far_three)):
        far.close()
        heard.transport.abort()
        await heard.ended


async def test_the_collector_may_come_between_those_that_hear_in_one_turn() -> None:
    """It counts what the loop refers to: those that have heard are referred to once, as who is read."""
    reads = getattr(asyncio.get_running_loop(), "_reads", None)
    heard: list[Told] = []
    counted: list[int] = []

    def answer(one: Told, data: bytes) -> None:
        gc.collect()
        counted.extend(gc.get_referents(reads).count(each) for each in heard if reads is not None)
        heard.append(one)
        one.outlet.write(data)

    pairs = await told_at_once(10, answer)
    for _, far in pairs:
        wanted = b"%d" % far.fileno()
        assert await asyncio.to_thread(all_of, far, len(wanted)) == wanted
    assert counted == [1] * (45 if reads is not None else 0)
    seen = [weakref.ref(one) for one in heard]
    await shut(pairs)
    pairs.clear()
    heard.clear()
    del _
    await asyncio.sleep(0)
    gc.collect()
    assert [one() for one in seen] == [None] * 10
