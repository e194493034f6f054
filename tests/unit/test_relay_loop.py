"""The router's loop: connections that C reads behave as asyncio's own, and nothing else waits because of them."""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from loop_peers import LIMIT_S, Heard, all_of, connected, shut

from xpyd_sidecar.router.relay import fast, loop
from xpyd_sidecar.router.relay.loop import descriptor_of

LOOPS = ("asyncio", "uvloop", "router")
ours = pytest.mark.skipif(not loop.COMPILED, reason="nothing was compiled here")


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Heard, socket.socket]]:
    heard, far = await connected()
    yield heard, far
    await shut([(heard, far)])


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


async def test_one_reads_and_writes_at_once_with_a_peer_that_is_slow_to_read(pair: tuple[Heard, socket.socket]) -> None:
    heard, far = pair
    heard.transport.set_write_buffer_limits(high=1000)
    answer = os.urandom(4 << 20)
    heard.transport.write(answer)
    assert heard.told == ["pause"]
    far.sendall(b"asked meanwhile")
    await heard.has(b"asked meanwhile")

    assert await asyncio.to_thread(all_of, far, len(answer)) == answer
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


class Relayed(fast.UpstreamReceiver, asyncio.Protocol):
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
            began = time.thread_time()  # what the loop does before it hears its timer, not what the machine does
            await asyncio.sleep(0.002)
            late.append(time.thread_time() - began)
        async with asyncio.timeout(LIMIT_S):
            while relayed <= 100 * len(CHUNK):  # noqa: ASYNC110 (both threads may have had no processor yet)
                await asyncio.sleep(0.002)
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
    made = loop.RouterLoop()

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
        made = loop.RouterLoop()

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
    assert loop.maker() is loop.RouterLoop
    assert loop.maker(encrypted=True) is not loop.RouterLoop


@ours
async def test_a_descriptor_without_room_is_refused_before_anything_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    made = loop.RouterLoop()
    monkeypatch.setattr(selectors.EpollSelector, "register", lambda *given: registered.append(given))
    try:
        for fd in ((1 << 20) + 1, -1):
            with pytest.raises(ValueError, match="no descriptor"):
                made._selector.register(fd, selectors.EVENT_READ, None)  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match="no descriptor"):
                made.adopt(asyncio.Protocol(), cast("asyncio.Transport", None), fd)
        assert not registered
        assert not made._adopted
    finally:
        made.close()
