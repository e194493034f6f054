"""Processes at the other end of a broadcast queue, and the campaign that kills and stalls them.

Messages are made from a number alone, so every reader knows what the next one must be: its parts are slices of a pool of
random bytes. Small ones mostly, some of several parts, some larger than a chunk.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from xpyd_sidecar.broadcast.errors import QueueClosed, ReaderDropped, ReaderStuck
from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import LocalReader, RemoteReader, join
from xpyd_sidecar.broadcast.rpc import WorkerGroup
from xpyd_sidecar.broadcast.worker import Worker
from xpyd_sidecar.contract.keys import ServiceKey

KEY: Final = ServiceKey(bytes(range(32)))
POOL: Final = random.Random(7).randbytes(1 << 20)
CHUNK: Final = 4096
JOIN_S: Final = 300.0
"""Also on a machine that is busy with other things."""
SPAWN: Final = mp.get_context("spawn")
Joined = LocalReader | RemoteReader


def parts_of(number: int) -> list[bytes]:
    """The parts of message ``number``; the first begins with the number."""
    draw = (number * 2654435761) & 0xFFFF_FFFF
    at, kind = draw >> 13, draw % 1000
    if kind < 5:
        size = 5000 + draw % 60_000  # larger than a chunk
    elif kind < 50:
        size = draw % 3500
    else:
        size = draw % 120
    body = POOL[at:at + size]
    head = number.to_bytes(8, "little") + body[:11]
    return [head, body, body[3:40], b""] if kind % 4 == 0 else [head + body]


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """A process that runs ``target(connection, *args)``, and the connection to it."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def read_all(told: Connection, handle: bytes, name: str, seed: int, first: int) -> None:
    """Check message after message, with stalls now and then, until the writer closes; then tell the count."""
    draw = random.Random(seed)
    reader = join(handle, name, timeout_s=JOIN_S, key=KEY)
    number = first
    try:
        while True:
            if draw.random() < 0.0005:
                time.sleep(draw.random() * 0.01)
            if draw.random() < 0.5:
                got: list[Any] = reader.recv(JOIN_S)
                same = got == parts_of(number)
            else:
                with reader.take(JOIN_S) as views:
                    same = list(views) == parts_of(number)
            if not same:
                told.send(("wrong", number))
                return
            number += 1
    except QueueClosed:
        told.send(("read", number - first))
    except ReaderDropped:
        told.send(("dropped", number - first))


def hold(told: Connection, handle: bytes, name: str) -> None:
    """Join, say so, read one message, and then live on without reading."""
    reader = join(handle, name, timeout_s=JOIN_S, key=KEY)
    told.send("joined")
    reader.recv(JOIN_S)
    told.send("read")
    time.sleep(600)


def hold_with_child(told: Connection, handle: bytes, name: str) -> None:
    """As ``hold``; a child of it has every descriptor, too, and lives on."""
    reader = join(handle, name, timeout_s=JOIN_S, key=KEY)
    child = os.fork()
    if child == 0:
        time.sleep(600)
    reader.recv(JOIN_S)
    told.send(child)
    time.sleep(600)


def write(told: Connection, local: tuple[str, ...], messages: int, size: int) -> None:
    """Hand over the handle, write messages, say so, and live on."""
    writer = Writer("killed", local=local, chunks=8)
    told.send(writer.handle)
    writer.wait_ready(JOIN_S)
    for number in range(messages):
        writer.send(number.to_bytes(8, "little") + bytes(size))
    told.send("written")
    time.sleep(600)


@dataclass
class Figures:
    """What a campaign did and found."""

    messages: int = 0
    deliveries: int = 0
    """Messages that a reader took and found right, all readers together, without those that were killed."""
    overflows: int = 0
    """Messages larger than a chunk."""
    rounds: int = 0
    killed: int = 0
    stopped: int = 0
    """Readers that were stopped for a while, alive."""
    stuck: int = 0
    """Sends that ended in ReaderStuck and were made again."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """For a file of results."""
        return {**asdict(self), "wrong": len(self.wrong), "seconds": round(self.seconds, 1)}


def play(figures: Figures, messages: int, seed: int) -> None:
    """One round: a queue with three local readers and a remote one; one or two are killed, one is stopped for a while."""
    draw = random.Random(seed)
    local, remote = ("a", "b", "c"), ("far",)
    writer = Writer("campaign", local=local, remote=remote, chunk_bytes=CHUNK, chunks=draw.choice((2, 5, 10)), key=KEY)
    peers = {name: start(read_all, writer.handle, name, seed + index, 1) for index, name in enumerate((*local, *remote))}
    began = time.monotonic()
    try:
        writer.wait_ready(JOIN_S)
        killed = draw.sample(sorted(peers), draw.choice((1, 2)))
        kills = {draw.randrange(1, messages): name for name in killed}
        halted = draw.choice([name for name in peers if name not in killed])
        halt_at, halt_s = draw.randrange(1, messages), 0.2
        running_at = 0.0
        for number in range(1, messages + 1):
            if number in kills:
                os.kill(peers[kills[number]][0].pid or 0, signal.SIGKILL)
                figures.killed += 1
            if number == halt_at:
                os.kill(peers[halted][0].pid or 0, signal.SIGSTOP)
                running_at = time.monotonic() + halt_s
                figures.stopped += 1
            parts = parts_of(number)
            figures.overflows += sum(map(len, parts)) > CHUNK
            while True:
                if running_at and time.monotonic() >= running_at:
                    os.kill(peers[halted][0].pid or 0, signal.SIGCONT)
                    running_at = 0.0
                try:
                    writer.send(*parts, timeout_s=0.05 if running_at else JOIN_S)
                    break
                except ReaderStuck:
                    figures.stuck += 1
        if running_at:
            os.kill(peers[halted][0].pid or 0, signal.SIGCONT)
        writer.close(JOIN_S)
        for name, (process, told) in peers.items():
            if name in killed:
                continue
            said = told.recv() if told.poll(JOIN_S) else "nothing"
            if said != ("read", messages):
                figures.wrong.append(f"seed {seed}, {name}: {said} of {messages}; {writer.lost.get(name, 'not dropped')}")
            else:
                figures.deliveries += messages
            process.join(JOIN_S)
        for name in writer.lost:
            if name not in killed:
                figures.wrong.append(f"seed {seed}: {name} was dropped alive: {writer.lost[name]}")
        figures.messages += messages
        figures.rounds += 1
        figures.seconds += time.monotonic() - began
    finally:
        writer.close()
        end_all(peers)


def end_all(peers: Mapping[str, tuple[BaseProcess, Connection]]) -> None:
    """Whatever became of them."""
    for process, told in peers.values():
        process.kill()
        process.join(JOIN_S)
        told.close()


def work(told: Connection, handle: bytes, name: str) -> None:
    """A worker with two methods."""
    Worker(handle, name, timeout_s=JOIN_S, key=KEY).serve({"pid": os.getpid, "sleep": time.sleep})


def call_for_ever(told: Connection, workers: tuple[str, ...]) -> None:
    """A caller that hands over the handle and then calls ``poke``, until it is killed."""
    group = WorkerGroup("g", workers, key=KEY)
    told.send(group.handle)
    group.wait_ready(JOIN_S)
    while True:
        group.call("poke")
