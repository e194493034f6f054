"""Strangers who hold heads and connections of a router: it lives within its memory, tells so on its admin port, and serves.

Each attack is run under a limit of the address space, so that what is not bounded ends the router and not the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import strangers
from router_fleet import RouterFleet, fleet, read_answer, request_bytes
from scripted_engine import Play
from strangers import MIB, Router

from xpyd_sidecar.router.http.heads import UNREAD_S
from xpyd_sidecar.router.http.ledger import HeldKind
from xpyd_sidecar.router.http.server import ADMIN_CONNECTIONS

LOOPS = ("uvloop",)
pytestmark = [pytest.mark.unsanitized, pytest.mark.timeout(120)]
HEADS = 1500
GROWN_MIB = 48
"""Of memory for all of them: 16 KiB each, and what a connection costs."""
WORST_S = 1.0
"""Longest answer of the admin port, on a machine that may be busy."""
LIMIT = 1 << 30
FULL = 192 * MIB
"""A budget that can be filled: six bodies of the largest size."""


def limit(r: Router) -> None:
    """No more address space than it has now and a GiB."""
    text = Path(f"/proc/{r.process.pid}/status").read_text()
    size = int(text.partition("VmSize:")[2].split()[0]) << 10
    resource.prlimit(r.process.pid, resource.RLIMIT_AS, (size + LIMIT, size + LIMIT))


def abort(writer: asyncio.StreamWriter) -> None:
    """End a connection; until then the writer is kept, since it closes its own when nobody has it."""
    writer.transport.abort()


async def half_heads(r: Router) -> dict[str, int]:
    """Heads of 60 KiB in 2,000 headers, or in one, none of which ends; how many were refused, and how an honest client is
    answered beside them.
    """
    many = b"".join(b"x%05d: %b\r\n" % (number, b"v" * 20) for number in range(2000))[:60_000]
    begins = [b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + rest for rest in (many, b"x: " + b"v" * 60_000)]
    good = request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi"}, headers={"Authorization": "Bearer right"})
    refused = answered = 0
    async with contextlib.AsyncExitStack() as stack:
        for number in range(HEADS):
            reader, writer = await r.connect()
            stack.callback(abort, writer)
            writer.write(begins[number % 2])
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                refused += (await read_answer(reader)).status == 431
            if number % 100 == 0:
                answered += await r.ask(good) == 200
    return {"refused": refused, "answered": answered}


async def test_half_heads_without_a_key_cost_little_memory_and_nobodys_probes(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right\n")
    async with strangers.router(tmp_path / "a", api_key_file=str(tmp_path / "keys")) as attacked, \
            strangers.router(tmp_path / "b") as idle:
        limit(attacked)
        cost = await strangers.measured(attacked, idle, half_heads(attacked))
        assert cost.told["answered"] == HEADS // 100, cost
        assert cost.told["refused"] >= HEADS * 9 // 10, cost
        assert cost.grown_mib <= GROWN_MIB, cost
        assert cost.worst_s <= max(WORST_S, 20 * cost.idle_s), cost


async def slow_heads(r: Router) -> dict[str, int]:
    """As many heads of just below 16 KiB, which are not refused at once."""
    begin = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx: " + b"v" * 15_000
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(HEADS):
            _, writer = await r.connect()
            stack.callback(abort, writer)
            writer.write(begin)
            await writer.drain()
        await asyncio.sleep(1.0)
    return {"held": HEADS}


async def test_heads_that_come_slowly_cost_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right\n")
    async with strangers.router(tmp_path / "a", api_key_file=str(tmp_path / "keys")) as attacked, \
            strangers.router(tmp_path / "b") as idle:
        limit(attacked)
        cost = await strangers.measured(attacked, idle, slow_heads(attacked))
        assert cost.grown_mib <= HEADS * 32 * 1024 / MIB + 16, cost
        assert cost.worst_s <= max(WORST_S, 20 * cost.idle_s), cost


async def test_memory_of_bodies_goes_back_to_the_system(tmp_path: Path) -> None:
    async with strangers.router(tmp_path / "a") as r:
        limit(r)
        before = r.rss
        told = await strangers.held_bodies(r, strangers=10, honest=10)
        assert (told["answered"], told["rss"] - before > 200) == (10, True), told
        end = time.monotonic() + 20
        while r.rss > before + 32:
            assert time.monotonic() < end, f"{r.rss:.0f} MiB, {before:.0f} before"
            await asyncio.sleep(0.1)


async def tells_ids(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine whose streams begin with 100,000 ids of the prompt, where they are asked for, and go on for long."""
    ids = str([100_000 + number % 50_000 for number in range(100_000)]).replace(" ", "").encode()
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = re.search(rb"content-length: ([0-9]+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if b'"stream":true' not in body:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            given = ids if b'"return_token_ids":true' in body else b"null"
            for number in range(600):
                event = (b'data: {"id":"c","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,'
                         b'"text":"t","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[%d],"prompt_token_ids":%b}],'
                         b'"usage":null}\n\n' % (number, b"null" if number else given))
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                await asyncio.sleep(0.2)
    writer.close()


async def test_a_long_prompt_is_held_once_beside_its_ids(tmp_path: Path) -> None:
    """It was held three times, beside what went to each engine, so that few of them ended a router of 1 GiB."""
    count, prompt = 60, "lorem ipsum " * 34_000
    async with await asyncio.start_server(tells_ids, "127.0.0.1", 0, limit=1 << 24) as engine:
        address = f"127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        async with strangers.router(tmp_path / "a", decode=address) as r, contextlib.AsyncExitStack() as stack:
            limit(r)
            before, clients = r.rss, []
            body = {"model": "tiny", "prompt": prompt, "stream": True, "temperature": 0, "max_tokens": 1000}
            for _ in range(count):
                reader, writer = await r.connect()
                clients.append(reader)
                stack.callback(abort, writer)
                writer.write(request_bytes("/v1/completions", body))
                await writer.drain()
                await reader.readuntil(b'"text"')
            assert not any(one.at_eof() for one in clients)
            await asyncio.sleep(1.5)
            times = (r.rss - before) * MIB / count / len(prompt)
            ids = 7 * 100_000 / len(prompt)
            assert times <= 1 + ids + 0.6, f"{times:.1f} times the prompts, of which ids are {ids:.1f}"
            held = await held_by(r)
            assert held["bodies"] >= count * len(prompt)
            assert held["requests"] >= count * 7 * 100_000, "the budget knows of them"


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine whose streams go on as fast as they are taken."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = re.search(rb"content-length: ([0-9]+)", head)
            if b'"stream":true' not in await reader.readexactly(int(length[1]) if length else 0):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(1 << 20):
                event = (b'data: {"id":"c","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,'
                         b'"text":"%b","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[%d],'
                         b'"prompt_token_ids":%b}],"usage":null}\n\n' % (b"x" * 400, number, b"null" if number else b"[1]"))
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                if number % 16 == 0:
                    await writer.drain()
    writer.close()


async def held_by(r: Router) -> dict[str, float]:
    """Bytes that the router says it holds, by kind."""
    reader, writer = await r.connect(r.admin_port)
    writer.write(request_bytes("/metrics", method="GET"))
    text = (await read_answer(reader)).body.decode()
    writer.transport.abort()
    return {kind: float(size) for kind, size in re.findall(r'held_bytes\{kind="(\w+)"\} (\S+)', text)}


async def test_streams_that_nobody_reads_are_in_the_ledger_with_all_that_they_take(tmp_path: Path) -> None:
    """Each takes 2.2 MiB: what the kernel does not take, and what the client has, so that it may go on elsewhere."""
    count = 12
    async with await asyncio.start_server(floods, "127.0.0.1", 0) as engine:
        address = f"127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        async with strangers.router(tmp_path / "a", decode=address) as r, contextlib.AsyncExitStack() as stack:
            limit(r)
            before = r.rss
            for _ in range(count):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", r.port))
                sock.sendall(request_bytes("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}))
            held: dict[str, float] = {}
            async with asyncio.timeout(60):
                while sum(held.values()) < count * MIB or held["unread"] < count * (64 << 10):
                    await asyncio.sleep(0.5)
                    held = await held_by(r)
            await asyncio.sleep(1.5)
            held, grown = await held_by(r), (r.rss - before) * MIB
            assert grown <= 1.25 * sum(held.values()) + 4 * MIB, (grown, held)


async def everything(r: Router) -> dict[str, float]:
    """Heads without an end, bodies without an end, long prompts, unread streams and idle connections, all at once; what a
    stream that ran before has got meanwhile, and how much of what was asked is refused.
    """
    running, out = await r.connect()
    out.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}))
    await running.readuntil(b'"text"')
    statuses: Counter[int] = Counter()
    clients: list[object] = []
    prompt = {"model": "tiny", "prompt": "lorem ipsum " * 34_000, "stream": True, "temperature": 0, "max_tokens": 1000}
    async with contextlib.AsyncExitStack() as stack:
        async def open_with(raw: bytes, *, answered: bool) -> None:
            reader, writer = await r.connect()
            clients.append(reader)
            stack.callback(abort, writer)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                writer.write(raw)
                await writer.drain()
                if answered:
                    statuses[int((await reader.readuntil(b"\r\n"))[9:12])] += 1

        begin = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx: " + b"v" * 60_000
        long = request_bytes("/v1/completions", prompt)

        async def many(count: int, raw: bytes, *, answered: bool = False) -> None:
            for _ in range(count):
                await open_with(raw, answered=answered)

        bodies = asyncio.create_task(strangers.held_bodies(r, strangers=8, honest=0))
        await asyncio.gather(many(400, begin), many(100, long, answered=True), many(300, b""), bodies)
        while not statuses[503]:  # on a slow machine the others were ended before these came: they fill it by themselves
            assert statuses[200] * len(long) < 2 * FULL, statuses
            await open_with(long, answered=True)
        await asyncio.sleep(1.5)
    async with asyncio.timeout(30):
        await running.read(4 * MIB)  # all that has come meanwhile
        more = await running.read(MIB)
    told = {"running": len(more), "served": statuses[200], "refused": statuses[503]}
    out.transport.abort()
    assert statuses.keys() <= {200, 408, 503}, statuses  # 408: where this process is slow its bodies are, and go first
    return told


async def test_everything_at_once_stays_within_the_budget_and_what_runs_goes_on(tmp_path: Path) -> None:
    budget = FULL // MIB
    async with await asyncio.start_server(tells_ids, "127.0.0.1", 0, limit=1 << 24) as engine:
        address = f"127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        async with strangers.router(tmp_path / "a", decode=address, body_budget_bytes=budget * MIB) as attacked, \
                strangers.router(tmp_path / "b") as idle:
            limit(attacked)
            cost = await strangers.measured(attacked, idle, everything(attacked))
            assert cost.grown_mib <= budget + 32, cost
            assert min(cost.told.values()) > 0, cost
            assert cost.worst_s <= max(2 * WORST_S, 20 * cost.idle_s), cost


async def probed(f: RouterFleet, paths: tuple[str, ...] = ("/health", "/ready", "/metrics")) -> float:
    """The longest answer of the admin port, on a connection of its own each."""
    worst = 0.0
    for path in paths:
        began = time.monotonic()
        assert (await f.ask(path)).status == 200
        worst = max(worst, time.monotonic() - began)
    return worst


async def test_a_stranger_who_holds_all_places_keeps_nobody_out_and_no_probe_fails() -> None:
    """It renews what is taken from it; a stream that runs goes on."""
    async with fleet(1, 1) as f:
        await f.wait(lambda: not f.router.probes.not_ready(), "a settled router")
        f.router.server.places.most = places = 40
        f.d[0].default = Play(delay=0.05)
        streaming = asyncio.create_task(f.complete(stream=True))
        await f.wait(lambda: bool(f.context.servings), "a stream that runs")
        held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        refused = 0
        for _ in range(3):
            held = [one for one in held if not one[0].at_eof()]
            while len(held) < places + 10:
                held.append(await f.connect())
            assert await probed(f) <= WORST_S
            await asyncio.sleep(1.05)
            answer = await f.complete()
            refused += answer.status != 200
            assert answer.status in (200, 503), answer
            assert await probed(f) <= WORST_S
        assert refused == 0, "a second later it has room again"
        whole = await streaming
        assert whole.events[-1] == "[DONE]"
        for _, writer in held:
            writer.transport.abort()


async def test_strangers_on_the_admin_port_give_way_to_probes() -> None:
    async with fleet(1, 1) as f:
        await f.wait(lambda: not f.router.probes.not_ready(), "a settled router")
        held = [await asyncio.open_connection("127.0.0.1", f.router.admin_port) for _ in range(100)]
        await asyncio.sleep(1.05)
        assert await probed(f) <= WORST_S
        assert (await f.complete()).status == 200
        for _, writer in held:
            writer.transport.abort()


async def test_heads_beyond_the_budget_go_the_slowest_first_and_requests_are_served(tmp_path: Path) -> None:
    async with fleet(1, 1, body_budget_bytes=2 * MIB, max_body_bytes=MIB // 4) as f:
        begin = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx: " + b"v" * 30_000
        held = []
        for _ in range(60):
            reader, writer = await f.connect()
            writer.write(begin)
            held.append((reader, writer))
        ledger = f.router.server.ledger
        await f.wait(lambda: ledger.cuts >= 20, "heads that are cut")
        assert ledger.other_bytes <= ledger.budget
        answers = []
        for reader, writer in held:
            if ledger.cuts and len(answers) < 20:
                answers.append(await read_answer(reader))
            writer.transport.abort()
        assert {one.status for one in answers} == {408}
        assert all("came more slowly than others" in one.json["error"]["message"] for one in answers)
        assert (await f.complete()).status == 200
        await f.wait(lambda: not ledger.other_bytes, "everything is given back")


async def test_long_prompts_beyond_the_budget_are_refused_with_a_reason_and_running_ones_end_whole(tmp_path: Path) -> None:
    """Their ids are kept beside their bodies, so that they may go on elsewhere."""
    (tmp_path / "keys").write_text("one\ntwo\nthree\n")
    prompt = "long " * 20_000
    async with fleet(1, 1, body_budget_bytes=4 * MIB, max_body_bytes=MIB // 2, api_key_file=str(tmp_path / "keys")) as f:
        go = asyncio.Event()
        f.d[0].default = Play(hold=go)

        async def asked(key: str, *, stream: bool = True) -> tuple[int, str]:
            body = {"model": "tiny", "prompt": prompt, "stream": stream, "max_tokens": 8}
            answer = await f.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
            if answer.status != 200:
                return answer.status, answer.json["error"]["message"]
            return answer.status, "whole" if not stream or answer.events[-1] == "[DONE]" else "cut"

        running = [asyncio.create_task(asked("one")) for _ in range(3)]
        await f.wait(lambda: len(f.context.servings) == 3, "three that run")
        status, words = await asked("one")
        assert (status, "a key's share is 1835008" in words) == (429, True)
        running += [asyncio.create_task(asked("two")) for _ in range(3)]
        await f.wait(lambda: len(f.context.servings) == 6, "six that run")
        assert (await asked("two"))[0] == 429
        running.append(asyncio.create_task(asked("three")))
        await f.wait(lambda: len(f.context.servings) == 7, "seven that run")
        assert [(await asked(key))[0] for key in ("one", "two", "three")] == [503] * 3
        go.set()
        assert await asyncio.gather(*running) == [(200, "whole")] * 7
        await f.wait_quiet()
        assert f.router.server.ledger.other_bytes == f.router.server.bodies.held_bytes == 0
        assert await asked("one") == (200, "whole")


async def test_answers_that_nobody_reads_go_before_the_budget_is_broken() -> None:
    async with fleet(1, 1, body_budget_bytes=MIB, max_body_bytes=MIB // 8) as f:
        ledger = f.router.server.ledger
        ledger.budget = 300_000
        writers = []
        for _ in range(12):
            _, writer = await f.connect_narrow(4096)
            writer.write(request_bytes("/metrics", method="GET") * 400)
            writers.append(writer)
        await f.wait(lambda: ledger.cuts > 0, "answers that are cut")
        assert ledger.other_bytes <= ledger.budget
        answer, end = await f.complete(), time.monotonic() + UNREAD_S / 2
        while answer.status == 503 and time.monotonic() < end:  # an answer may be unread for two seconds, but not for ever
            await asyncio.sleep(0.5)
            answer = await f.complete()
        assert answer.status == 200
        assert ledger.other_bytes > 0, "they were not all ended for it"
        for writer in writers:
            writer.transport.abort()
        await f.wait(lambda: not ledger.other_bytes, "everything is given back")


def head_of(size: int, key: str = "") -> bytes:
    """The head of a completion whose body has so many bytes."""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    return (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{shown}Content-Type: application/json\r\n"
            f"Content-Length: {size}\r\n\r\n").encode()


async def send_all_but_a_byte(
        f: RouterFleet, size: int, key: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A body that never becomes whole, once the router has what was sent of it, or has answered."""
    reader, writer = await f.connect()
    bodies = f.router.server.bodies
    before = bodies.held_bytes
    writer.write(head_of(size, key) + bytes(size - 1))
    await f.wait(lambda: bool(reader._buffer) or bodies.held_bytes - before >= size - 1, "a body")  # type: ignore[attr-defined]
    return reader, writer


async def test_bodies_that_never_end_leave_room_for_requests_and_go_for_large_ones() -> None:
    """Whoever sends them may wait for minutes."""
    async with fleet(1, 1, body_budget_bytes=6 * MIB, max_body_bytes=MIB) as f:
        ledger = f.router.server.ledger
        held = [await send_all_but_a_byte(f, min(MIB, max(ledger.free_bytes, 70_000))) for _ in range(10)]
        assert f.router.server.bodies.rest.held > 3.9 * MIB
        assert [(await f.complete()).status for _ in range(5)] == [200] * 5
        await asyncio.sleep(2.1)  # they come with less than a megabyte a second now
        assert (await f.complete(prompt="x" * 600_000)).status == 200
        assert ledger.cuts > 0
        for _, writer in held:
            writer.transport.abort()
        await f.wait_quiet()
        await f.wait(lambda: not f.router.server.bodies.held_bytes, "everything is given back")
        assert ledger.other_bytes == 0


async def test_bodies_of_a_key_count_in_its_share_from_their_first_byte_on_also_where_they_wait(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    async with fleet(1, 1, body_budget_bytes=6 * MIB, max_body_bytes=MIB, api_key_file=str(tmp_path / "keys")) as f:
        shares, go, mine = f.router.server.bodies.shares, asyncio.Event(), []
        f.d[0].default = Play(hold=go)
        small = request_bytes("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True},
                              headers={"Authorization": "Bearer one"})
        for number in range(2):  # whole bodies behind streams that run
            reader, writer = await f.connect()
            writer.write(small + head_of(MIB, "one") + bytes(MIB))
            await f.wait(lambda: shares.counted_bytes("one") >= (number + 1) * MIB, "a body that waits")  # noqa: B023
            mine.append((reader, writer))
        mine.append(await send_all_but_a_byte(f, MIB, "one"))
        answer = await read_answer(mine[-1][0])
        assert (answer.status, f"a key's share is {shares.share}" in answer.json["error"]["message"]) == (429, True)
        assert shares.counted_bytes("one") <= shares.share
        other = asyncio.create_task(f.post("/v1/completions", {"model": "tiny", "prompt": "x" * 500_000},
                                           headers={"Authorization": "Bearer two"}))
        await f.wait(lambda: len(f.context.servings) == 3, "another key's request, which runs")
        go.set()
        assert (await other).status == 200
        for _, writer in mine:
            writer.transport.abort()
        await f.wait_quiet()
        await f.wait(lambda: not f.router.server.bodies.held_bytes, "everything is given back")
        assert shares.counted_bytes("one") == shares.counted_bytes("two") == 0


@pytest.mark.parametrize("sent", [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 33554432\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    b"\r\n", b"GET /health HTTP/1.1\r\nHost: loc"], ids=["a body", "a small body", "empty lines", "half a head"])
async def test_strangers_on_the_admin_port_give_way_to_probes_whatever_they_sent(sent: bytes) -> None:
    async with fleet(1, 1) as f:
        await f.wait(lambda: not f.router.probes.not_ready(), "a settled router")
        held = []
        for _ in range(ADMIN_CONNECTIONS + 6):
            reader, writer = await asyncio.open_connection("127.0.0.1", f.router.admin_port)
            writer.write(request_bytes("/health", method="GET"))
            assert (await read_answer(reader)).status == 200
            writer.write(sent)
            held.append(writer)
        await asyncio.sleep(0.1)
        assert await probed(f) <= WORST_S
        for writer in held:
            writer.transport.abort()


async def test_a_request_that_lingers_leaves_what_is_reserved_for_the_next_one_alone() -> None:
    async with fleet(1, 1) as f:
        f.context.limits = msgspec.structs.replace(f.context.limits, linger_s=60.0)
        ledger, prefill, decode = f.router.server.ledger, asyncio.Event(), asyncio.Event()
        f.p[0].plays.append(Play(hold=prefill))
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}))
        assert (await read_answer(reader)).status == 200
        f.d[0].plays.append(Play(hold=decode))
        writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "x" * 50_000, "stream": True}))
        await f.wait(lambda: len(f.context.servings) == 2, "the next request beside one that waits for prefill")
        reserved = ledger.held_bytes(HeldKind.REQUESTS)
        assert reserved > 100_000
        f.context.servings.sweep(f.context.loop.time(), 0.0)
        assert ledger.held_bytes(HeldKind.REQUESTS) == reserved
        prefill.set()
        decode.set()
        assert (await read_answer(reader)).status == 200
        writer.transport.abort()
