"""What an agent talks to, small: an engine's HTTP side, and a router's membership socket.

    async with FakeEngine(run_dir) as engine: …     .health, .running, .waiting, .sends_open …; write_record()
    router = FakeRouter(KEY) … router.close()       .beats, .goodbyes; .ack, .refusal, .in_flight, .stalled, .hold
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Self

import msgspec
import zmq
from aiohttp import web
from processes import free_port

from xpyd_sidecar.contract import record
from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName, Role, ServiceName
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import AgentConfig, SidecarConfig
from xpyd_sidecar.contract.membership import Ack, GoodbyeMessage, Heartbeat, Parallel, Up
from xpyd_sidecar.process import curve

KEY = ServiceKey(bytes(range(32)))
FIELDS = FingerprintFields(model="m1", dtype="float32", kv_dtype="float32", block_size=128, layout="HND", isa="avx2",
                           kv_abi="0.32.0")


def record_of(incarnation: str = "a" * 32, dp_rank: int = 0, fields: FingerprintFields = FIELDS) -> record.EngineRecord:
    return record.EngineRecord(v=record.VERSION, dp_rank=dp_rank, incarnation=Incarnation(incarnation),
                               control=HostPort(f"127.0.0.1:{4000 + dp_rank}"), fingerprint=fields, parallel=Parallel(),
                               max_model_len=2048, pid=os.getpid(), kv="2.5.1")


def config_of(run_dir: Path | str = "/nowhere", engine: str = "127.0.0.1:1", routers: tuple[str, ...] = ("127.0.0.1:2",),
              **fields: object) -> SidecarConfig:
    agent = AgentConfig(role=Role.DECODE, engine=HostPort(engine), advertise_host="10.0.0.7", advertise_port=8000,
                        routers=tuple(map(HostPort, routers)))
    agent = msgspec.structs.replace(agent, **fields)
    return SidecarConfig(service=ServiceName("test"), instance=InstanceName("test-e0"), key_file="/nowhere/key",
                         run_dir=str(run_dir), agent=agent)


class FakeEngine:
    """Answers /health, /metrics and /v1/models as told."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.health = 200
        self.health_delay_s = 0.0
        self.health_asked, self.health_told = asyncio.Event(), asyncio.Event()
        """The second is set, unless a test holds answers back."""
        self.health_told.set()
        self.running = self.waiting = self.sends_open = self.receives_open = 0
        self.usage = 0.0
        self.models_status = 200
        self.model = "tiny"
        self.metrics_text: str | None = None
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._runner: web.AppRunner | None = None

    def write_record(self, incarnation: str = "a" * 32) -> None:
        record.write(self.run_dir, record_of(incarnation))

    async def start(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.get("/metrics", self._metrics),
                        web.get("/v1/models", self._models)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _health(self, _: web.Request) -> web.Response:
        self.health_asked.set()
        await self.health_told.wait()
        await asyncio.sleep(self.health_delay_s)
        return web.Response(status=self.health)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = self.metrics_text or (
            f'vllm:num_requests_running{{engine="0"}} {self.running}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.usage}\nxpyd_kv_sends_open{{engine="0"}} {self.sends_open}\n'
            f'xpyd_kv_receives_open{{engine="0"}} {self.receives_open}\n')
        return web.Response(text=text)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 2048}]}, status=self.models_status)


class FakeRouter:
    """A membership socket in the running loop. Acks every beat unless told otherwise."""

    def __init__(self, key: ServiceKey = KEY, port: int = 0, name: str = "r0", host: str = "127.0.0.1") -> None:
        self.name = name
        self.beats: list[Heartbeat] = []
        self.goodbyes: list[GoodbyeMessage] = []
        self.ack = True
        self.refusal = ""
        self.in_flight = 0
        self.stalled = self.hold = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        curve.serve(self._socket, key, "membership")
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self.address = f"{host}:{self.port}"
        self._task = asyncio.ensure_future(self._serve())

    async def wait_beat(self, condition: object = None, timeout_s: float = 60.0) -> Heartbeat:
        """The first beat from now on that fulfils ``condition``."""
        seen, end = len(self.beats), time.monotonic() + timeout_s
        while time.monotonic() < end:
            for beat in self.beats[seen:]:
                seen += 1
                if condition is None or condition(beat):  # type: ignore[operator]
                    return beat
            await asyncio.sleep(0.005)
        raise AssertionError(f"no such beat in {timeout_s} s; the last of {len(self.beats)}: {self.beats[-1:]}")

    async def close(self) -> None:
        if self._socket.closed:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()

    async def _serve(self) -> None:
        while True:
            while self._socket.poll(0):
                peer, text = self._socket.recv_multipart()
                message = msgspec.msgpack.decode(text, type=Up)
                if isinstance(message, GoodbyeMessage):
                    self.goodbyes.append(message)
                else:
                    self.beats.append(message)
                if self.ack:
                    seq = message.seq if isinstance(message, Heartbeat) else -1
                    ack = Ack(1, seq, self.name, self.refusal, self.in_flight, stalled=self.stalled, hold=self.hold)
                    self._socket.send_multipart([peer, msgspec.msgpack.encode(ack)])
            await asyncio.sleep(0.005)
