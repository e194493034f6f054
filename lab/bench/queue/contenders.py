"""The queues that are compared, each with the same four calls. The one who makes it writes; readers are forked afterwards.

All carry bytes to every reader and give the reader bytes of its own. The two rings have ten chunks of 10 MiB.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq
from vllm.distributed.device_communicators import shm_broadcast

from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import join

CHUNKS, CHUNK_BYTES = 10, 10 << 20
WAIT_S = 60.0


class Contender(Protocol):
    """A queue."""

    def __init__(self, readers: int) -> None: ...

    def reader(self, index: int) -> Callable[[], bytes]:
        """In a reader's process: join. What it returns waits for the next message."""

    def wait_ready(self) -> None:
        """Until all readers have joined."""

    def send(self, payload: bytes) -> None:
        """To all of them."""

    def close(self) -> None:
        """In the writer's process, when all have read everything."""


class Xpyd:
    """xpyd's ring; readers take copies."""

    def __init__(self, readers: int) -> None:
        names = [str(index) for index in range(readers)]
        self._writer = Writer("bench", local=names, chunks=CHUNKS, chunk_bytes=CHUNK_BYTES)

    def reader(self, index: int) -> Callable[[], bytes]:
        """See ``Contender``."""
        reader = join(self._writer.handle, str(index), timeout_s=WAIT_S)
        return lambda: reader.recv(WAIT_S)[0]

    def wait_ready(self) -> None:
        """See ``Contender``."""
        self._writer.wait_ready(WAIT_S)

    def send(self, payload: bytes) -> None:
        """See ``Contender``."""
        self._writer.send(payload, timeout_s=WAIT_S)

    def close(self) -> None:
        """See ``Contender``."""
        self._writer.close()


class XpydViews(Xpyd):
    """xpyd's ring; readers look at the bytes where they are (the first and the last are copied)."""

    def reader(self, index: int) -> Callable[[], bytes]:
        """See ``Contender``."""
        reader = join(self._writer.handle, str(index), timeout_s=WAIT_S)

        def look() -> bytes:
            with reader.take(WAIT_S) as (view,):
                return bytes(view[:8]) + bytes(view[-8:])
        return look


class MessageQueue:
    """vLLM's."""

    def __init__(self, readers: int) -> None:
        self._queue: Any = shm_broadcast.MessageQueue(readers, readers, max_chunk_bytes=CHUNK_BYTES, max_chunks=CHUNKS)
        self._handle = self._queue.export_handle()

    def reader(self, index: int) -> Callable[[], bytes]:
        """See ``Contender``."""
        queue = shm_broadcast.MessageQueue.create_from_handle(self._handle, index)
        queue.wait_until_ready()
        return lambda: bytes(queue.dequeue(timeout=WAIT_S))

    def wait_ready(self) -> None:
        """See ``Contender``."""
        self._queue.wait_until_ready()

    def send(self, payload: bytes) -> None:
        """See ``Contender``."""
        self._queue.enqueue(payload, timeout=WAIT_S)

    def close(self) -> None:
        """See ``Contender``."""
        del self._queue  # its destructor removes the shared memory


class ProcessQueues:
    """multiprocessing.Queue, one for each reader."""

    def __init__(self, readers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._queues = [context.Queue() for _ in range(readers)]

    def reader(self, index: int) -> Callable[[], bytes]:
        """See ``Contender``."""
        queue = self._queues[index]
        return lambda: queue.get(timeout=WAIT_S)

    def wait_ready(self) -> None:
        """Nothing to wait for: the pipes are there."""

    def send(self, payload: bytes) -> None:
        """See ``Contender``."""
        for queue in self._queues:
            queue.put(payload)

    def close(self) -> None:
        """See ``Contender``."""
        for queue in self._queues:
            queue.close()


class Zmq:
    """ZMQ's XPUB and SUB over a unix socket, without limits on their queues, so that nothing is dropped."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._folder = tempfile.mkdtemp(prefix="xpyd-bench-")
        self._socket = zmq.Context().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(f"ipc://{self._folder}/q")

    def reader(self, index: int) -> Callable[[], bytes]:  # noqa: ARG002 (all subscribe alike)
        """See ``Contender``."""
        socket = zmq.Context().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.connect(f"ipc://{self._folder}/q")
        socket.subscribe(b"")
        return socket.recv

    def wait_ready(self) -> None:
        """See ``Contender``."""
        for _ in range(self._readers):
            if not self._socket.poll(int(WAIT_S * 1000)):
                raise TimeoutError("no subscription")
            self._socket.recv()

    def send(self, payload: bytes) -> None:
        """See ``Contender``."""
        self._socket.send(payload, copy=len(payload) < 1 << 16)

    def close(self) -> None:
        """See ``Contender``."""
        self._socket.close(0)
        Path(self._folder, "q").unlink(missing_ok=True)
        os.rmdir(self._folder)


CONTENDERS: dict[str, type[Contender]] = {
    "xpyd": Xpyd, "messagequeue": MessageQueue, "mp_queue": ProcessQueues, "zmq": Zmq, "xpyd_views": XpydViews}
