"""What strangers without a key can do to a router in a process of its own, and what it costs others: memory and time.

    async with router(folder) as r:
        cost = await measured(r, unread(r, seconds=3))
        cost.grown_mib, cost.worst_s

Each attack says at its end whether it got what HTTP promises it. Beside it a client of its own asks for /health, one
request after the other, of this router and of another one that nobody attacks, on the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beats import SERVICE, Beater, beat
from cluster import start_sidecar
from load import wait_ready
from processes import Group, free_port, kept_waiting_s
from router_fleet import read_answer, request_bytes
from scripted_engine import ScriptedEngine

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig

MIB = 1 << 20
READ = 200_000
"""Bytes of pipelined requests that one read of the router can take."""
UPGRADES = 3000
LARGE = 31 * MIB
EACH_S = 90.0
"""Deadline of one attack, for a machine that is busy."""


@dataclass
class Router:
    """A router process."""

    port: int
    process: Group
    admin_port: int = 0

    @property
    def rss(self) -> float:
        """MiB of memory that it has now."""
        return self._status("VmRSS")

    @property
    def peak(self) -> float:
        """The most that it had since ``forget_peak``."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Begin anew."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition(f"{name}:")[2].split()[0]) / 1024

    async def connect(self, port: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of a client, or to another port."""
        return await asyncio.open_connection("127.0.0.1", port or self.port, limit=MIB)

    async def ask(self, raw: bytes) -> int:
        """One request on a connection of its own; the status."""
        reader, writer = await self.connect()
        try:
            writer.write(raw)
            return (await read_answer(reader, EACH_S)).status
        finally:
            writer.transport.abort()


@dataclass
class Cost:
    """What an attack cost."""

    grown_mib: float
    """The most memory during it, beyond what there was before."""
    worst_s: float
    """The longest /health during it, on the admin port, but for how long the router waited for a processor."""
    idle_s: float
    """The same of a router beside it that nobody attacked."""
    seconds: float
    told: dict[str, Any]
    """What the attack says."""


@contextlib.asynccontextmanager
async def router(folder: Path, *, decode: str = "", **settings: Any) -> AsyncIterator[Router]:
    """A router process before one prefill and one decode engine, or before that at the address ``decode``."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 (before anything runs)
    key_file = folder / "key"
    keys.write(key_file, keys.mint())
    port, members, admin = free_port(), free_port(), free_port()
    made: dict[str, Any] = {"host": "127.0.0.1", "port": port, "members_port": members, "admin_port": admin,
                            "heartbeat_s": 0.2, "resolve_s": 0.2, "access_log": False}
    config = SidecarConfig(service=SERVICE, instance=InstanceName("router"), key_file=str(key_file), run_dir=str(folder),
                           log_level="warning", router=RouterConfig(**(made | settings)))
    engines = {Role.PREFILL: await ScriptedEngine("p0").start(), Role.DECODE: await ScriptedEngine("d0").start()}
    process = start_sidecar(folder, "router", config)
    agent = Beater(members, keys.read(key_file), b"a")
    try:
        for role, engine in engines.items():
            address = decode if decode and role is Role.DECODE else engine.address
            await agent.send(beat(engine.name, role, address, interval_s=600.0))
        await wait_ready(port, process)
        yield Router(port, process, admin)
    finally:
        process.kill()
        agent.close()
        for engine in engines.values():
            await engine.stop()


async def measured(attacked: Router, idle: Router, attack: Awaitable[dict[str, Any]]) -> Cost:
    """Run an attack, and ask for /health all the while."""
    worst = {attacked.port: 0.0, idle.port: 0.0}
    ended = asyncio.Event()

    async def ask(one: Router) -> None:
        reader, writer = await one.connect(one.admin_port)
        while not ended.is_set():
            began, kept_s = time.monotonic(), kept_waiting_s([one.process.pid])
            writer.write(request_bytes("/health", method="GET"))
            answer = await read_answer(reader, EACH_S)
            assert answer.status == 200
            took_s = time.monotonic() - began - (kept_waiting_s([one.process.pid]) - kept_s)
            worst[one.port] = max(worst[one.port], took_s)
            await asyncio.sleep(0.005)
        writer.transport.abort()

    attacked.forget_peak()
    before, began = attacked.rss, time.monotonic()
    asking = [asyncio.create_task(ask(one)) for one in (attacked, idle)]
    try:
        async with asyncio.timeout(EACH_S):
            told = await attack
    finally:
        ended.set()
        await asyncio.gather(*asking)
    return Cost(attacked.peak - before, worst[attacked.port], worst[idle.port], time.monotonic() - began, told)


def _socket(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), EACH_S)
    sock.setblocking(False)
    return sock


async def unread(r: Router, path: str = "/metrics", seconds: float = 3.0) -> dict[str, Any]:
    """Pipelined requests on one connection, as many as it takes, and no answer is ever read."""
    loop, raw, sent = asyncio.get_running_loop(), request_bytes(path, method="GET") * 1000, 0
    with _socket(r.port) as sock, contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                await loop.sock_sendall(sock, raw)
                sent += 1
    return {"requests": 1000 * sent}


async def pipelined(r: Router, raw: bytes, number: int) -> dict[str, Any]:
    """So many requests in one write; every answer is read. An exact count: a missing answer ends in the deadline."""
    reader, writer = await r.connect()
    writer.write(raw)
    answers, tail = 0, b""
    while answers < number:
        data = await reader.read(MIB)
        assert data, f"closed after {answers} of {number} answers"
        answers += (tail + data).count(b"HTTP/1.1 200 OK\r\n")
        tail = data[-16:]
        assert not tail.endswith(b"HTTP/1.1 200 OK\r\n")
    writer.transport.abort()
    return {"answers": answers}


async def metrics_in_one_read(r: Router) -> dict[str, Any]:
    """As many requests for /metrics as one read takes."""
    one = b"GET /metrics HTTP/1.1\r\nHost:localhost\r\n\r\n"
    return await pipelined(r, one * (READ // len(one)), READ // len(one))


async def upgrades(r: Router) -> dict[str, Any]:
    """Requests that offer an upgrade, one behind the other."""
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    return await pipelined(r, one * UPGRADES, UPGRADES)


async def held_bodies(r: Router, strangers: int = 40, honest: int = 100) -> dict[str, Any]:
    """Bodies that never become whole, and honest requests beside them; how many of those are answered."""
    loop, rest = asyncio.get_running_loop(), memoryview(bytes(LARGE - 1))
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {LARGE}\r\n\r\n").encode()
    good = request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 4})
    with contextlib.ExitStack() as stack:
        async def stranger() -> bool:
            sock = stack.enter_context(_socket(r.port))
            try:
                await loop.sock_sendall(sock, head)
                await loop.sock_sendall(sock, rest)
            except ConnectionError:  # refused, or ended for another one
                return False
            return True

        sending = [asyncio.create_task(stranger()) for _ in range(strangers)]
        statuses = [await r.ask(good) for _ in range(honest // 2)]
        held = sum(await asyncio.gather(*sending))
        statuses += [await r.ask(good) for _ in range(honest - honest // 2)]
    return {"sent all but a byte": held, "answered": statuses.count(200), "of": len(statuses), "rss": r.rss}
