"""Several connections that have something to be read in one turn of the router's loop: what they do to each other and to
themselves is as if each had its own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from loop_peers import Heard, all_of, connected, shut

from xpyd_sidecar.router.relay import fast, loop
from xpyd_sidecar.router.relay.loop import descriptor_of

LOOPS = ("asyncio", "uvloop", "router")


class Told(Heard):
    """Writes through an outlet, as the router's connections do."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.outlet = fast.Outlet()
        self.outlet.open(transport, descriptor_of(transport))


async def told_at_once(count: int, answer: Callable[[Told, bytes], None]) -> list[tuple[Told, socket.socket]]:
    """So many connections that hear something in one turn, and answer it."""
    pairs = [await connected(Told) for _ in range(count)]
    for heard, far in pairs:
        heard.on_data = cast("Callable[[Heard, bytes], None]", answer)
        far.sendall(b"%d" % far.fileno())
    return cast("list[tuple[Told, socket.socket]]", pairs)


async def test_who_is_paused_by_another_of_the_same_turn_hears_nothing() -> None:
    """Both have something to be read; who is first pauses the other."""
    (one, far_one), (two, far_two) = await connected(), await connected()
    one.on_data = lambda _, __: two.transport.pause_reading()
    two.on_data = lambda _, __: one.transport.pause_reading()
    far_one.sendall(b"a")
    far_two.sendall(b"a")
    async with asyncio.timeout(30):
        while not one.data + two.data:  # noqa: ASYNC110 (whoever hears first)
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert sorted((one.data, two.data)) == [b"", b"a"]
    one.on_data = two.on_data = None
    for each in (one, two):
        if not each.data:
            each.transport.resume_reading()
    await one.has(b"a")
    await two.has(b"a")
    await shut([(one, far_one), (two, far_two)])


async def test_who_is_aborted_by_another_of_the_same_turn_hears_nothing_more() -> None:
    (one, far_one), (two, far_two) = await connected(), await connected()
    one.on_data = lambda _, __: two.transport.abort()
    two.on_data = lambda _, __: one.transport.abort()
    far_one.sendall(b"a")
    far_two.sendall(b"a")
    async with asyncio.timeout(30):
        while not one.data + two.data:  # noqa: ASYNC110 (whoever hears first)
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert sorted((one.data, two.data)) == [b"", b"a"]
    await shut([(one, far_one), (two, far_two)])


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
    gathers = isinstance(asyncio.get_running_loop(), loop.RouterLoop)
    wanted = large + (b"morepaused" if gathers else b"paused")
    assert await asyncio.to_thread(all_of, far, len(wanted)) == wanted
    assert heard.told[0] == "pause"
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    await shut([(heard, far)])


async def test_who_is_paused_by_another_of_the_same_turn_and_resumed_by_a_third_hears_it() -> None:
    """Nobody sends anything more."""
    (one, far_one), (two, far_two), (three, far_three) = [await connected() for _ in range(3)]
    one.on_data = lambda _, __: two.transport.pause_reading()
    three.on_data = lambda _, __: two.transport.resume_reading()
    for far in (far_one, far_two, far_three):
        far.sendall(b"a")
    for heard in (one, two, three):
        await heard.has(b"a")
    await shut([(one, far_one), (two, far_two), (three, far_three)])


async def test_who_is_paused_by_another_of_the_same_turn_and_resumed_later_hears_all_in_order() -> None:
    """What was read for it before it was paused comes before what is sent meanwhile."""
    (one, far_one), (two, far_two), (three, far_three) = [await connected() for _ in range(3)]
    first: list[Heard] = []

    def on_data(heard: Heard, _: bytes) -> None:
        first.append(heard)
        if len(first) > 1:
            return
        for each in (one, two, three):
            if each is not heard:
                each.transport.pause_reading()
                asyncio.get_running_loop().call_later(0.02, each.transport.resume_reading)

    for heard, far in ((one, far_one), (two, far_two), (three, far_three)):
        heard.on_data = on_data
        far.sendall(b"a")
    await asyncio.sleep(0.01)
    for far in (far_one, far_two, far_three):
        far.sendall(b"b")
    for heard in (one, two, three):
        await heard.has(b"ab")
    await shut([(one, far_one), (two, far_two), (three, far_three)])


@pytest.fixture
def young() -> Iterator[None]:
    """The collector looks at what is made from here on alone: with all that a process of tests has it takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("young")
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


class Last:
    """A transport that has something to say when it goes."""

    def __init__(self, outlet: fast.Outlet) -> None:
        self.outlet = outlet

    def write(self, data: bytes) -> None:
        raise AssertionError("its outlet writes to the socket")

    def __del__(self) -> None:
        for data in (b"c", b"d", b"e"):
            self.outlet.write(data)


async def test_what_an_outlet_has_written_when_it_goes_is_written_too() -> None:
    """The last that holds it is the gathered write: its end writes while others that were gathered are still let go."""
    def answer(heard: Told, _: bytes) -> None:
        fd = descriptor_of(heard.transport)
        for data in (b"a", b"b"):
            one = fast.Outlet()
            one.open(Last(heard.outlet), fd)  # type: ignore[arg-type]
            one.write(data)

    [(heard, far)] = pairs = await told_at_once(1, answer)
    before = sys.getrefcount(heard.outlet)
    far.setblocking(True)
    far.settimeout(5)
    got = b""
    while len(got) < 8:
        got += await asyncio.to_thread(far.recv, 64)
    assert sorted(got) == sorted(b"abcdecde")
    heard.on_data = None
    del answer
    after = sys.getrefcount(heard.outlet)
    assert after == before
    await shut(pairs)


class Talker:
    """A transport that writes more elsewhere than is gathered, when it is written to."""

    def __init__(self, outlet: fast.Outlet) -> None:
        self.outlet: fast.Outlet | None = outlet

    def write(self, _: bytes) -> None:
        outlet, self.outlet = self.outlet, None
        if outlet is not None:
            for number in range(100):
                outlet.write(b"%02d" % number)


async def test_what_is_written_while_all_is_written_comes_whole_and_in_order() -> None:
    def answer(heard: Told, _: bytes) -> None:
        one = fast.Outlet()
        one.open(Talker(heard.outlet), -1)  # type: ignore[arg-type]
        one.write(b"x")

    [(_, far)] = pairs = await told_at_once(1, answer)
    far.setblocking(True)
    far.settimeout(5)
    got = b""
    while len(got) < 200:
        got += await asyncio.to_thread(far.recv, 256)
    assert got == b"".join(b"%02d" % number for number in range(100))
    await shut(pairs)
