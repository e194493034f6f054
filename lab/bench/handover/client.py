"""What a client of each contender sees: time to the first token, and per token after it."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import aiohttp

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId

MODEL = "tiny"
DEADLINE_S = 120.0
PREFILLED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
             "remote_host": None, "remote_port": None}
"""What vLLM's own connectors ask of a prefill engine."""


class Seen(NamedTuple):
    """Seconds."""

    ttft: float
    tpot: float


class Contender(Protocol):
    """Something that serves completions."""

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], tokens: int) -> Seen:
        """One request, streamed."""


class Url:
    """An endpoint; of several, each request goes to the next one."""

    def __init__(self, *urls: str) -> None:
        self._urls = urls
        self._turn = 0

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], tokens: int) -> Seen:
        """One request, streamed."""
        url = self._urls[self._turn % len(self._urls)]
        self._turn += 1
        return await stream(session, url, body(prompt, tokens), time.perf_counter())


class Legs:
    """Both legs straight to the engines: at once, as the router sends them; or, if ``late``, decode's after prefill's."""

    def __init__(self, prefill: str, decode: str, peer: legs.Peer, *, late: bool) -> None:
        self._prefill, self._decode = prefill, decode
        self._peer = peer
        self._late = late

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], tokens: int) -> Seen:
        """One request, streamed from decode."""
        began, transfer = time.perf_counter(), TransferId(uuid.uuid4().hex)
        decode = legs.Leg(legs.VERSION, Role.DECODE, transfer, Attempt(1), DEADLINE_S)
        prefill = legs.Leg(legs.VERSION, Role.PREFILL, transfer, Attempt(1), DEADLINE_S, self._peer)
        first = asyncio.create_task(self._filled(session, prompt, legs.encode(prefill)))
        if self._late:
            await first
        second = {**body(prompt, tokens), "kv_transfer_params": legs.encode(decode)}
        seen = await stream(session, self._decode, second, began)
        await first
        return seen

    async def _filled(self, session: aiohttp.ClientSession, prompt: Sequence[int], params: dict[str, Any]) -> None:
        request = {**body(prompt, 1), "stream": False, "kv_transfer_params": params}
        async with session.post(f"{self._prefill}/v1/completions", json=request) as answer:
            if answer.status != 200:
                raise RuntimeError(f"prefill: {answer.status} {(await answer.text())[:500]}")


class Nixl:
    """vLLM's NixlConnector, as its own proxy drives it: prefill's answer says where decode finds the KV."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], tokens: int) -> Seen:
        """One request, streamed from decode."""
        began = time.perf_counter()
        first = {**body(prompt, 1), "stream": False, "kv_transfer_params": PREFILLED}
        async with session.post(f"{self._prefill}/v1/completions", json=first) as answer:
            said = await answer.json()
            if answer.status != 200 or not said.get("kv_transfer_params"):
                raise RuntimeError(f"prefill: {answer.status} {str(said)[:500]}")
        second = {**body(prompt, tokens), "kv_transfer_params": said["kv_transfer_params"]}
        return await stream(session, self._decode, second, began)


def body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A greedy request of exactly so many tokens."""
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True}


async def stream(session: aiohttp.ClientSession, url: str, request: dict[str, Any], began: float) -> Seen:
    """Read a stream to its end. Raises RuntimeError where it is not whole."""
    first = last = 0.0
    async with session.post(f"{url}/v1/completions", json=request) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{url}: {answer.status} {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                if b'"error"' in line[:12]:
                    raise RuntimeError(f"{url}: {line[:500]!r}")
                last = time.perf_counter()
                first = first or last
    if not first:
        raise RuntimeError(f"{url}: a stream without a token")
    return Seen(first - began, (last - first) / max(1, request["max_tokens"] - 1))


def session() -> aiohttp.ClientSession:
    """As many connections as asked for."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=DEADLINE_S))


class Crowd:
    """So many requests that run at a contender all the while, each replaced when it ends."""

    def __init__(self, contender: Contender, session: aiohttp.ClientSession, count: int, draw: random.Random) -> None:
        self._contender, self._session, self._draw = contender, session, draw
        self._count = count
        self._tasks: list[asyncio.Task[None]] = []

    async def _one(self) -> None:
        while True:
            await self._contender.ask(self._session, prompt_of(64, self._draw), 400)

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(self._one()) for _ in range(self._count)]
        await asyncio.sleep(2.0)  # until all of them decode
        for task in self._tasks:
            if task.done():
                task.result()

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        await asyncio.sleep(0.5)


async def workload(contender: Contender, session: aiohttp.ClientSession, times: Sequence[float],
                   prompts: Sequence[list[int]], tokens: int) -> list[Seen]:
    """Requests at their times, whether or not earlier ones were answered."""
    async def one(at: float, prompt: list[int]) -> Seen:
        await asyncio.sleep(at)
        return await contender.ask(session, prompt, tokens)
    return list(await asyncio.gather(*(one(at, prompt) for at, prompt in zip(times, prompts, strict=True))))


def prompt_of(length: int, draw: random.Random) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [draw.randrange(5, 250) for _ in range(length)]


