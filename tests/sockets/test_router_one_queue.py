"""One queue for whatever engines answer, over real sockets: bounds, shares between keys, and who gives way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from beats import beat
from router_fleet import Answer, RouterFleet, fleet, read_answer, request_bytes
from scripted_engine import Play

from xpyd_sidecar.contract.ids import Role, State
from xpyd_sidecar.router.serving import hold

A, B, C = ({"Authorization": f"Bearer {key}"} for key in "abc")
EMBED = {"input": "x"}
FORM = (b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n")
SINGLE = [("/v1/embeddings", EMBED), ("/rerank", {"query": "x", "documents": ["y"]}), ("/tokenize", {"prompt": "x"}),
          ("/pooling", EMBED), ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 2}}),
          ("/v1/messages/count_tokens", {"messages": []}), ("/v1/chat/completions/batch", {"messages": []})]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text("a\nb\nc\n")
    return str(tmp_path / "keys")


class Held:
    """A router whose only decode instance has one request, of key A, and holds what it gets until it is told."""

    def __init__(self, f: RouterFleet) -> None:
        self.f = f
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[Answer]] = []

    async def send(self, path: str, body: Any, headers: dict[str, str] | None = None) -> asyncio.Task[Answer]:
        """One more; returns once it waits."""
        line = self.f.context.line
        before, number = len(line), line._queue._numbers
        task = asyncio.create_task(self.f.post(path, body, headers=headers))
        self.tasks.append(task)
        await self.f.wait(lambda: line._queue._numbers == number + 1 or task.done(), f"{path} to wait")
        assert not task.done(), task.result()
        assert len(line) in {before, before + 1}
        return task

    async def answers(self) -> list[int]:
        """Let all through; their statuses."""
        self.go.set()
        return [(await task).status for task in self.tasks]

    @property
    def paths(self) -> list[str]:
        """What the engine got, in order."""
        return [seen.path for seen in self.f.d[0].seen]


@contextlib.asynccontextmanager
async def held(prefills: int = 0, **settings: Any) -> AsyncIterator[Held]:
    async with fleet(prefills, 1, **({"max_per_instance": 1} | settings)) as f:
        one = Held(f)
        f.d[0].default = Play(hold=one.go)
        one.tasks.append(asyncio.create_task(f.post("/v1/embeddings", EMBED, headers=A)))
        await f.wait(lambda: len(f.d[0].seen) == 1, "the first")
        try:
            yield one
        finally:
            one.go.set()


@pytest.mark.parametrize(("path", "body"), SINGLE)
async def test_every_path_waits_where_there_is_no_room(path: str, body: dict[str, Any]) -> None:
    async with held() as one:
        await one.send(path, {"model": "tiny", **body})
        assert len(one.f.d[0].seen) == 1, "an instance with room for one has one"
        assert await one.answers() == [200, 200]
        assert one.paths == ["/v1/embeddings", path]
        await one.f.wait_quiet()
        assert not one.f.context.line._queue._in_flight


class Taker:
    """An engine that takes anything, and answers what it got with its length; the first one only when it is told."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.got: list[tuple[str, int]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
            self.got.append((head.split(" ")[1], len(await reader.readexactly(size))))
            await self.go.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
        finally:
            writer.transport.abort() if not self.go.is_set() else writer.close()


@contextlib.asynccontextmanager
async def taking() -> AsyncIterator[tuple[RouterFleet, Taker, asyncio.Task[Answer]]]:
    """A router whose instance takes one request at a time, and has one."""
    taker = Taker()
    server = await asyncio.start_server(taker, "127.0.0.1", 0, limit=1 << 24)
    async with fleet(0, 0, max_per_instance=1) as f:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        f.context.watch.on_message(beat("d0", Role.DECODE, address, interval_s=60.0))
        first = asyncio.create_task(f.post("/v1/embeddings", EMBED))
        await f.wait(lambda: len(taker.got) == 1, "the first")
        try:
            yield f, taker, first
        finally:
            taker.go.set()
            server.close()


async def test_who_asks_for_something_without_a_body_waits_too() -> None:
    async with taking() as (f, taker, first):
        task = asyncio.create_task(f.get("/version"))
        await f.wait(lambda: len(f.context.line) == 1, "it to wait")
        assert len(taker.got) == 1
        taker.go.set()
        assert [(await first).status, (await task).status] == [200, 200]
        assert taker.got[1] == ("/version", 0)


async def test_a_form_waits_with_most_of_it_unread_and_arrives_whole() -> None:
    body = b"--b\r\ncontent-disposition: form-data; name=file\r\n\r\n" + b"x" * (4 << 20) + b"\r\n--b--\r\n"
    async with taking() as (f, taker, first):
        reader, writer = await f.connect()
        writer.write(FORM + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await f.wait(lambda: len(f.context.line) == 1, "it to wait")
        await asyncio.sleep(0.2)
        [waits] = f.context.line.waits.values()
        assert f.router.server.bodies.held_bytes < 1 << 20, "what waits is not taken in"
        assert waits.cost == len(body) // 256
        assert len(taker.got) == 1
        taker.go.set()
        assert [(await first).status, (await read_answer(reader)).status] == [200, 200]
        assert taker.got[1] == ("/v1/audio/transcriptions", len(body))
        writer.transport.abort()


async def test_a_form_that_breaks_off_while_it_waits_reaches_no_engine() -> None:
    async with taking() as (f, taker, first):
        reader, writer = await f.connect()
        writer.write(FORM + b"Transfer-Encoding: chunked\r\n\r\n5\r\n--b\r\n\r\n")
        await f.wait(lambda: len(f.context.line) == 1, "it to wait")
        writer.write(b"no length\r\n")
        await asyncio.sleep(0.1)
        taker.go.set()
        assert (await first).status == 200
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert len(taker.got) == 1
        writer.transport.abort()


async def test_a_form_that_is_refused_while_it_comes_ends_its_connection() -> None:
    async with held(queue_size=0) as one:
        reader, writer = await one.f.connect()
        writer.write(FORM + b"Content-Length: 4000000\r\n\r\n--b\r\n")
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        writer.transport.abort()


async def test_one_key_that_floods_embeddings_does_not_keep_another_from_its_own(keys: str) -> None:
    async with held(queue_size=8, api_key_file=keys) as one:
        flood = [asyncio.create_task(one.f.post("/v1/embeddings", EMBED, headers=A)) for _ in range(8)]
        await one.f.wait(lambda: len(one.f.context.line) == 8, "all places to be taken")
        for _ in range(2):
            await one.send("/v1/embeddings", EMBED, B)
        await one.f.wait(lambda: sum(task.done() for task in flood) == 2, "two of them to give way")
        given_way = [task.result() for task in flood if task.done()]
        assert {answer.status for answer in given_way} == {429}
        assert {answer.json["error"]["code"] for answer in given_way} == {"rate_limit_exceeded"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in given_way)
        await one.send("/v1/completions", {"prompt": "x"}, C)
        assert len(one.f.context.line) == 8
        assert set(await one.answers()) == {200}
        assert sorted([(await task).status for task in flood]) == [200] * 5 + [429] * 3


async def test_shares_count_tokens_and_not_requests(keys: str) -> None:
    """One asks for long answers, the other for short ones: they get as many tokens, not as many requests."""
    async with held(api_key_file=keys, queue_size=256) as one:
        one.f.d[0].choose = lambda seen: Play(hold=one.go, chunks=seen.body.get("max_tokens", 1))
        for _ in range(6):
            await one.send("/v1/completions", {"prompt": "long", "max_tokens": 400, "stream": True}, A)
        for _ in range(12):
            await one.send("/v1/completions", {"prompt": "short", "max_tokens": 4, "stream": True}, B)
        assert set(await one.answers()) == {200}
        order = [seen.body.get("prompt") for seen in one.f.d[0].seen][1:]
        assert order[:14].count("long") <= 2, order


async def test_what_was_asked_for_and_not_generated_is_given_back(keys: str) -> None:
    async with held(api_key_file=keys) as one:
        line = one.f.context.line
        await one.send("/v1/completions", {"prompt": "x", "max_tokens": 100_000}, B)
        await one.send("/v1/completions", {"prompt": "x", "max_tokens": 10}, B)
        starts = []
        over = line.on_over

        def seen(key: str, tokens: int, used: int) -> None:
            if key == "b":
                starts.append((tokens, used))
            over(key, tokens, used)

        line.on_over = seen
        assert await one.answers() == [200, 200, 200]
        await one.f.wait_quiet()
        assert starts[0][0] > 100_000
        assert all(used < 100 for _, used in starts), starts


async def test_who_needs_no_prefill_is_not_held_up_by_those_that_wait_for_it() -> None:
    async with fleet(1, 1, max_per_instance=2) as f:
        go = asyncio.Event()
        f.p[0].default = Play(hold=go)
        first = [asyncio.create_task(f.post("/v1/completions", {"prompt": "x", "max_tokens": 2})) for _ in range(2)]
        await f.wait(lambda: len(f.p[0].seen) == 2, "prefill to be full")
        f.context.rooms.of = lambda member: 2 if member.name == "p0" else 8  # decode is not
        waits = asyncio.create_task(f.post("/v1/completions", {"prompt": "waits", "max_tokens": 2}))
        await f.wait(lambda: len(f.context.line) == 1, "it to wait for prefill")
        assert (await asyncio.wait_for(f.post("/tokenize", {"prompt": "x"}), 20.0)).status == 200
        assert len(f.context.line) == 1
        go.set()
        assert [(await task).status for task in (*first, waits)] == [200] * 3


async def test_who_has_heard_a_comment_keeps_its_place(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held streams of one key have all places, and hear of it that they wait; another key's request comes."""
    monkeypatch.setattr(hold, "COMMENT_S", 0.3)
    async with fleet(0, 1, hold_s=120.0, api_key_file=keys) as f:
        f.beat(f.d[0], interval_s=60.0, state=State.STARTING)
        f.context.hold._queue._size = 3
        clients = []
        for number in range(3):
            reader, writer = await f.connect()
            writer.write(request_bytes("/v1/completions", {"prompt": "x", "stream": True}, headers=A))
            clients.append((reader, writer))
            await f.wait(lambda wanted=number + 1: len(f.context.hold) == wanted, "it to be held")
        for reader, _ in clients:
            await asyncio.wait_for(reader.readuntil(hold.COMMENT), 30.0)
        answer = await f.post("/v1/completions", {"prompt": "x"}, headers=B)
        assert (answer.status, answer.json["error"]["message"]) == (503, "3 requests wait, which is the limit")
        f.beat(f.d[0], interval_s=60.0, state=State.READY)
        for reader, writer in clients:
            await asyncio.wait_for(reader.readuntil(b"[DONE]"), 30.0)
            writer.transport.abort()


async def test_a_newcomer_takes_a_place_of_those_that_are_held(keys: str) -> None:
    async with fleet(0, 1, hold_s=120.0, api_key_file=keys) as f:
        f.beat(f.d[0], interval_s=60.0, state=State.STARTING)
        f.context.hold._queue._size = 3
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(f.post("/v1/embeddings", EMBED, headers=A)))
            await f.wait(lambda wanted=number + 1: len(f.context.hold) == wanted, "it to be held")
        other = asyncio.create_task(f.post("/v1/embeddings", EMBED, headers=B))
        assert (await tasks[2]).status == 429
        await f.wait(lambda: len(f.context.hold) == 3, "the other to be held")
        f.beat(f.d[0], interval_s=60.0, state=State.READY)
        assert [(await task).status for task in (*tasks[:2], other)] == [200] * 3
        assert not f.context.hold.bytes


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/embeddings", EMBED), ("/inference/v1/generate", {"token_ids": [1]}),
])
@pytest.mark.parametrize(("several", "least"), [(False, -8), (True, 0)])
async def test_engines_get_no_priority_beyond_the_band_of_its_key(keys: str, path: str, body: dict[str, Any],
                                                                 several: bool, least: int) -> None:
    async with fleet(1, 1, **({"api_key_file": keys} if several else {})) as f:
        for asked, expected in ((-(10**20), least), (3, 3), (10**20, 8)):
            answer = await f.post(path, body | {"priority": asked}, headers=A | {"X-Vllm-Priority": str(asked)})
            assert answer.status == 200
            await f.wait_quiet()
            legs = [engine.seen[-1] for engine in (*f.p, *f.d) if engine.seen]
            assert {leg.body["priority"] for leg in legs} == {expected}
            assert {leg.headers["x-vllm-priority"] for leg in legs} == {str(expected)}
        answer = await f.post(path, body | {"priority": "high"}, headers=A)
        assert (answer.status, answer.json["error"]["param"]) == (400, "priority")
