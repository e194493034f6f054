"""Bounds of the router bind, seen from outside: by what engines and clients get on their sockets, and by nothing inside.

The numbers are those that the router promises, not its constants: a bound that moves must fail here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest
from beats import beat
from raw_engines import STREAM, Engine, Request, standing, streamed, whole
from router_fleet import RouterFleet, fleet, read_answer, request_bytes
from scripted_engine import Play
from socket_engines import MESSAGE

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.balance.limits import RetryBudget

LOOPS = ("uvloop",)
P, D = Role.PREFILL, Role.DECODE
IDLE = 512
"""Idle connections kept per engine."""
EARLY = 64 << 10
"""Bytes of a dialect's stream that wait for its first output."""
ANSWER = 256 << 20
"""Bytes of an answer that is not streamed."""
REFUSALS, TRIES = 8, 3
"""Refused connections of a request that count as no try of a decode instance, and its tries."""
FLOOR = 30
"""Retries of all requests within so many seconds that are allowed without a share of the requests."""
TURNS = 100
"""Requests answered one after the other, while which everything that follows at once has followed."""
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
OUTPUT = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'
FIN_WAIT2 = 5
"""linux/tcp_states.h: the other side has got the end of the connection."""


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough of them for some hundred connections with both ends in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def turns(f: RouterFleet) -> None:
    """Let the router do what it does at once, without any time."""
    for _ in range(TURNS):
        assert (await f.get("/health")).status == 200


async def retries(f: RouterFleet) -> float:
    """What the router says of legs that it sent beyond the first pair."""
    lines = (await f.get("/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("xpyd_router_retries"))


# ---- connections that lie idle


async def test_idle_connections_to_an_engine_are_bounded(descriptors: None) -> None:
    many = IDLE + 60
    async with fleet(0, 1) as f:
        engine, held = f.d[0], asyncio.Event()
        engine.default = Play(hold=held)
        asking = [asyncio.create_task(f.complete()) for _ in range(many)]
        await f.wait(lambda: engine.open == many, "all requests at the engine")
        assert engine.connected == many
        held.set()
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * many
        await f.wait(lambda: engine.connected <= IDLE, "no more idle connections than promised")
        await turns(f)
        assert engine.connected == IDLE, "those are kept"
        assert (await f.complete()).status == 200
        assert engine.connections == many, "and used"


@contextlib.contextmanager
def at_once(writer: asyncio.StreamWriter) -> Iterator[socket.socket]:
    """A connection's own socket: what is done with it is done now, and not when the loop comes to it."""
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
        yield sock


def end(writer: asyncio.StreamWriter, timeout_s: float = 5.0) -> None:
    """End this side of a connection; the other side's kernel has it then."""
    with at_once(writer) as sock:
        sock.shutdown(socket.SHUT_WR)
        due = time.monotonic() + timeout_s
        while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != FIN_WAIT2:
            assert time.monotonic() < due, "the end of a connection did not arrive"


async def test_an_idle_connection_that_its_engine_has_ended_gets_no_request() -> None:
    # Where a loop has read the end of the connection, and reads the request before it has told that the connection is gone.
    async with standing((D, whole)) as (f, [engine]):
        for round_ in range(1, 6):
            assert (await f.complete()).status == 200
            kept = engine.asked[-1]
            reader, writer = await f.connect()
            writer.write(request_bytes("/health", method="GET"))
            assert (await read_answer(reader)).status == 200
            for _ in range(10):
                await asyncio.sleep(0)  # no news are left of either connection
            data = request_bytes("/v1/completions", {"model": "tiny", "prompt": f"round {round_}"})
            end(kept.writer)
            await asyncio.sleep(0)  # the loop looks: it has the end of the connection, and not the request
            with at_once(writer) as sock:
                assert sock.send(data) == len(data)
            assert (await read_answer(reader)).status == 200
            writer.transport.abort()
            came = [one for one in engine.asked if one.body.get("prompt") == f"round {round_}"]
            assert [(one.connection, one.nth) for one in came] == [(kept.connection + 1, 1)]
        assert await retries(f) == 0


async def test_an_engine_that_ends_every_connection_after_its_answer_is_asked_once_each_time() -> None:
    async def once(request: Request) -> None:
        await whole(request)
        request.shut()
        await request.gone.wait()

    async with standing((D, once)) as (f, [engine]):
        for _ in range(20):
            assert (await f.complete()).status == 200
            await f.wait(engine.asked[-1].gone.is_set, "the router has closed its side")
        assert [(one.connection, one.nth) for one in engine.asked] == [(number, 1) for number in range(1, 21)]
        assert await retries(f) == 0


async def kept_open(f: RouterFleet, engine: Engine, many: int) -> None:
    """So many idle connections to an engine."""
    held = asyncio.Event()
    serve = engine.serve

    async def wait(request: Request) -> None:
        await held.wait()
        await whole(request)

    engine.serve = wait
    asking = [asyncio.create_task(f.complete()) for _ in range(many)]
    await f.wait(lambda: len(engine.asked) == many, "all requests at the engine")
    held.set()
    assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * many
    engine.serve = serve
    engine.asked.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_sent_once_more_at_most_when_its_connections_break_without_an_answer(stream: bool) -> None:
    async def break_off(request: Request) -> None:
        if len(engine.asked) >= 20:  # that is enough to tell
            await whole(request)
        else:
            request.hang_up()

    async with standing((D, break_off)) as (f, [engine]):
        await kept_open(f, engine, 4)
        assert (await f.complete(stream=stream)).status == 502
        assert [one.nth for one in engine.asked] == [2, 1], "an idle connection, then a fresh one"


async def test_a_request_whose_idle_connection_breaks_is_not_tried_on_the_other_idle_ones() -> None:
    async def break_off_later(request: Request) -> None:
        if request.nth > 1:
            request.hang_up()
        else:
            await whole(request)

    async with standing((D, break_off_later)) as (f, [engine]):
        await kept_open(f, engine, 4)
        assert (await f.complete()).status == 200
        assert [one.nth for one in engine.asked] == [2, 1]
        assert await retries(f) == 0


# ---- tries


async def test_retries_of_engines_that_live_and_fail_are_bounded_over_all_requests(
        monkeypatch: pytest.MonkeyPatch) -> None:
    many = 2 * FLOOR
    # However long all of this takes, it is one window.
    monkeypatch.setattr(RetryBudget, "_turn", lambda self, _: self._seconds[-1])
    async with fleet(0, 2, retry_budget=0.0) as f:
        for engine in f.d:
            engine.default = Play(status=500)
        assert [one.status for one in await asyncio.gather(*(f.complete() for _ in range(many)))] == [500] * many
        assert sum(len(engine.seen) for engine in f.d) - many == FLOOR == await retries(f)


async def test_a_request_is_not_tried_at_every_instance_that_refuses_connections() -> None:
    async with fleet(0, 0) as f, contextlib.AsyncExitStack() as stack:
        for number in range(3 * REFUSALS):
            nobody = stack.enter_context(socket.socket())
            nobody.bind(("127.0.0.1", 0))  # a port that nobody listens at, and that nobody else gets
            address = f"127.0.0.1:{nobody.getsockname()[1]}"
            f.context.watch.on_message(beat(f"d{number}", D, address, interval_s=60.0))
        assert (await f.complete()).status == 503
        assert await retries(f) == REFUSALS + TRIES - 1


# ---- what is held of answers


async def test_a_prefill_that_announces_more_than_an_answer_may_have_is_given_up_at_once() -> None:
    # At once: on every way that a request takes, also on the fast one, which has no clock.
    announced = asyncio.Event()

    async def announce(request: Request) -> None:
        if not announcing:
            await whole(request)
            return
        await request.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n{" % (ANSWER + 1))
        announced.set()
        await request.gone.wait()

    async def wait(request: Request) -> None:
        if announcing and request.attempt is not None:
            await request.gone.wait()
        else:
            await streamed(request)

    announcing = False
    async with standing((P, announce), (D, wait)) as (f, [prefill, decode]):
        for _ in range(4):  # from the third of one form on a request may take the fast way
            assert (await f.complete(stream=True)).text == "t0 "
        assert (prefill.connections, decode.connections) == (1, 1), "idle connections are there"
        announcing = True
        asking = asyncio.create_task(f.complete(stream=True))
        async with asyncio.timeout(30):
            await announced.wait()
        await turns(f)
        assert prefill.asked[-1].gone.is_set(), "the router still reads an answer that it can never have"
        assert (await asking).text == "t0 "
        assert {one.attempt for one in decode.asked[-2:]} == {1, None}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def pings(size: int) -> list[bytes]:
    """At least ``size`` bytes of them as chunks of some KiB."""
    each = PING * 100
    return [chunk(each)] * -(-size // len(each))


async def test_what_waits_for_the_first_output_of_a_dialects_stream_is_bounded() -> None:
    sent = pings(2 * EARLY)
    go = asyncio.Event()

    async def at_work(request: Request) -> None:
        await request.say(STREAM + b"".join(sent))
        await go.wait()
        await request.say(chunk(OUTPUT) + b"0\r\n\r\n")

    async with standing((D, at_work)) as (f, _):
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/messages", {**MESSAGE, "stream": True}))
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(sum(map(len, sent))) == b"".join(sent)
            go.set()
            assert await reader.readuntil(b"0\r\n\r\n") == chunk(OUTPUT) + b"0\r\n\r\n"
        writer.transport.abort()


async def test_what_comes_before_the_first_output_is_held_so_that_nothing_is_lost_with_an_engine() -> None:
    async def first_dies(request: Request) -> None:
        if len(one.asked) + len(other.asked) > 1:
            await request.say(STREAM + chunk(OUTPUT) + b"0\r\n\r\n")
            return
        await request.say(STREAM + b"".join(pings(EARLY // 2)))
        await f.wait(lambda: turned, "the router has read that")
        request.hang_up()

    turned = False
    async with standing((D, first_dies), (D, first_dies)) as (f, [one, other]):
        asking = asyncio.create_task(f.post("/v1/messages", {**MESSAGE, "stream": True}))
        await f.wait(lambda: bool(one.asked or other.asked), "a request")
        await turns(f)
        turned = True
        answer = await asking
        assert (answer.status, answer.body, answer.complete) == (200, OUTPUT, True)
        assert (len(one.asked), len(other.asked)) == (1, 1)

