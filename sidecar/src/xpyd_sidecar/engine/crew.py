"""What the scheduler side says to all its workers, tensor and pipeline ranks alike, beside the orders of a step.

    scheduler side (Crew, a thread)                        worker (Hand, a thread in each)
      handle, with the orders of the first step ──▶          joins
      let_go([transfer, …]) ──▶                              the sender drops copies: a peer is dead, or wants nothing
      duty(role) ──▶                                         memory that the role has no use for goes back
                   ◀── bytes that are still held ──          (asked again and again while the engine drains)

Orders wait for the next step and go with it; these calls do not: while a forward of seconds runs, a dead peer's copies are
let go of and make room. Nothing that has to be in order with steps goes this way. What the thread cannot say, since workers
have not joined yet or one is lost, goes with orders instead.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from xpyd_sidecar.broadcast.errors import Closed, ReaderStuck
from xpyd_sidecar.broadcast.rpc import Group, NoAnswer
from xpyd_sidecar.broadcast.worker import Worker
from xpyd_sidecar.contract import duty
from xpyd_sidecar.contract.duty import Duty
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.engine.place import place
from xpyd_sidecar.errors import XpydError
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Release

logger = logging.getLogger(__name__)

CHUNKS: Final = 16
CHUNK_BYTES: Final = 64 << 10
QUEUE_MAX: Final = 4096
JOIN_S: Final = 60.0
SAY_S: Final = 5.0
"""For workers to take a call, and to answer one: they do nothing in them that takes longer than a moment."""
LOOK_S: Final = 0.5
"""Between looks at what the agent says."""
END_S: Final = 1.0
THREAD_S: Final = 5.0


def name_of(rank: int) -> str:
    """Of a worker."""
    return f"rank {rank}"


class Crew:
    """The scheduler side's end."""

    def __init__(self, places: Sequence[str], *, host: str, key: ServiceKey, run_dir: Path | None,
                 give_back: Callable[[list[Release]], None]) -> None:
        """Make the queue.

        Args:
            places: of each rank; those of another place than this process's are reached over the network.
            host: an address of this host, where they come to.
            key: the service's.
            run_dir: where the agent says what this engine is for.
            give_back: takes what was to be said and could not be; called on the crew's thread.
        """
        names = [name_of(rank) for rank in range(len(places))]
        far = [name for name, one in zip(names, places, strict=True) if one != place()]
        self._group = Group("kv workers", names, remote=far, key=key, chunks=CHUNKS, chunk_bytes=CHUNK_BYTES, listen=host)
        self._run_dir = run_dir
        self._give_back = give_back
        self._asked: queue.Queue[Release | None] = queue.Queue(QUEUE_MAX)
        self._ready = False
        self._stop = threading.Event()
        self._duty: Duty | None = None
        self._held: dict[str, Any] = {}
        self._problem = ""
        self._thread: threading.Thread | None = None

    def handle(self) -> bytes:
        """For the orders of the first step: what workers join with; empty ever after."""
        if self._thread is not None or self._stop.is_set():
            return b""
        self._thread = threading.Thread(target=self._run, name="xpyd-crew", daemon=True)
        self._thread.start()
        return self._group.handle

    def let_go(self, release: Release) -> bool:
        """Have all workers let go of a transfer at once; False: say it with the orders."""
        if not self._ready:
            return False
        try:
            self._asked.put_nowait(release)
        except queue.Full:
            return False
        return self._ready  # where the thread has ended meanwhile it may be said twice, which does no harm

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is None:
            self._group.close(0.0)
            return
        try:
            self._asked.put_nowait(None)
        except queue.Full:
            logger.debug("xpyd: the crew's thread sees the end at its next look")
        self._thread.join(THREAD_S)
        if self._thread.is_alive():
            logger.error("thread %s did not end within %s s", self._thread.name, THREAD_S)

    def _run(self) -> None:
        left: list[Release] = []
        try:
            self._group.wait_ready(JOIN_S)
            self._ready = True
            while not self._stop.is_set() and not self._group.gone:
                self._group.check()
                self._look()
                left = self._take()
                if left:
                    self._group.tell("let_go", [[*one.key, str(one.outcome), one.reason] for one in left], timeout_s=SAY_S)
                    left = []
            for name, reason in self._group.gone.items():
                logger.error("xpyd: worker %s hears no calls any more (%s); it is told with each step", name, reason)
        except (XpydError, OSError, ValueError) as error:
            if not self._stop.is_set():
                logger.warning("xpyd: no calls to workers: %s; they are told with each step", error)
        finally:
            self._ready = False
            while not self._asked.empty():
                left += [one for one in [self._asked.get_nowait()] if one is not None]
            if left:
                self._give_back(left)
            self._close()

    def _close(self) -> None:
        try:
            self._group.close(END_S)
        except ReaderStuck as error:
            logger.info("xpyd: %s", error)

    def _take(self) -> list[Release]:
        try:
            found = [self._asked.get(timeout=LOOK_S)]
        except queue.Empty:
            return []
        while not self._asked.empty() and len(found) < QUEUE_MAX:
            found.append(self._asked.get_nowait())
        return [one for one in found if one is not None]

    def _look(self) -> None:
        """At what the agent says; workers are told of changes, and asked what they hold while the engine drains."""
        if self._run_dir is None:
            return
        try:
            told = duty.read(self._run_dir)
        except (ValueError, OSError) as error:
            if str(error) != self._problem:
                logger.warning("xpyd: %s; workers go on as before", error)
            self._problem = str(error)
            return
        if told is None or (told == self._duty and not told.draining):
            return
        try:
            held = self._group.call("duty", str(told.role), timeout_s=SAY_S)
        except NoAnswer as error:
            logger.warning("xpyd: %s", error)
            return
        by_rank = {name: one for name, one in zip(self._group.workers, held, strict=True) if any(one.values())}
        if told != self._duty or (told.draining and by_rank != self._held):
            logger.info("xpyd: %s of epoch %d%s; workers hold %s", told.role, told.epoch,
                        ", draining" if told.draining else "", by_rank or "nothing")
        self._duty, self._held = told, by_rank


class Hand:
    """A worker's end. Its thread serves the calls; ``let_go`` and ``duty`` are called on it and must be quick."""

    def __init__(self, handle: bytes, rank: int, *, host: str, key: ServiceKey,
                 let_go: Callable[[Key, Outcome, str], None],
                 duty: Callable[[Role], dict[str, int]]) -> None:
        """Join on a thread. ``duty`` answers with bytes that are held, by what."""
        self._let_go, self._duty = let_go, duty
        self._arguments = handle, name_of(rank), host, key
        self._worker: Worker | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xpyd-hand", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(THREAD_S)
        if self._thread.is_alive():
            logger.error("thread %s did not end within %s s", self._thread.name, THREAD_S)

    def _run(self) -> None:
        handle, name, host, key = self._arguments
        methods: dict[str, Callable[..., Any]] = {"let_go": self._released, "duty": self._told}
        try:
            worker = self._worker = Worker(handle, name, timeout_s=JOIN_S, key=key, chunks=CHUNKS, chunk_bytes=CHUNK_BYTES,
                                           listen=host)
        except (XpydError, OSError) as error:
            logger.warning("xpyd: %s cannot be called: %s", name, error)
            return
        try:
            while not self._stop.is_set():
                try:
                    worker.serve_one(methods, LOOK_S)
                except TimeoutError:
                    continue
        except Closed:
            logger.debug("xpyd: %s is called no more", name)
        except (XpydError, OSError) as error:
            if not self._stop.is_set():
                logger.warning("xpyd: %s is called no more: %s", name, error)
        finally:
            worker.close()

    def _released(self, releases: list[list[Any]]) -> None:
        for transfer, attempt, generation, outcome, reason in releases:
            self._let_go(Key(TransferId(transfer), Attempt(attempt), generation), Outcome(outcome), reason)

    def _told(self, role: str) -> dict[str, int]:
        return self._duty(Role(role))
