"""Pages of other origins: answers as FastAPI's CORSMiddleware gives them, which vLLM has for --allowed-origins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from router_fleet import Answer, RouterFleet, fleet, read_answer, request_bytes
from scripted_engine import Play
from starlette.middleware.cors import CORSMiddleware

LOOPS = ("uvloop",)
PAGE, OTHER = "http://app.test", "http://evil.test"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}


async def preflight(f: RouterFleet, headers: Mapping[str, str], path: str = "/v1/chat/completions") -> Answer:
    """The answer to OPTIONS, and to a request behind it on the same connection, which must be whole."""
    reader, writer = await f.connect()
    try:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"OPTIONS {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()
                     + request_bytes("/health", method="GET"))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        status = int(head[0].split(" ")[1])
        named = [tuple(line.split(": ", 1)) for line in head[1:] if line]
        found = dict(named)  # type: ignore[arg-type]
        assert len(found) == len(named), "a header twice"
        body = await reader.readexactly(int(found.get("content-length", "0")))
        assert (await read_answer(reader)).body == b"ok\n"
        return Answer(status, found, body, True)
    finally:
        writer.transport.abort()


def cors_of(headers: Mapping[str, str]) -> dict[str, str]:
    """What a browser looks at."""
    return {name.lower(): value for name, value in headers.items() if name.lower().startswith("access-control-")}


async def fastapis(origins: list[str], method: str, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Status and headers that the middleware of the installed FastAPI gives, with vLLM's other settings."""
    told: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            told.update(message)

    middleware = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await middleware({"type": "http", "method": method, "path": "/", "headers": raw}, None, send)  # type: ignore[arg-type]
    return told["status"], {name.decode(): value.decode() for name, value in told["headers"]}


async def test_without_the_setting_nothing_is_said_to_other_origins() -> None:
    async with fleet(1, 1) as f:
        answer = await preflight(f, ASKS)
        assert (answer.status, cors_of(answer.headers), "vary" in answer.headers) == (405, {}, False)
        said = await f.post("/v1/completions", {"prompt": "x"}, headers={"Origin": PAGE})
        assert (said.status, cors_of(said.headers), "vary" in said.headers) == (200, {}, False)


@pytest.mark.parametrize("origins", [(PAGE,), ("http://b.test", PAGE), ("*",)])
@pytest.mark.parametrize("origin", [PAGE, OTHER])
async def test_it_answers_as_vllms_middleware_does(origins: tuple[str, ...], origin: str) -> None:
    headers = ASKS | {"Origin": origin}
    async with fleet(1, 1, cors_origins=origins) as f:
        status, expected = await fastapis(list(origins), "OPTIONS", headers)
        answer = await preflight(f, headers)
        assert answer.status == (204 if status == 200 else status)
        if status == 200:
            found, wanted = cors_of(answer.headers), {name: value.lower() for name, value in cors_of(expected).items()}
            methods = "access-control-allow-methods"
            assert set(found.pop(methods).split(", ")) <= set(wanted.pop(methods).split(", ")), "those that the router has"
            assert found == wanted
            assert "content-length" not in answer.headers, "204 has no body"
        _, expected = await fastapis(list(origins), "POST", {"Origin": origin})
        for stream in (False, True):
            said = await f.post("/v1/completions", {"prompt": "x", "stream": stream}, headers={"Origin": origin})
            assert (said.status, cors_of(said.headers)) == (200, cors_of(expected)), stream
            assert ("vary" in said.headers) == ("*" not in origins), "a cache must not give it to another origin"


async def test_a_preflight_needs_no_key_and_what_it_asks_for_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-one\n")
    async with fleet(1, 1, cors_origins=(PAGE,), api_key_file=str(file)) as f:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/models", "/nothing"):
            answer = await preflight(f, ASKS, path)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, PAGE), path
        refused = await f.post("/v1/completions", {"prompt": "x"}, headers={"Origin": PAGE})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE), "the page may read why"
        good = {"Origin": PAGE, "Authorization": "Bearer key-one"}
        served = await f.post("/v1/completions", {"prompt": "x"}, headers=good)
        assert (served.status, served.headers["vary"]) == (200, "Origin")


async def test_every_kind_of_answer_says_it() -> None:
    async with fleet(1, 1, cors_origins=(PAGE,)) as f:
        f.d[0].plays += [Play(status=400, body=b"{}")]
        for path, wanted in (("/health", 200), ("/v1/models", 200), ("/metrics", 200), ("/nothing", 404)):
            answer = await f.get(path, headers={"Origin": PAGE})
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (wanted, PAGE), path
        for path, wanted in (("/v1/completions", 400), ("/tokenize", 200), ("/sleep", 404)):
            answer = await f.post(path, {"prompt": "x"}, headers={"Origin": PAGE})
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (wanted, PAGE), path
        large = await f.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                            b"Origin: http://app.test\r\nContent-Length: 99999999\r\n\r\n")
        assert (large.status, large.headers["access-control-allow-origin"]) == (413, PAGE)


async def test_an_options_request_that_is_no_preflight_is_none() -> None:
    async with fleet(1, 1, cors_origins=(PAGE,)) as f:
        for headers in ({"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}):
            answer = await preflight(f, headers)
            assert answer.status == 405


async def test_names_of_headers_that_are_none_are_not_given_back() -> None:
    async with fleet(1, 1, cors_origins=(PAGE,)) as f:
        answer = await preflight(f, ASKS | {"Access-Control-Request-Headers": "x-a, \"<b>\""})
        assert (answer.status, "access-control-allow-headers" in answer.headers) == (204, False)


async def test_requests_without_an_origin_go_the_fast_way_as_before() -> None:
    async with fleet(1, 1, cors_origins=(PAGE,)) as f:
        for _ in range(3):
            answer = await f.post("/v1/completions", {"prompt": "x", "stream": True})
            assert (answer.status, cors_of(answer.headers), "vary" in answer.headers) == (200, {}, False)
        await asyncio.sleep(0)
