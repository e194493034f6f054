"""A request is judged by its head: what its path, method, key or media type refuses is told before its body comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_site import site
from router_fleet import Answer, RouterFleet, fleet, read_answer, request_bytes

from xpyd_sidecar.router.endpoints.application import Paths

LOOPS = ("uvloop",)
LARGE = 31 << 20
SMALL = 64 << 10
"""Bytes of a refused body that are thrown away for the connection to go on."""
JSON = "content-type: application/json\r\n"
KEY = "authorization: Bearer key-one\r\n"
HEALTH = request_bytes("/health", method="GET")


@contextlib.asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[RouterFleet]:
    """A router that asks for a key."""
    file = tmp_path / "keys"
    file.write_text("key-one\n")
    async with fleet(1, 1, api_key_file=str(file)) as f:
        yield f


def head(path: str, lines: str, size: int | None, method: str = "POST") -> bytes:
    """A head alone; ``size`` None: chunks follow."""
    framing = "transfer-encoding: chunked" if size is None else f"content-length: {size}"
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: mine\r\n{lines}{framing}\r\n\r\n".encode()


def held(f: RouterFleet) -> int:
    """Bytes of bodies that connections hold."""
    return sum(sum(map(len, connection._incoming._body)) for connection in f.router.server.connections)


CASES = [
    ("/nothing", KEY + JSON, "POST", 404), ("/health", KEY, "POST", 405), ("/v1/completions", KEY + JSON, "PUT", 405),
    ("/v1/completions", JSON, "POST", 401), ("/v1/embeddings", JSON, "POST", 401),
    ("/v1/audio/transcriptions", "", "POST", 401),
    ("/sleep", KEY, "POST", 404), ("/v1/responses/r1/cancel", KEY, "POST", 404), ("/v1/completions", KEY, "POST", 415),
    ("/v1/chat/completions", KEY + "content-type: text/plain\r\n", "POST", 415), ("/tokenize", KEY, "POST", 415),
    ("/v1/completions", KEY + JSON + "content-encoding: gzip\r\n", "POST", 415),
    ("/v1/audio/transcriptions", KEY + "content-encoding: gzip\r\n", "POST", 415),
]


@pytest.mark.parametrize("size", [LARGE, 5, None])
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
async def test_a_refusal_is_told_at_the_head(tmp_path: Path, case: tuple[str, str, str, int], size: int | None) -> None:
    path, lines, method, status = case
    async with guarded(tmp_path) as f:
        reader, writer = await f.connect()
        writer.write(head(path, lines, size, method))
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert answer.headers.get("connection") == ("close" if size == LARGE else None)
        assert not held(f)
        if size == LARGE:
            assert await reader.read() == b""
        else:  # the body still comes, and what follows it is a request
            writer.write((b"12345" if size else b"5\r\n12345\r\n0\r\n\r\n") + HEALTH)
            assert (await read_answer(reader)).body == b"ok\n"
        writer.transport.abort()
        assert not f.d[0].seen


async def test_the_largest_body_is_told_at_the_head_and_a_larger_one_too(tmp_path: Path) -> None:
    async with guarded(tmp_path) as f:
        answer = await f.raw(head("/v1/completions", KEY + JSON, 99_999_999))
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        answer = await f.raw(head("/v1/completions", JSON, 99_999_999))
        assert answer.status == 401, "who may not ask at all is not told what he may send"


async def test_who_waits_for_100_gets_the_refusal_instead(tmp_path: Path) -> None:
    async with guarded(tmp_path) as f:
        for path, lines, status in (("/v1/completions", JSON, 401), ("/nothing", KEY, 404), ("/v1/completions", KEY, 415)):
            reader, writer = await f.connect()
            writer.write(head(path, lines + "expect: 100-continue\r\n", 5))
            answer = await read_answer(reader)
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert await reader.read() == b""
            writer.transport.abort()
        reader, writer = await f.connect()
        body = json.dumps({"prompt": "x"}).encode()
        writer.write(head("/v1/completions", KEY + JSON + "expect: 100-continue\r\n", len(body)))
        assert (await read_answer(reader)).status == 100
        writer.write(body)
        assert (await read_answer(reader)).status == 200
        writer.transport.abort()


async def test_a_refusal_waits_for_its_turn(tmp_path: Path) -> None:
    async with guarded(tmp_path) as f:
        reader, writer = await f.connect()
        good = request_bytes("/v1/completions", {"prompt": "x"}, headers={"authorization": "Bearer key-one"})
        writer.write(good + head("/v1/completions", JSON, 5) + b"12345" + good + head("/v1/completions", JSON, LARGE)
                     + b"x" * 1000)
        assert [(await read_answer(reader)).status for _ in range(4)] == [200, 401, 200, 401]
        assert await reader.read() == b""
        writer.transport.abort()


@pytest.mark.parametrize("chunked", [True, False])
async def test_what_is_thrown_away_is_bounded_and_the_answer_is_not_lost(tmp_path: Path, chunked: bool) -> None:
    """Of chunks nobody says how many they are: the connection ends where they are more."""
    async with guarded(tmp_path) as f:
        reader, writer = await f.connect()
        writer.write(head("/v1/completions", JSON, None if chunked else SMALL))
        assert (await read_answer(reader)).status == 401
        if chunked:
            for _ in range(SMALL // 4096 + 1):
                writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            async with asyncio.timeout(10):  # sooner than a body that is late would end it
                assert await reader.read() == b""
        else:
            writer.write(b"x" * SMALL + HEALTH)
            assert (await read_answer(reader)).body == b"ok\n"
        writer.transport.abort()


async def test_bad_chunks_of_a_refused_body_end_the_connection_without_a_second_answer(tmp_path: Path) -> None:
    async with guarded(tmp_path) as f:
        reader, writer = await f.connect()
        writer.write(head("/v1/completions", JSON, None))
        assert (await read_answer(reader)).status == 401
        writer.write(b"zz\r\n" + HEALTH)
        assert await reader.read() == b""
        writer.transport.abort()


async def test_a_refused_body_that_does_not_come_ends_the_connection_without_a_second_answer(tmp_path: Path) -> None:
    async with guarded(tmp_path) as f:
        reader, writer = await f.connect()
        writer.write(head("/v1/completions", JSON, 5))
        assert (await read_answer(reader)).status == 401
        [connection] = f.router.server.connections
        now = f.context.loop.time()
        connection.sweep(now + 29.0, now)
        connection.sweep(now + 31.0, now)
        assert await reader.read() == b""
        writer.transport.abort()


async def test_a_body_that_nobody_wants_is_not_kept() -> None:
    """GET with a body: it is no error, and needs no key."""
    async with fleet(0, 1) as f:
        reader, writer = await f.connect()
        writer.write(head("/health", "", LARGE, "GET"))
        for _ in range(LARGE >> 20):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            assert not held(f)
        assert (await read_answer(reader)).status == 200
        writer.write(HEALTH)
        assert (await read_answer(reader)).status == 200
        writer.transport.abort()


async def test_refused_generation_is_counted_as_before(tmp_path: Path) -> None:
    async with guarded(tmp_path) as f:
        for raw in (head("/v1/completions", JSON, 5), request_bytes("/v1/completions", {"prompt": "x"}),
                    head("/v1/completions", JSON, None)):
            assert (await f.raw(raw)).status == 401
        assert f.context.observer.metrics.requests_total == 3


async def ask(f: RouterFleet, host: str, path: str = "/v1/completions") -> Answer:
    """One plain request for a host."""
    return await f.post(path, {"prompt": "x"}, headers={"Host": host})


async def test_a_router_of_this_machine_serves_no_page_whose_name_points_to_it() -> None:
    async with fleet(1, 1, hosts=("models.home",)) as f:
        for host, status in (("localhost", 200), ("evil.example", 421), (f"127.0.0.1:{f.router.port}", 200),
                             ("[::1]:1", 200), ("evil.example", 421), ("Models.Home:443", 200), ("a b", 400)):
            answer = await ask(f, host)
            assert answer.status == status, host
            assert (await f.get("/health", headers={"Host": host})).status == status, host
        assert (await ask(f, "evil.example")).json["error"]["code"] == "misdirected_request"
        raw = head("/v1/completions", "", 99).replace(b"localhost", b"evil.example")
        assert (await f.raw(raw)).status == 421


async def test_a_router_that_others_reach_serves_any_name() -> None:
    async with fleet(1, 1, host="0.0.0.0", hosts=()) as f:
        assert [(await ask(f, host)).status for host in ("evil.example", "10.0.0.1:1", "a b")] == [200, 200, 400]


async def test_media_types_as_vllm_judges_them_by_every_way() -> None:
    async with fleet(1, 1) as f:
        for kind, status in (("application/json", 200), ("application/json; charset=utf-8", 200), ("text/plain", 415),
                             ("application/json", 200), ("multipart/form-data; boundary=a", 415)):
            for path in ("/v1/completions", "/tokenize"):
                answer = await f.post(path, {"prompt": "x"}, headers={"Content-Type": kind})
                assert answer.status == status, (kind, path)
        assert answer.json["error"] == {"message": "Unsupported Media Type: Only 'application/json' is allowed",
                                        "type": "invalid_request_error", "param": None, "code": "unsupported_media_type"}


async def test_a_plain_request_is_judged_once_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    judge = Paths.judge

    def noted(paths: Paths, method: str, path: str, headers: dict[bytes, bytes]) -> bool:
        judged.append(path)
        return judge(paths, method, path, headers)

    async with fleet(1, 1) as f:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "stream": True}
        monkeypatch.setattr(Paths, "judge", noted)
        for host in ("localhost", "127.0.0.1:1", "localhost"):
            answer = await f.post("/v1/completions", body, headers={"Host": host, "Content-Type": "application/json"})
            assert answer.status == 200
        assert judged == ["/v1/completions"] * 3


async def test_the_end_of_a_server_leaves_a_refused_body_behind() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100001\r\n\r\n")
        assert (await read_answer(reader)).status == 413
        assert await reader.read() == b""
        writer.transport.abort()
        async with asyncio.timeout(20):
            while s.server.connections:  # noqa: ASYNC110 (the server's state has no event)
                await asyncio.sleep(0.01)
