"""A router in this process, before scripted engines: for tests of the whole path over real sockets.

    async with fleet(prefills=1, decodes=2) as f:
        answer = await f.post("/v1/completions", {"prompt": "hi", "stream": True})
        answer.status, answer.headers, answer.body, answer.events
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from beats import SERVICE, beat
from replay import Replay
from scripted_engine import ScriptedEngine

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.router.app import RouterProcess

KEY = keys.ServiceKey(bytes(range(32)))
HOSTS = ("router", "a", "bench", "h", "r", "x")
"""Whom clients of tests ask for; a router on a loopback address would refuse others than itself."""


@dataclass
class Answer:
    """A whole HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool
    """The body ended as its framing says."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Server-sent events, decoded; [DONE] as text."""
        raws = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [raw if raw == "[DONE]" else json.loads(raw) for raw in raws]

    @property
    def text(self) -> str:
        """The generated text of a completions stream."""
        return "".join(event["choices"][0]["text"] for event in self.events
                       if isinstance(event, dict) and "choices" in event)


async def read_answer(reader: asyncio.StreamReader, timeout_s: float = 60.0) -> Answer:
    """Read one response."""
    async with asyncio.timeout(timeout_s):  # a loop that only waits would not let pytest's own timeout through
        return await _read_answer(reader)


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    status = int(head[0].split(" ")[1])
    headers: dict[str, str] = {}
    for line in head[1:]:
        if line:
            name, _, value = line.partition(":")
            assert name.lower() not in headers, f"header {name} twice"
            headers[name.lower()] = value.strip()
    if status == 100:
        return Answer(status, headers, b"", True)
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        try:
            while True:
                size = int((await reader.readuntil(b"\r\n")).strip(), 16)
                chunk = await reader.readexactly(size + 2)
                assert chunk.endswith(b"\r\n")
                body += chunk[:-2]
                if not size:
                    return Answer(status, headers, body, True)
        except asyncio.IncompleteReadError:
            return Answer(status, headers, body, False)
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])), True)
    return Answer(status, headers, await reader.read(), True)


def request_bytes(path: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] | None = None,
                  version: str = "1.1") -> bytes:
    """A whole request; ``body`` is JSON unless it is bytes."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = {"Host": "localhost", "Content-Length": str(len(raw)), **(headers or {})}
    if body is not None and "content-type" not in map(str.lower, lines):
        lines["Content-Type"] = "application/json"
    head = f"{method} {path} HTTP/{version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode() + b"\r\n" + raw


class RouterFleet:
    """A router and its engines."""

    def __init__(self, router: RouterProcess, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine]) -> None:
        self.router = router
        self.p = prefills
        self.d = decodes

    @property
    def context(self) -> Any:
        return self.router.context

    def records(self) -> list[Any]:
        """What is known of the requests that are over from now on; the list grows."""
        records: list[Any] = []
        closed = self.context.observer.on_over

        def keep(record: Any) -> None:
            records.append(record)
            closed(record)

        self.context.observer.on_over = keep
        return records

    def beat(self, engine: ScriptedEngine, **fields: Any) -> None:
        """A heartbeat of an engine, without the socket."""
        role = Role.PREFILL if engine in self.p else Role.DECODE
        self.context.watch.on_message(beat(engine.name, role, engine.address, **fields))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.router.port, limit=1 << 26)

    async def connect_narrow(self, buffer: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that takes, and has on its way, few bytes more than it reads and the other side has read."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.router.port))
        return await asyncio.open_connection(sock=sock, limit=buffer)

    async def raw(self, data: bytes, timeout_s: float = 60.0) -> Answer:
        """Send bytes on a connection of its own, and read one response."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            return await read_answer(reader, timeout_s)
        finally:
            writer.transport.abort()

    async def post(self, path: str, body: Any, **options: Any) -> Answer:
        return await self.raw(request_bytes(path, body, **options))

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.raw(request_bytes(path, method="GET", **options))

    async def ask(self, path: str, *, method: str = "GET", **options: Any) -> Answer:
        """One request to the admin port."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.router.admin_port, limit=1 << 26)
        try:
            writer.write(request_bytes(path, method=method, **options))
            return await read_answer(reader)
        finally:
            writer.transport.abort()

    async def complete(self, **fields: Any) -> Answer:
        """A completion."""
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 8, **fields})

    async def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """Wait until ``condition`` holds."""
        end = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < end, f"waited in vain for {what}"
            await asyncio.sleep(0.005)

    async def wait_quiet(self) -> None:
        """Nothing is open: no request, no leg, no call, no engine at work."""
        await self.wait(lambda: not self.context.servings and not self.context.pool.calls
                        and all(not m.in_flight for m in self.context.roster.members())
                        and not any(engine.open for engine in (*self.p, *self.d)), "a quiet router")


@contextlib.asynccontextmanager
async def fleet(prefills: int = 1, decodes: int = 1, replay: Replay | None = None,
                **settings: Any) -> AsyncIterator[RouterFleet]:
    """Start engines and a router; beats are sent once, far apart, so that nothing is evicted. Nobody is held."""
    ps = [await ScriptedEngine(f"p{i}", replay).start() for i in range(prefills)]
    ds = [await ScriptedEngine(f"d{i}", replay).start() for i in range(decodes)]
    made: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "members_port": 0, "admin_port": 0,
                            "heartbeat_s": 0.1, "resolve_s": 0.0, "drain_timeout_s": 1.0, "hold_s": 0.0, "hosts": HOSTS,
                            "policy": "round_robin"}  # so that tests know who is asked
    config = SidecarConfig(service=SERVICE, instance=InstanceName("r0"), key_file="", run_dir="",
                           router=RouterConfig(**(made | settings)))
    router = RouterProcess(config, KEY)
    try:
        await router.start()
        made_fleet = RouterFleet(router, ps, ds)
        for engine in (*ps, *ds):
            made_fleet.beat(engine, interval_s=60.0)
        yield made_fleet
    finally:
        await router.end()
        for engine in (*ps, *ds):
            await engine.stop()
