"""A router that itself stood still blames nobody: what its peers did in time is read first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from beats import SERVICE, Beater, beat
from load import wait_ready
from processes import Group, free_port
from router_fleet import Answer, read_answer, request_bytes
from scripted_engine import Play, ScriptedEngine

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig

pytestmark = pytest.mark.unsanitized
DEADLINE_S = 10.0
"""Every deadline of the router that is stopped: this process has as long to have everything under way."""
GRACE_S = 10.0
"""Long, for a machine that is busy; nothing waits for it."""
STARTS = f"""
import sys
from xpyd_sidecar.process import patience
from xpyd_sidecar.router.upstream import pool as upstream
upstream.CONNECT_S, patience.GRACE_S = {DEADLINE_S}, {GRACE_S}
from xpyd_sidecar.__main__ import main
sys.exit(main())
"""


@contextlib.contextmanager
def full_listener() -> Iterator[socket.socket]:
    """Whoever connects waits: nobody accepts, and there is no room to wait for it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener


class Client:
    """One request of its own connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._answer: asyncio.Task[Answer] | None = None

    async def send(self, data: bytes) -> None:
        """Begin to wait for the answer too."""
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        self._writer.write(data)
        self._answer = asyncio.ensure_future(read_answer(reader))

    def more(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> Answer:
        assert self._answer is not None
        try:
            return await self._answer
        finally:
            self._writer.transport.abort()


async def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


@pytest.mark.timeout(120)
async def test_a_router_that_was_stopped_beyond_every_deadline_fails_no_request(tmp_path: Path) -> None:
    """Connecting, pairing, whole requests, places in the queue, bodies on their way: all were done while it stood still."""
    keys.write(tmp_path / "key", keys.mint())
    port, members = free_port(), free_port()
    config = SidecarConfig(
        service=SERVICE, instance=InstanceName("r0"), key_file=str(tmp_path / "key"), run_dir=str(tmp_path),
        router=RouterConfig(
            host="127.0.0.1", port=port, members_port=members, admin_port=free_port(), heartbeat_s=0.2,
            resolve_s=0.2, on_no_prefill="reject",
            policy="round_robin", max_per_instance=1, pair_timeout_s=DEADLINE_S, request_timeout_s=DEADLINE_S,
            queue_timeout_s=DEADLINE_S, receive_timeout_s=DEADLINE_S))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    go = asyncio.Event()
    p0, p1, d0, d1 = (ScriptedEngine(name) for name in ("p0", "p1", "d0", "d1"))
    p0.default = p1.default = d0.default = Play(hold=go)
    with full_listener() as listener, contextlib.ExitStack() as stack:
        for engine in (p0, p1, d0):
            await engine.start()
        d1.port = listener.getsockname()[1]
        router = Group([sys.executable, "-c", STARTS, "--config", str(tmp_path / "config.json")], log=tmp_path / "log")
        stack.callback(router.kill)
        agent = Beater(members, keys.read(tmp_path / "key"), b"a")
        stack.callback(agent.close)
        for engine in (p0, p1, d0, d1):
            role = Role.PREFILL if engine in (p0, p1) else Role.DECODE
            await agent.send(beat(engine.name, role, engine.address, interval_s=60.0))
        await wait_ready(port, router)

        body = {"model": "tiny", "prompt": "hi", "max_tokens": 8}
        held, connecting, waiting, coming = (Client(port) for _ in range(4))
        began = time.monotonic()
        await held.send(request_bytes("/v1/completions", body | {"stream": True}))
        await connecting.send(request_bytes("/v1/completions", body | {"stream": True}))
        await wait(lambda: bool(p0.open and p1.open and d0.open))
        await waiting.send(request_bytes("/v1/completions", body))
        whole = request_bytes("/v1/completions", body)
        await coming.send(whole[:-10])
        await asyncio.sleep(0.1)

        os.kill(router.pid, signal.SIGSTOP)
        try:
            go.set()
            coming.more(whole[-10:])
            await d1.start(listener)
            listener.listen(64)
            await asyncio.sleep(began + DEADLINE_S + 1.0 - time.monotonic())
        finally:
            os.kill(router.pid, signal.SIGCONT)
        for client in (held, connecting, waiting, coming):
            answer = await client.answer()
            assert answer.status == 200, (answer.body, router.tail())
            assert answer.complete
        assert len(p0.seen) + len(p1.seen) == 4, "nothing was asked twice"
        assert len(d0.seen) + len(d1.seen) == 4
        assert d1.seen
        router.kill()
        for engine in (p0, p1, d0, d1):
            await engine.stop()
