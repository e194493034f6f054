"""Heartbeats for tests: messages made with defaults, and a CURVE DEALER that sends them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import Ack, GoodbyeMessage, Heartbeat, Up
from xpyd_sidecar.process import curve

SERVICE = ServiceName("test")
AGENT = AgentId("0" * 20)
FINGERPRINT = Fingerprint("f" * 32)


def beat(name: str, role: Role = Role.DECODE, http: str | tuple[HostPort, ...] = "127.0.0.1:1", **fields: Any) -> Heartbeat:
    """A beat of a ready instance."""
    made: dict[str, Any] = {
        "v": 1, "service": SERVICE, "instance": InstanceName(name), "seq": 1, "role": role, "epoch": 1,
        "state": State.READY, "agent": AGENT,
        "incarnation": Incarnation(f"i-{name}"), "http": (HostPort(http),) if isinstance(http, str) else http,
        "control": (HostPort("127.0.0.1:9"),),
        "model": "tiny", "max_model_len": 2048, "fingerprint": FINGERPRINT,
    }
    return Heartbeat(**(made | fields))


def bye(name: str, **fields: Any) -> GoodbyeMessage:
    """A goodbye."""
    made: dict[str, Any] = {"v": 1, "service": SERVICE, "instance": InstanceName(name), "agent": AGENT,
                            "incarnation": Incarnation(f"i-{name}")}
    return GoodbyeMessage(**(made | fields))


class Beater:
    """A CURVE DEALER."""

    def __init__(self, port: int, key: ServiceKey, identity: bytes = b"") -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        curve.connect(self._socket, key, "membership")
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    async def send(self, message: Up | bytes) -> None:
        """Send a message, or raw bytes."""
        await self._socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    async def ack(self, timeout_s: float = 60.0) -> Ack:
        """The next acknowledgement. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return msgspec.msgpack.decode(await self._socket.recv(), type=Ack)

    async def say(self, message: Up | bytes) -> Ack:
        """Send and wait for the acknowledgement."""
        await self.send(message)
        return await self.ack()

    def close(self) -> None:
        self._socket.close()
        self._context.term()
