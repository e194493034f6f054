"""Who has no part in a broadcast queue and tries all the same: to be told of calls, to send some, to stop it.

    tries = Stranger(endpoints, key)          sockets of every kind at every endpoint
    tries.speak(mark)                         pickles that make the file ``mark``, and what members say to each other
    tries.told()                              what came for it; empty where it was told nothing
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from executor_hosts import CLEAN, Bomb
from networks import Network

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.process import curve

KINDS = (zmq.DEALER, zmq.SUB, zmq.XSUB, zmq.PUB, zmq.REQ, zmq.PAIR)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
"""Of a ZMQ peer that asks for no key."""


def frames(payload: bytes) -> list[list[bytes]]:
    """What a stranger may say: as vLLM's queue has it, as ours has it, and nonsense."""
    return [[payload], [b"READY"], [wire.pack_number(1, 1), payload], [wire.pack(wire.QueueTaken(1 << 40))],
            [wire.pack(wire.Bye(0))], [wire.pack(wire.QueueWelcome())], [b"\x00" * 70_000], [b"\x01"], [b""]]


class Stranger:
    """See the module."""

    def __init__(self, endpoints: Sequence[str], key: ServiceKey | None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socks: list[tuple[zmq.Socket[Any], int]] = []
        for endpoint, kind in itertools.product(endpoints, KINDS):
            sock = self._context.socket(kind)
            sock.setsockopt(zmq.LINGER, 0)
            if key is not None:
                curve.connect(sock, key, "broadcast")
            if kind == zmq.SUB:
                sock.setsockopt(zmq.SUBSCRIBE, b"")
            sock.connect(endpoint)
            self._socks.append((sock, kind))
        time.sleep(0.3)

    def speak(self, mark: Path) -> None:
        for sock, kind in self._socks:
            for each in frames(pickle.dumps(Bomb(mark))):
                if kind != zmq.SUB and sock.poll(0, zmq.POLLOUT):
                    with contextlib.suppress(zmq.Again):  # it is shut out while it speaks
                        sock.send_multipart(each if kind != zmq.XSUB else [b"\x01", *each], zmq.NOBLOCK)

    def told(self) -> list[list[bytes]]:
        return [sock.recv_multipart(zmq.NOBLOCK) for sock, kind in self._socks if kind != zmq.PUB and sock.poll(0)]

    def close(self) -> None:
        self._context.destroy(linger=0)


def talk_garbage(endpoints: Sequence[str], mark: Path) -> int:
    """Bytes that are no ZMQ, or of a peer without a key, at each port; how many connections were made."""
    made, bomb = 0, pickle.dumps(Bomb(mark))
    for endpoint in endpoints:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        for said in (bomb, b"GET / HTTP/1.1\r\n\r\n", bytes(100_000), GREETING + bomb):
            with socket.create_connection((host, int(port)), 5) as sock:
                made += 1
                with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
                    sock.sendall(said)
                    sock.settimeout(0.1)
                    assert b"secret" not in sock.recv(1 << 16)
    return made


def _elsewhere(told: Any, network: Network, endpoints: Sequence[str], key: ServiceKey | None, mark: Path) -> None:
    network.enter()
    stranger = Stranger(endpoints, key)
    stranger.speak(mark)
    told.send(talk_garbage(endpoints, mark))
    told.recv()
    told.send(stranger.told())
    stranger.close()


class StrangerElsewhere:
    """One in a network of its own, which speaks at once."""

    def __init__(self, network: Network, endpoints: Sequence[str], key: ServiceKey | None, mark: Path) -> None:
        self._pipe, theirs = CLEAN.Pipe()
        self._process = CLEAN.Process(target=_elsewhere, args=(theirs, network, endpoints, key, mark))
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """First how many connections it has made, then, after ``go``, what it was told."""
        assert self._pipe.poll(120), "the stranger says nothing"
        return self._pipe.recv()

    def go(self) -> None:
        self._pipe.send("")

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()
