"""Heartbeats of the scripted engines to one router of ours, at the usual interval, from a thread of this program."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import msgspec
import zmq
from contenders import MODEL, SERVICE, Engines

from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import Heartbeat
from xpyd_sidecar.process import curve

INTERVAL_S = 3.0
FIRST_S = 20.0


class Heart:
    """Beats until left; entered once the router has acknowledged every engine."""

    def __init__(self, members_port: int, key: ServiceKey, engines: Engines) -> None:
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._beats: list[Heartbeat] = []
        for role, ports in ((Role.PREFILL, engines.prefill), (Role.DECODE, engines.decode)):
            for port in ports:
                self._beats.append(Heartbeat(
                    v=1, service=ServiceName(SERVICE), instance=InstanceName(f"{role}-{port}"), seq=1, role=role, epoch=1,
                    state=State.READY, agent=AgentId("a"),
                    incarnation=Incarnation(f"i-{port}"), http=(HostPort(f"127.0.0.1:{port}"),),
                    control=(HostPort(f"127.0.0.1:{port}"),), model=MODEL, max_model_len=32768,
                    fingerprint=Fingerprint("f" * 32), interval_s=INTERVAL_S))
                socket = self._context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                curve.connect(socket, key, "membership")
                socket.connect(f"tcp://127.0.0.1:{members_port}")
                self._sockets.append(socket)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        end = time.monotonic() + FIRST_S
        self._beat()
        for socket in self._sockets:
            if not socket.poll(max(0, int((end - time.monotonic()) * 1000))):
                raise TimeoutError(f"the router did not acknowledge a heartbeat within {FIRST_S:g} s")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _beat(self) -> None:
        for socket, message in zip(self._sockets, self._beats, strict=True):
            while socket.poll(0):
                socket.recv()
            socket.send(msgspec.msgpack.encode(message))

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._beat()
