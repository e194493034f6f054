"""Traffic from inside a pod: ``python load.py URL MODEL AT_ONCE PAUSE_S``; one JSON line for every request that ends.

Requests come in rounds over connections that are kept; odd ones stream, every tenth is a long stream. The pause between
rounds leaves the processors to engines that start: vLLM's worker on a CPU polls at full speed for a second after each step.
A prompt must get the same answer each time (greedy sampling), whoever serves it. Runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import time
from typing import Any

import aiohttp

QUESTIONS = ("What is xpyd?", "What does prefill do?", "What does decode do?", "What is the KV cache?",
             "What does the router do?", "What is a heartbeat?")
SHORT, LONG = 24, 400
SILENT_S = 120.0
"""A request of which nothing comes for so long has failed; a long stream may last as long as it goes on."""


def body(model: str, number: int) -> tuple[str, dict[str, Any]]:
    """The key under which answers must be equal, and the request."""
    question = QUESTIONS[number % len(QUESTIONS)]
    tokens = LONG if number % 10 == 9 else SHORT
    stream = number % 2 == 1
    request = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens,
               "ignore_eos": True, "temperature": 0, "stream": stream}
    return f"{question} {tokens}", request


async def answer(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> str:
    """The text of one answer. Raises ValueError where it is an error or has no proper end."""
    async with session.post(f"{url}/chat/completions", json=request) as response:
        if response.status != 200:
            raise ValueError(f"{response.status}: {(await response.text())[:300]}")
        if not request["stream"]:
            whole = await response.json()
            return str(whole["choices"][0]["message"]["content"])
        text, ended = "", False
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"error event: {event['error']}")
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
        if not ended:
            raise ValueError("the stream ended without [DONE]")
        return text


async def one(session: aiohttp.ClientSession, url: str, model: str, number: int, known: dict[str, str]) -> None:
    """One request; its line."""
    key, request = body(model, number)
    began, fault = time.time(), ""
    try:
        text = await answer(session, url, request)
        if known.setdefault(key, text) != text:
            fault = f"another answer than before: {text[:80]!r}, not {known[key][:80]!r}"
    except (ValueError, KeyError, aiohttp.ClientError, TimeoutError, OSError) as error:
        fault = f"{type(error).__name__}: {error}"
    line = {"at": round(began, 3), "s": round(time.time() - began, 3), "n": number,
            "long": request["max_tokens"] == LONG, "fault": fault}
    print(json.dumps(line), flush=True)


async def main(url: str, model: str, at_once: int, pause_s: float) -> None:
    """Rounds until SIGTERM; the last one is finished."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    known: dict[str, str] = {}
    numbers = itertools.count()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while not stop.is_set():
            await asyncio.gather(*(one(session, url, model, next(numbers), known) for _ in range(at_once)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
