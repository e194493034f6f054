"""An engine whose events nobody can read, and that dies then: its request ends at once, and keeps no word from others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from beats import beat
from router_fleet import RouterFleet, fleet, request_bytes

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.router.api.faults import FailureReason
from xpyd_sidecar.router.fleet.member import InstanceLost

LOOPS = ("asyncio", "uvloop")
NO_JSON = r'"\q"'
"""A text that is framed as one, and is none."""
Then = Callable[[], Awaitable[None]]


def event(number: int, text: str) -> bytes:
    prompt = ',"prompt_token_ids":[7,8]' if number == 0 else ""
    choice = (f'{{"index":0,"text":{text},"logprobs":null,"finish_reason":null,"stop_reason":null,'
              f'"token_ids":[{number}]{prompt}}}')
    data = f'data: {{"id":"c","object":"text_completion","created":5,"model":"tiny","choices":[{choice}]}}\n\n'.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def engines(then: Then) -> AsyncIterator[tuple[RouterFleet, Callable[[str, str], None]]]:
    """A prefill, and two decodes whose streams of prompts that begin with BAD have such a text; after it they do ``then``.
    What is yielded makes one known, with an incarnation.
    """
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.split("content-length: ")[1].split("\r")[0]) if "content-length" in head else 0
                asked: dict[str, Any] = json.loads(await reader.readexactly(size)) if size else {}
                if not asked.get("stream"):
                    out = b'{"id":"p","choices":[{"index":0,"text":"a","finish_reason":"length"}]}' if size else b""
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
                        len(out), out))
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                for number, text in enumerate(('"a"', '"b"', '"c"', NO_JSON if "BAD" in str(asked["prompt"]) else '"d"')):
                    writer.write(event(number, text))
                    await writer.drain()
                    await asyncio.sleep(0.02)
                await then()
                return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    servers = {name: await asyncio.start_server(serve, "127.0.0.1", 0) for name in ("p0", "d0", "d1")}
    async with fleet(0, 0) as f:
        def known(name: str, incarnation: str) -> None:
            role = Role.PREFILL if name == "p0" else Role.DECODE
            address = f"127.0.0.1:{servers[name].sockets[0].getsockname()[1]}"
            f.context.watch.on_message(beat(name, role, address, interval_s=60.0, sampling=Sampling(),
                                            incarnation=Incarnation(incarnation)))
        try:
            known("p0", "i")
            known("d0", "i")
            yield f, known
        finally:
            for server in servers.values():
                server.close()


@pytest.mark.parametrize("temperature", [0, 1])
async def test_the_request_ends_at_once(temperature: int) -> None:
    async def dies() -> None:
        """Its connection breaks."""

    async with engines(dies) as (f, known):
        known("d1", "i")
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "BAD", "max_tokens": 800, "stream": True,
                                                       "temperature": temperature}))
        async with asyncio.timeout(10):
            assert b"engine_failed" in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.transport.abort()
        await f.wait(lambda: not f.context.servings, "the request to end")


async def test_others_hear_that_their_engine_is_lost() -> None:
    async def waits() -> None:
        await asyncio.sleep(60)

    async with engines(waits) as (f, known):
        clients = [await f.connect() for _ in range(6)]
        for number, (_, writer) in enumerate(clients):
            prompt = "good and so on" if number else "BAD"
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 800,
                                                           "stream": True, "temperature": 1}))
        for number, (reader, _) in enumerate(clients):
            await reader.readuntil(b'"text":"d"' if number else NO_JSON.encode())
        known("d1", "i")
        known("d0", "j")
        lost = [leg for serving in f.context.servings for leg in serving.legs.attempts_on("d0", "i")]  # type: ignore[attr-defined]
        assert not lost
        for _, writer in clients:
            writer.transport.abort()
        await f.wait(lambda: not f.context.servings, "the requests to end")


async def test_a_bug_in_one_request_keeps_no_word_from_others(caplog: pytest.LogCaptureFixture) -> None:
    class One:
        """A request that counts what it is told, or fails at it."""

        def __init__(self, *, fails: bool) -> None:
            self.fails, self.told, self.given_up = fails, 0, 0

        def on_lost(self, *_: object) -> None:
            if self.fails:
                raise ZeroDivisionError
            self.told += 1

        def give_up(self) -> None:
            self.given_up += 1

    async with fleet(0, 0) as f:
        ones = [One(fails=number % 2 == 0) for number in range(4)]
        f.context.servings.update(ones)  # type: ignore[arg-type]
        f.context.servings.on_lost(InstanceLost(InstanceName("d0"), Incarnation("i"), FailureReason("gone")))
        assert [(one.told, one.given_up) for one in ones] == [(0, 1), (1, 0)] * 2
        words = "a request failed inside the router"  # on a busy machine the loop's lag is told too
        assert [record.exc_info is not None for record in caplog.records if record.message == words] == [True, True]
        f.context.servings.clear()
