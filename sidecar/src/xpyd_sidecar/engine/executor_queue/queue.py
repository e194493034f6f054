"""The two ends of a broadcast queue, with the methods of vLLM's ``MessageQueue``.

    executor    ExecutorWriter(world, local, …)            worker      create_from_handle(handle, rank)
                export_handle() ── pickled, by vLLM ──▶
                … all workers are made …
                wait_until_ready() ◀── joins ──                        wait_until_ready()
                enqueue(call) ──▶                                      dequeue()

vLLM makes a reader long before its writer looks for it, so a reader joins in ``wait_until_ready``. Readers have the names
``rank N``; N is the rank in the group that the queue belongs to, whose writer, where it is one of the group, is rank 0.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import msgspec

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.errors import NothingCame, QueueClosed, ReadCancelled
from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import LocalReader, RemoteReader, join
from xpyd_sidecar.engine.compat import log_like_vllm
from xpyd_sidecar.engine.executor_queue.compat import MessageQueue, get_ip
from xpyd_sidecar.engine.executor_queue.pickles import dumps, loads
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings
from xpyd_sidecar.engine.executor_queue.watch import LOOK_S, ReaderWatch
from xpyd_sidecar.errors import AuthError, OurFault, PeerGone

logger = logging.getLogger(__name__)

WAIT_S: Final = 1800.0
"""For all readers to join, and for room for a message where vLLM says no time: an engine may take so long to start."""
SAY_S: Final = 60.0
"""How often a long wait is said."""
MESSAGE_MAX: Final = 4 << 30
"""Bytes of one call or answer: a message of a weight update may be large."""
CHUNK_BYTES: Final = 24 << 20
CHUNKS: Final = 10
CLOSE_S: Final = 1.0


class QueueHandle(msgspec.Struct, frozen=True):
    """What a reader is made from; vLLM pickles it, and reads the first two fields."""

    local_reader_ranks: list[int]
    remote_subscribe_addr: str | None
    raw: bytes


class ExecutorWriter:
    """The writer's end; also in the place of vLLM's class, with its ways to make queues for a group of processes."""

    settings: ClassVar[QueueSettings] = QueueSettings()

    def __init__(self, n_reader: int, n_local_reader: int, local_reader_ranks: list[int] | None = None, *,
                 max_chunk_bytes: int = CHUNK_BYTES, max_chunks: int = CHUNKS, connect_ip: str | None = None,
                 enable_shm_tensor_arena: bool = False) -> None:
        """As vLLM's; tensors go beside the pickle in any case.

        ``local_reader_ranks`` is given where the readers are the others of a group of processes.

        Raises:
            ConfigError: readers are elsewhere and there is no key, or the address cannot be listened on.
        """
        ranks = range(n_reader) if local_reader_ranks is None else range(1, n_reader + 1)
        local = list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks
        self._lock = threading.Lock()
        self._over = False
        self._watch: ReaderWatch | None = None
        self._silent: tuple[str, ...] = ()
        self._looked = 0.0
        host = (self.settings.host or connect_ip or get_ip()) if n_reader > n_local_reader else "127.0.0.1"
        self._writer = Writer("executor", local=[name_of(rank) for rank in local],
                              remote=[name_of(rank) for rank in ranks if rank not in local], chunks=max_chunks,
                              chunk_bytes=max_chunk_bytes, message_max=MESSAGE_MAX, listen=host, key=self.settings.key)
        known = wire.read_handle(self._writer.handle)
        self.handle = QueueHandle(list(local), known.endpoint or None, self._writer.handle)
        weakref.finalize(self, _closed, self._writer.close, os.getpid()).atexit = False
        _writers.add(self._writer)

    def export_handle(self) -> QueueHandle:
        """The handle by which readers join."""
        return self.handle

    def wait_until_ready(self) -> None:
        """Until all readers have joined.

        Raises:
            PeerGone: some did not in time; the message names them.
            RuntimeError: the queue was shut down.
        """
        end = time.monotonic() + WAIT_S
        while (missing := self._missing()) and time.monotonic() < end:
            logger.debug("xpyd: %s did not join yet", missing)
        if missing:
            raise PeerGone(missing, f"did not join the executor's queue within {WAIT_S:g} s")

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader.

        Raises:
            PeerGone: a reader is lost.
            TimeoutError: readers that live did not make room in time (None: ``WAIT_S``); the error names them.
            RuntimeError: the queue was shut down.
        """
        parts = dumps(obj)
        with self._lock:
            self._check()
            self._writer.send(*parts, timeout_s=WAIT_S if timeout is None else timeout, while_waiting=self._waiting)
            self._check()

    def broadcast_object(self, obj: Any = None) -> Any:
        """The writer's part of it."""
        self.enqueue(obj)
        return obj

    def shutdown(self) -> None:
        """No more messages; from any thread."""
        self._over = True
        if self._watch is not None:
            self._watch.stop()
        if self._lock.acquire(timeout=CLOSE_S):  # else the thread that waits in it sees ``_over``
            try:
                self._writer.close()
            finally:
                self._lock.release()

    def watch(self, lost: Callable[[str, str], None]) -> None:
        """Look after the readers from now on; ``lost`` is called once, with a name and the reason, on another thread."""
        self._watch = ReaderWatch(self, lost)

    def lost_readers(self) -> dict[str, str] | None:
        """Readers that are lost, and why; None where a sender looks for them itself just now."""
        if self._over or not self._lock.acquire(blocking=False):
            return None
        try:
            self._look()
            return dict(self._writer.lost)
        finally:
            self._lock.release()

    @property
    def silent(self) -> tuple[str, ...]:
        """Readers that were stopped or cut off at the last look, and not lost."""
        return self._silent

    def _missing(self) -> str:
        """Readers that have not joined after a moment, by name."""
        with self._lock:
            self._check()
            try:
                self._writer.wait_ready(LOOK_S)
            except PeerGone as error:
                return error.peer
        return ""

    def _look(self) -> None:
        self._writer.check()
        before, self._silent = self._silent, self._writer.silent()
        for name in self._silent:
            if name not in before:
                logger.warning("xpyd: worker %s is silent: its process is stopped, or it is cut off", name)
        for name in before:
            if name not in self._silent and name not in self._writer.lost:
                logger.info("xpyd: worker %s is heard again", name)

    def _waiting(self) -> None:
        if self._over:
            raise RuntimeError("cancelled")
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look()
            self._check()

    def _check(self) -> None:
        if self._over:
            raise RuntimeError("cancelled")
        for name, reason in self._writer.lost.items():
            raise PeerGone(f"worker {name}", reason)

    @staticmethod
    def create_from_handle(handle: QueueHandle, rank: int) -> ExecutorReader:
        """The reader of a rank; -1: the only one that is elsewhere."""
        return ExecutorReader(handle, rank, ExecutorWriter.settings)

    @staticmethod
    def create_from_process_group(pg: Any, max_chunk_bytes: int, max_chunks: int, writer_rank: int = 0,
                                  **more: Any) -> Any:
        """Make vLLM's own queue for a group of processes, of the methods here. Raises OurFault for another writer
        than rank 0.
        """
        if writer_rank != 0:
            raise OurFault(f"a queue of a group of processes whose writer is rank {writer_rank}, not 0")
        return MessageQueue.create_from_process_group(pg, max_chunk_bytes, max_chunks, writer_rank, **more)

    create_from_process_group_single_reader = staticmethod(MessageQueue.create_from_process_group_single_reader)


class ExecutorReader:
    """A worker's end of the executor's queue."""

    def __init__(self, handle: QueueHandle, rank: int, settings: QueueSettings) -> None:
        """Not joined yet (``wait_until_ready``).

        Raises:
            AuthError: the handle is for a reader elsewhere and says that nobody has to show a key.
            ProtocolError: it is no handle.
            Incompatible: it is of another version.
        """
        self.handle = handle
        self._key = settings.key
        known = wire.read_handle(handle.raw)
        self._name = known.remote[0] if rank < 0 and len(known.remote) == 1 else name_of(rank)
        if self._name in known.remote and not known.secure:
            raise AuthError(f"writer of {known.queue}", "its handle says that it asks for no key: nothing that comes from "
                            "another host is taken without")
        self._over = False
        self._reader: LocalReader | RemoteReader | None = None

    def export_handle(self) -> QueueHandle:
        """What it was made from."""
        return self.handle

    def wait_until_ready(self) -> None:
        """Join.

        Raises:
            PeerGone: the writer has ended, lets nobody in, or does not hold the same key.
            AuthError: it refuses.
        """
        log_like_vllm("xpyd_sidecar")
        self._reader = reader = join(self.handle.raw, self._name, timeout_s=WAIT_S, key=self._key)
        weakref.finalize(self, _closed, reader.close, os.getpid()).atexit = False

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object; with no ``timeout``, for as long as the writer lives.

        Raises:
            TimeoutError: nothing came in time.
            PeerGone: the writer has ended.
            RuntimeError: ``shutdown`` was called, here or at the writer.
        """
        reader = self._reader
        if reader is None:
            raise OurFault("a queue is read before it was joined (wait_until_ready)")
        while not self._over:
            try:
                with reader.take(SAY_S if timeout is None else timeout) as parts:
                    return loads(parts)
            except (ReadCancelled, QueueClosed):
                break
            except NothingCame:
                if timeout is not None:
                    raise
                if not indefinite:
                    logger.info("xpyd: nothing has come from the executor's other end for %g s; it lives", SAY_S)
        raise RuntimeError("cancelled")

    def broadcast_object(self, obj: Any = None) -> Any:
        """A reader's part of it."""
        return self.dequeue()

    def shutdown(self) -> None:
        """Have whoever waits go on; from any thread."""
        self._over = True
        if self._reader is not None:
            self._reader.cancel()


def name_of(rank: int) -> str:
    """The name of a worker's reader in the queue."""
    return f"rank {rank}"


def _closed(close: Callable[[], None], pid: int) -> None:
    """Close what nobody uses any more; what a forked process has of it is not its own."""
    if os.getpid() == pid:
        close()


def _forked(writers: Sequence[Writer]) -> None:
    for writer in writers:
        writer.after_fork()


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: _forked(list(_writers)))
