"""Sends requests at their times, whether or not earlier ones have been answered, and notes when each chunk comes.

Open loop: a slow service gets no fewer requests. At most ``limit`` are open at a time; one whose turn comes beyond that
waits, and
``late_ms_p99`` of the result shows it. Each request has a deadline; nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from xpyd_operator.errors import XpydError
from xpyd_operator.simulation.trace import Arrival
from xpyd_operator.traffic.measures import RequestOutcome

LINE_MAX = 1 << 20
WORDS_MAX = 200
FIRST_TOKEN = 10
"""Token ids below are often special."""


class TrafficTarget(msgspec.Struct, frozen=True):
    """Where requests go."""

    url: str
    """With ``/v1``."""
    model: str
    api_key: str = ""
    vocabulary: int = 1000
    """Prompts are token ids below that."""
    timeout_s: float = 600.0
    limit: int = 2048


async def models(url: str, api_key: str) -> list[str]:
    """What the endpoint serves.

    Raises:
        XpydError: it cannot be asked; names the address.
    """
    try:
        async with (
            aiohttp.ClientSession(headers=_headers(api_key), timeout=aiohttp.ClientTimeout(total=20)) as session,
            session.get(f"{url}/models") as answer,
        ):
            if answer.status != 200:
                raise XpydError(f"{url}/models: status {answer.status}: {(await answer.text())[:WORDS_MAX]}")
            found = msgspec.json.decode(await answer.read())
            return [str(each["id"]) for each in found["data"]]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise XpydError(f"{url}: {error or type(error).__name__}") from None
    except (msgspec.DecodeError, KeyError, TypeError):
        raise XpydError(f"{url}/models: not an OpenAI answer") from None


async def drive(
    target: TrafficTarget, requests: Sequence[Arrival], draw: Callable[[], float], told: Callable[[RequestOutcome], None]
) -> list[RequestOutcome]:
    """Send all of them; the outcomes are in the order of the requests. ``told`` hears each as it ends."""
    turns = asyncio.Semaphore(target.limit)
    outcomes: list[RequestOutcome] = []

    def done(outcome: RequestOutcome) -> None:
        turns.release()
        told(outcome)

    tasks: list[asyncio.Task[None]] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, headers=_headers(target.api_key), timeout=timeout, read_bufsize=LINE_MAX
    ) as session:
        begun = time.perf_counter() + 0.1
        try:
            for request in requests:
                await asyncio.sleep(max(0.0, begun + request.at - time.perf_counter()))
                await turns.acquire()
                outcome = RequestOutcome(planned=begun + request.at)
                outcomes.append(outcome)
                body = body_of(target, request, draw)
                tasks.append(asyncio.create_task(_one(session, f"{target.url}/completions", body, outcome, done)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes


def body_of(target: TrafficTarget, request: Arrival, draw: Callable[[], float]) -> dict[str, Any]:
    """A completion of exactly these lengths, with a prompt that no cache holds."""
    span = max(1, target.vocabulary - FIRST_TOKEN)
    return {
        "model": target.model, "prompt": [FIRST_TOKEN + int(draw() * span) for _ in range(request.prompt)],
        "max_tokens": request.output, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _one(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    outcome: RequestOutcome,
    done: Callable[[RequestOutcome], None],
) -> None:
    outcome.started = time.perf_counter()
    outcome.prompt_tokens = len(body["prompt"])
    outcome.gaps = []
    try:
        async with session.post(url, data=msgspec.json.encode(body)) as answer:
            if answer.status != 200:
                text = (await answer.text())[:WORDS_MAX]
                outcome.error = f"status {answer.status}: {text}"
                return
            async for line in answer.content:
                if line.startswith(b"data:"):
                    _chunk(line[5:].strip(), outcome, time.perf_counter())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:WORDS_MAX]
    finally:
        if not outcome.error and not outcome.ok:
            outcome.error = "the stream ended without a token"
        done(outcome)


def _chunk(data: bytes, outcome: RequestOutcome, now: float) -> None:
    """One event of the stream."""
    if data == b"[DONE]":
        return
    event = msgspec.json.decode(data)
    if "error" in event:
        outcome.error = f"error event: {event['error']}"[:WORDS_MAX]
        return
    if event.get("usage"):
        outcome.output_tokens = int(event["usage"].get("completion_tokens", outcome.output_tokens))
    if event.get("choices"):
        if math.isnan(outcome.first):
            outcome.first = now
        else:
            outcome.gaps.append(now - outcome.ended)
        outcome.ended = now


def _headers(api_key: str) -> dict[str, str]:
    found = {"Content-Type": "application/json"}
    return found | {"Authorization": f"Bearer {api_key}"} if api_key else found
