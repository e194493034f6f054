"""Clients of engines and routers, over HTTP of this host, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from lab.gpu_engines.figures import Seen

MODEL: Final = "m"
WORDS: Final = (
    "amber", "barge", "cobalt", "delta", "ember", "fjord", "granite", "harbor", "indigo", "jasper", "kelp", "lagoon",
    "marble", "nickel", "onyx", "pepper", "quartz", "russet", "sable", "topaz", "umber", "violet", "willow", "zinc")
EDGES: Final = (1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 199, 201, 255, 256, 257, 400, 511, 512, 513, 700, 900)
"""Lengths of prompts, in bytes, of which each is a token: around blocks, windows and frames."""
ANSWERS: Final = (1, 2, 8, 33, 64)
PATIENCE: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3)
LIMIT_S: Final = 40.0
MOST_FAILED: Final = 6
"""Requests of a kind, after which the rest is not asked."""
PREFILLED: Final = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                    "remote_block_ids": None, "remote_host": None, "remote_port": None}
"""What vLLM's own connectors ask of a prefill engine."""
T = TypeVar("T")
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Failed(Exception):
    """A request was not answered as it should be; the text says how."""


def get(url: str, limit_s: float = 10.0) -> str:
    """A page's text. Raises OSError."""
    with _OPENER.open(url, timeout=limit_s) as answer:
        text: str = answer.read().decode(errors="replace")
        return text


def serves(url: str) -> bool:
    """Whether an engine or a router says that it is well."""
    try:
        get(f"{url}/health", 3.0)
    except (OSError, http.client.HTTPException):
        return False
    return True


def _post(url: str, body: dict[str, Any], limit_s: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=limit_s)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        refused = "" if answer.status == 200 else f"{answer.status} {answer.read(400).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise Failed(f"{type(error).__name__}: {error}") from error
    if refused:
        connection.close()
        raise Failed(refused)
    return connection, answer


def body(prompt: str | Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request for so many tokens."""
    return {"model": MODEL, "prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, **more}


def ask(url: str, request: dict[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The whole answer. Raises Failed."""
    connection, answer = _post(url, request, limit_s)
    try:
        found: dict[str, Any] = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    return found


def stream(url: str, request: dict[str, Any], limit_s: float = LIMIT_S, began: float | None = None) -> Seen:
    """When each token of a stream came, from ``began`` (now) on. Raises Failed, also where tokens are missing."""
    began = time.perf_counter() if began is None else began
    connection, answer = _post(url, {**request, "stream": True}, limit_s)
    times = []
    try:
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            at = time.perf_counter() - began
            event = json.loads(line[6:])
            if "error" in event:
                raise Failed(str(event["error"])[:400])
            if event.get("choices"):
                times.append(at)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed(f"after {len(times)} tokens {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not times:
        raise Failed("a stream without tokens")
    return Seen(tuple(times))


def two_legs(prefill: str, decode: str, prompt: Sequence[int], tokens: int) -> Seen:
    """The same through two engines with one of vLLM's own connectors, as its proxy does it: one after the other."""
    began = time.perf_counter()
    place = ask(prefill, body(prompt, 1, kv_transfer_params=PREFILLED)).get("kv_transfer_params")
    if not place:
        raise Failed("prefill does not say where its KV is")
    return stream(decode, body(prompt, tokens, kv_transfer_params=place), began=began)


def text_prompt(number: int, longest: int = 900) -> str:
    """A prompt of words, the same for the same number; its length is at an edge of something."""
    draw = random.Random(40_000 + number)
    size, text = min(longest, draw.choice(EDGES)), ""
    while len(text) < size:
        text += draw.choice(WORDS) + " "
    return text[:size]


def token_prompt(length: int, seed: int) -> list[int]:
    """A prompt of random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(10, 258) for _ in range(length)]


def texts(url: str, count: int, beside: int, longest: int) -> list[str]:
    """Answers to the numbered prompts, so many at a time; of one that failed what it said, after ``failed:``."""
    failed: list[int] = []

    def one(number: int) -> str:
        tokens = random.Random(50_000 + number).choice(ANSWERS)
        if len(failed) > MOST_FAILED:
            return "failed: not asked, since others failed"
        try:
            return str(ask(url, body(text_prompt(number, longest), tokens))["choices"][0]["text"])
        except Failed as error:
            failed.append(number)
            return f"failed: {error}"

    return at_once(one, range(count), beside)


def at_once(work: Callable[[int], T], numbers: Iterable[int], beside: int) -> list[T]:
    """Results in order. When one raises or the time is up, those that have not begun are left."""
    pool = ThreadPoolExecutor(beside)
    try:
        return list(pool.map(work, numbers))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Leavers(NamedTuple):
    """How clients left: after a byte of the answer, before it, or they never got in."""

    after: int
    before: int
    out: int


def storm(url: str, count: int, beside: int, prompt: Callable[[int], str | list[int]], tokens: int = 200) -> Leavers:
    """Clients that leave at random moments."""
    host, _, port = url.removeprefix("http://").partition(":")

    def one(number: int) -> str:
        draw = random.Random(60_000 + number)
        raw = json.dumps(body(prompt(number), tokens, stream=True)).encode()
        head = "\r\n".join(("POST /v1/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json",
                            f"Content-Length: {len(raw)}", "", ""))
        try:
            with socket.create_connection((host, int(port)), 5.0) as client:
                client.sendall(head.encode() + raw)
                client.settimeout(draw.choice(PATIENCE))
                return "after" if _read_some(client, draw) else "before"
        except OSError:
            return "out"

    found = at_once(one, range(count), beside)
    return Leavers(*(found.count(name) for name in Leavers._fields))


def _read_some(client: socket.socket, draw: random.Random) -> int:
    """Bytes read until nothing came for as long as it waits, the answer ended, or it has had enough."""
    got = 0
    try:
        while data := client.recv(65536):
            got += len(data)
            if draw.random() < 0.2:
                break
    except TimeoutError:
        return got
    return got
