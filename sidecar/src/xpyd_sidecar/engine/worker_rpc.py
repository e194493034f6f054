"""What the scheduler side says to all its workers, tensor and pipeline ranks alike, beside the orders of a step.

    scheduler side (WorkerRpc, a thread)                   worker (WorkerRpcServer, a thread in each)
      handle, with the orders of the first step ──▶          joins
      let_go([transfer, …]) ──▶                              the publisher drops copies: a peer is dead, or wants nothing
      duty(role) ──▶                                         memory that the role has no use for goes back
                   ◀── bytes that are still held ──          (asked again and again while the engine drains)

Orders wait for the next step and go with it; these calls do not: while a forward of seconds runs, a dead peer's copies are
let go of and make room. Nothing that has to be in order with steps goes this way. What the thread cannot say, since workers
have not joined yet or do not take it, goes with orders instead.

A call that fails on a worker (it raises there, is not taken or not answered in time) is named and ends nothing: ``let_go``
then goes with the orders, ``duty`` is asked again at the next look. A worker that is gone, or has never joined, ends the
thread, and so the engine (``watched``): what it holds is gone with it, and no drain may wait for that.

Of an engine that is one of several members nobody else watches the workers elsewhere, nor they it: there a lost worker also
ends an engine that has nothing to do, and the end of the scheduler side ends a worker, each a moment later (``abandon``).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from xpyd_sidecar.broadcast.errors import QueueClosed, ReaderStuck
from xpyd_sidecar.broadcast.rpc import CallFailed, NoAnswer, WorkerGroup
from xpyd_sidecar.broadcast.worker import Worker
from xpyd_sidecar.contract import duty
from xpyd_sidecar.contract.duty import EngineRole
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import PeerError, PeerGone
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Release
from xpyd_sidecar.process.host_identity import place
from xpyd_sidecar.threads.watched import WatchedThread

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
GONE_S: Final = 10.0
"""Between the end of a worker and that of the engine, where it is meant."""
MEMBER_GONE_S: Final = 2.0
"""The same between members, where no more is meant than that all of them end."""
THREAD_S: Final = 5.0


def name_of(rank: int) -> str:
    """The name of a worker."""
    return f"rank {rank}"


class WorkerRpc:
    """The scheduler side's end."""

    def __init__(self, places: Sequence[str], *, host: str, key: ServiceKey, run_dir: Path | None,
                 give_back: Callable[[list[Release]], None], abandon: Callable[[], None] | None = None) -> None:
        """Make the queue.

        Args:
            places: of each rank; those of another place than this process's are reached over the network.
            host: an address of this host, where they come to.
            key: the service's.
            run_dir: where the agent says what this engine is for.
            give_back: takes what was to be said and could not be; called on the crew's thread.
            abandon: ends this process; None where vLLM watches all workers, and ends the engine with them.
        """
        names = [name_of(rank) for rank in range(len(places))]
        far = [name for name, one in zip(names, places, strict=True) if one != place()]
        self._group = WorkerGroup("kv workers", names, remote=far, key=key, chunks=CHUNKS, chunk_bytes=CHUNK_BYTES,
                                  listen=host)
        self._run_dir = run_dir
        self._give_back = give_back
        self._asked: queue.Queue[Release | None] = queue.Queue(QUEUE_MAX)
        self._ready = False
        self._stop = threading.Event()
        self._duty: EngineRole | None = None
        self._held: dict[str, Any] = {}
        self._problems: dict[str, str] = {}
        """By call: how it has last failed, so that what fails again and again is said once."""
        self._gone_s = GONE_S if abandon is None else MEMBER_GONE_S
        self.thread = WatchedThread("xpyd-crew", self._run, abandon)

    def handle(self) -> bytes:
        """For the orders of the first step: what workers join with; empty ever after."""
        if self.thread.ident is not None or self._stop.is_set():
            return b""
        self.thread.start()
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
        """End the thread of the calls."""
        self._stop.set()
        if self.thread.ident is None:
            self._group.close(0.0)
            return
        try:
            self._asked.put_nowait(None)
        except queue.Full:
            logger.debug("xpyd: the crew's thread sees the end at its next look")
        self.thread.end(THREAD_S)

    def _run(self) -> None:
        left: list[Release] = []
        try:
            self._group.wait_ready(JOIN_S)
            self._ready = True
            while not self._stop.is_set():
                self._check()
                self._look()
                left = self._take(LOOK_S)
                self._tell(left)
                left = []
        except PeerGone as error:
            self._ready = False
            logger.error("xpyd: %s", error)  # noqa: TRY400  # its words say all
            if not self._stop.wait(self._gone_s):  # an engine that is told to end ends its workers first
                raise
        finally:
            self._ready = False
            left += self._take(0.0)
            if left:
                self._give_back(left)
            self._close()

    def _check(self) -> None:
        self._group.check()
        for name, reason in self._group.gone.items():
            raise PeerGone(f"worker {name}", reason)

    def _tell(self, releases: list[Release]) -> None:
        if not releases:
            return
        try:
            self._group.tell("let_go", [[*one.key, str(one.outcome), one.reason] for one in releases], timeout_s=SAY_S)
        except (ReaderStuck, OSError) as error:  # nobody got it
            self._failed("let_go", f"{error}; it goes with the next step")
            self._give_back(releases)
        else:
            self._problems.pop("let_go", None)

    def _failed(self, call: str, problem: str) -> None:
        if self._problems.get(call) != problem:
            logger.warning("xpyd: %s", problem)
        self._problems[call] = problem

    def _close(self) -> None:
        try:
            self._group.close(END_S)
        except ReaderStuck as error:
            logger.info("xpyd: %s", error)

    def _take(self, seconds: float) -> list[Release]:
        try:
            found = [self._asked.get(timeout=seconds)]
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
            self._failed("read", f"{error}; workers go on as before")
            return
        self._problems.pop("read", None)
        if told is None or (told == self._duty and not told.draining):
            return
        held = self._asked_all(told)
        if held is None:
            return
        by_rank = {name: one for name, one in held.items() if any(one.values())}
        if told != self._duty or (told.draining and by_rank != self._held):
            logger.info("xpyd: %s of epoch %d%s; workers hold %s", told.role, told.epoch,
                        ", draining" if told.draining else "", by_rank or "nothing")
        self._duty, self._held = told, by_rank

    def _asked_all(self, told: EngineRole) -> dict[str, Any] | None:
        """What each worker holds; None: not all of them have said so, and they are asked again."""
        end = time.monotonic() + SAY_S
        try:
            found = self._group.start("duty", str(told.role), timeout_s=SAY_S).outcomes(max(end - time.monotonic(), 0.0))
        except (NoAnswer, ReaderStuck, OSError) as error:
            self._failed("duty", f"{error}; workers are asked again")
            return None
        failed = [f"worker {one}" for one in found.values() if isinstance(one, CallFailed)]
        for one in found.values():
            if isinstance(one, PeerGone):
                raise PeerGone(f"worker {one.peer}", one.reason)
        if failed:
            self._failed("duty", f"{'; '.join(failed)}; workers are asked again")
            return None
        self._problems.pop("duty", None)
        return found


class WorkerRpcServer:
    """A worker's end. Its thread serves the calls; ``let_go`` and ``duty`` are called on it and must be quick."""

    def __init__(self, handle: bytes, rank: int, *, host: str, key: ServiceKey,
                 let_go: Callable[[Key, Outcome, str], None],
                 duty: Callable[[Role], dict[str, int]], abandon: Callable[[], None] | None = None) -> None:
        """Join on a thread. ``duty`` answers with bytes that are held, by what; ``abandon``: as for ``WorkerRpc``."""
        self._let_go, self._duty = let_go, duty
        self._arguments = handle, name_of(rank), host, key
        self._stop = threading.Event()
        self._alone = abandon is None
        self.thread = WatchedThread("xpyd-hand", self._run, abandon)
        self.thread.start()

    def stop(self) -> None:
        """End the thread that answers calls."""
        self._stop.set()
        self.thread.end(THREAD_S)

    def _run(self) -> None:
        handle, name, host, key = self._arguments
        methods: dict[str, Callable[..., Any]] = {"let_go": self._released, "duty": self._told}
        worker: Worker | None = None
        try:
            worker = Worker(handle, name, timeout_s=JOIN_S, key=key, chunks=CHUNKS, chunk_bytes=CHUNK_BYTES, listen=host)
            while not self._stop.is_set():
                try:
                    worker.serve_one(methods, LOOK_S)
                except TimeoutError:
                    continue
        except QueueClosed:
            logger.debug("xpyd: %s is called no more", name)
            if not self._alone and not self._stop.wait(MEMBER_GONE_S):
                raise PeerGone("scheduler side", "it has ended, and its workers with it") from None
        except (PeerError, OSError):
            if not self._stop.is_set():  # else the scheduler side has ended before
                raise
        finally:
            if worker is not None:
                worker.close()

    def _released(self, releases: list[list[Any]]) -> None:
        for transfer, attempt, generation, outcome, reason in releases:
            self._let_go(Key(TransferId(transfer), Attempt(attempt), generation), Outcome(outcome), reason)

    def _told(self, role: str) -> dict[str, int]:
        return self._duty(Role(role))
