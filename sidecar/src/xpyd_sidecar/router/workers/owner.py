"""A router of several processes: this one owns membership, the others serve clients.

    agents ── heartbeats ──▶ owner ══ Unix sockets ══ worker 1 … N ◀── clients (SO_REUSEPORT shares one port among them)

Laws
  * The owner never waits for a worker. One that does not read is told no more, and gets the roster as it is once it reads
    again; one that gives no sign of life for ``SILENT_S`` is killed and started again.
  * A worker's end costs its own requests alone. Its open legs are counted no more: engines see the connections break.
  * Whatever ends the owner ends the workers (they see their socket close).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
from collections import deque
from typing import cast

import msgspec

from xpyd_sidecar.contract.ids import InstanceName, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.errors import ConfigError, SidecarError
from xpyd_sidecar.patience import within
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.app import RouterProcess
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, ReplyConnection
from xpyd_sidecar.router.observing.metrics import Vitals
from xpyd_sidecar.router.workers import link as li
from xpyd_sidecar.router.workers.poison_sharing import OwnerPoison
from xpyd_sidecar.router.workers.sharing import LegCounts, reserve, share

logger = logging.getLogger(__name__)

START_S = 60.0
"""How long workers may take to listen."""
MAX_UNREAD = 4 << 20
"""Bytes that a worker may leave unread before it is told no more."""
READ_AGAIN = 64 << 10
SILENT_S = 15.0
RETRY_S = 5.0
"""Until a worker that the system would not start is tried again."""
MARGIN_S = 5.0
"""What workers get beyond their drain."""
DEATHS, DEATHS_S = 20, 60.0
"""So many ends of workers within this time end the router: whoever started it sees it, and starts it again."""


class _Worker(msgspec.Struct, eq=False):
    """One worker as the owner sees it."""

    number: int
    process: asyncio.subprocess.Process
    link: li.WorkerLink[li.Up]
    heard_at: float
    listening: bool = False
    behind: bool = False
    """It does not read, and is told no more."""
    report: li.WorkerReport = msgspec.field(default_factory=li.WorkerReport)
    """The latest one."""
    vitals: Vitals | None = None

    @property
    def runs(self) -> bool:
        """Whether its process has not ended."""
        return self.process.returncode is None


class _Caught(Reply, kw_only=True):
    """An answer for a worker's client, whose connection is there."""

    ask: li.AskOwner
    link: li.WorkerLink[li.Up]

    @property
    def private(self) -> bool:
        """As the worker sees the connection."""
        return self.ask.private

    def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A complete answer."""
        self.started = self.done = True
        self.link.send(li.OwnerAnswer(self.ask.number, status, headers, body))


class OwnerRouter(RouterProcess):
    """Membership, and the workers."""

    def __init__(self, config: SidecarConfig, key: ServiceKey) -> None:
        super().__init__(config, key)
        self._whole_config = config
        self._loop = self.context.loop
        self._workers: dict[int, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reserved: socket.socket | None = None
        self._index = 0
        self._unsent: list[bytes] = []
        self._names: set[InstanceName] = set()
        self._legs = LegCounts()
        self._stopping = False
        self._deaths: deque[float] = deque()
        self._changed = asyncio.Event()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.context.observer.metrics.queued = lambda: sum(one.queued for one in self._reports())
        self.context.observer.metrics.retries_left = lambda: sum(one.retries_left for one in self._reports())
        self.context.watch.told = self._told
        self.context.watch.on_lost = self.context.watch.on_leaving = self._tell
        self._poison = OwnerPoison(self._loop, self.context.roster, self._tell, self._give_turn)
        self._poison.held_elsewhere = lambda: sum(one.held for one in self._reports())
        self.context.poison = self._poison
        self.context.watch.on_verdict = self._poison.judged
        self.context.observer.metrics.poison = self._poison.counts

    def processes(self) -> dict[str, Vitals]:
        """All processes of the router, by the number of the worker."""
        own = super().processes()
        return own | {str(worker.number): worker.vitals for worker in self._workers.values() if worker.vitals is not None}

    def _reports(self) -> list[li.WorkerReport]:
        return [worker.report for worker in self._workers.values()]

    # ---- start and end

    async def _open(self) -> None:
        self._join()
        self._reserved = reserve(self._config.host, self._config.port)
        self.port = int(self._reserved.getsockname()[1])
        count = self._config.workers
        for number in range(1, count + 1):
            await self._start(number)
        try:
            async with within(START_S):
                while not all(worker.listening for worker in self._workers.values()) or len(self._workers) < count:
                    if self.failed.done():
                        self.failed.result()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise SidecarError(f"workers did not listen within {START_S:g} s") from None
        logger.info("workers listen", extra={"workers": count})

    async def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()

        def on_message(message: li.Up) -> None:
            self._on_message(worker, message)

        link: li.WorkerLink[li.Up] = li.WorkerLink(li.Up, on_message)  # type: ignore[arg-type]
        try:
            with theirs:
                tls = [] if self._config.tls_cert_file is None else ["tls"]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "xpyd_sidecar.router.workers.worker", str(theirs.fileno()), *tls,
                    pass_fds=(theirs.fileno(),))
            await self._loop.create_unix_connection(lambda: link, sock=ours)
        except OSError:
            ours.close()
            raise
        worker = _Worker(number, process, link, self._loop.time() + START_S - SILENT_S)  # it says nothing before it is told
        self._flush()  # what is told already is in its beginning
        self._workers[number] = worker
        self._legs.begin(number)
        whole = self._whole_config.router  # not what this process's files allow: workers have files of their own
        assert whole is not None
        config = msgspec.structs.replace(self._whole_config, agent=None, router=share(whole, self._config.workers))
        link.send(li.BeginWorker(config, number, self._config.host, self.port, self.context.started, self._roster(),
                                 self.server.turned_away))
        link.send(self._poison.evidence())
        if self._stopping:
            link.send(li.StopWorker())
        task = self._loop.create_task(self._watch_over(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_over(self, worker: _Worker) -> None:
        code = await worker.process.wait()
        worker.link.close()
        with contextlib.suppress(TimeoutError):
            async with within(1.0):  # what it said last may still be on its way
                await worker.link.ended
        self._legs.end(worker.number)
        worker.report, worker.vitals, worker.listening = li.WorkerReport(), None, False
        self._poison.left(worker.number)
        self._recount()
        self._changed.set()
        if self._stopping or self.failed.done():
            return
        now = self._loop.time()
        self._deaths.append(now)
        while now - self._deaths[0] > DEATHS_S:
            self._deaths.popleft()
        logger.error("a worker ended with code %s: starting it again", code, extra={"worker": worker.number})
        if len(self._deaths) >= DEATHS:
            self._fail(SidecarError(f"workers ended {DEATHS} times within {DEATHS_S:g} s"))
            return
        await asyncio.sleep(min(5.0, 0.05 * 2 ** min(10, len(self._deaths) - 1)))
        while not self._stopping:
            try:
                await self._start(worker.number)
            except OSError as error:
                logger.error("a worker cannot be started: %s", error, extra={"worker": worker.number})  # noqa: TRY400
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
        self._changed.set()

    def turn_away(self, away: bool) -> None:
        """Send clients elsewhere, or take that back."""
        super().turn_away(away)
        self._tell(li.Away(away))

    async def stop(self) -> None:
        """Let every worker drain, then end."""
        self._stopping = self.context.draining = True
        self._tell(li.StopWorker())
        if self._reserved is not None:
            self._reserved.close()
        limit = self._config.listen_on_s + self._config.drain_timeout_s + MARGIN_S
        with contextlib.suppress(TimeoutError):
            async with within(limit):
                await asyncio.gather(*(worker.process.wait() for worker in self._workers.values()))
        await self.end()

    async def end(self) -> None:
        """Close everything now."""
        self._stopping = True
        for worker in self._workers.values():
            if worker.runs:
                worker.process.kill()
        for task in list(self._tasks):
            if not any(worker.runs for worker in self._workers.values()):
                task.cancel()
        with contextlib.suppress(TimeoutError):
            async with within(MARGIN_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reserved is not None:
            self._reserved.close()
        if not self.failed.done():
            self.failed.cancel()
        await super().end()

    async def wait_failed(self) -> None:
        """Wait for workers that cannot be kept running; raises what is wrong."""
        await asyncio.shield(self.failed)

    # ---- to the workers

    def _tell(self, message: li.Down) -> None:
        # Heartbeats come in batches: what one turn of the loop tells leaves in one write.
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(li.frame(message))

    def _flush(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        if not data:
            return
        for worker in self._workers.values():
            if not worker.behind:
                worker.link.send(data)
                worker.behind = worker.link.backlog > MAX_UNREAD

    def _roster(self) -> li.RosterTold:
        """As it is now."""
        return li.RosterTold(self._index, sorted(self.context.roster.members(), key=lambda member: member.beat_at), None)

    def _told(self, of: InstanceName | None) -> None:
        """The roster has heard of an instance; None: time went on."""
        roster = self.context.roster
        member = None if of is None else roster.known(of)
        if member is not None:
            self._names.add(member.name)
            gone: list[InstanceName] = []
        else:
            gone = sorted(self._names - {one.name for one in roster.members()})
            self._names.difference_update(gone)
            if not gone:
                return
        self._index += 1
        if member is not None:
            key = member.name, member.incarnation
            if member.state is State.DRAINING:
                self._legs.drains(key, self._index)
            else:
                self._legs.serves(key)
            member.in_flight = self._legs.of(key)
        self._tell(li.RosterTold(self._index, [] if member is None else [member], gone))

    def _give_turn(self, number: int, turn: li.SuspectTurn) -> None:
        self._flush()  # it must know what it was told before
        worker = self._workers.get(number)
        if worker is not None:
            worker.link.send(turn)

    def _recount(self) -> None:
        for member in self.context.roster.members():
            member.in_flight = self._legs.of((member.name, member.incarnation))
        self._level()

    def _level(self) -> None:
        self.context.observer.metrics.in_flight = sum(one.in_flight for one in self._reports())

    # ---- from the workers

    def _on_message(self, worker: _Worker, message: li.Up) -> None:
        if self._workers.get(worker.number) is not worker:
            return  # it has ended, and another has its number
        worker.heard_at = self._loop.time()
        match message:
            case li.WorkerReport():
                self._on_report(worker, message)
            case Vitals():
                worker.vitals = message
            case li.LegVerdict(instance=instance, incarnation=incarnation, reason=reason):
                now, roster = self._loop.time(), self.context.roster
                self.context.watch.take(instance, roster.on_doubt(now, instance, incarnation) if reason is None else
                                        roster.on_refused(now, instance, incarnation, reason))
            case li.AskOwner():
                self._on_ask(worker, message)
            case li.Broke() | li.EndedWell() | li.WantsTurn():
                self._poison.on_message(worker.number, message)
            case li.Listening():
                worker.listening = True
                self._changed.set()
            case li.WorkerFailed(reason=reason):
                self._fail(ConfigError(reason))

    def _on_report(self, worker: _Worker, report: li.WorkerReport) -> None:
        observer, roster = self.context.observer, self.context.roster
        for key in self._legs.report(worker.number, report.applied, report.legs):
            member = roster.find(*key)
            if member is not None:
                member.in_flight = self._legs.of(key)
        for what in ("opened", "closed", "refused", "passed", "audited"):
            for of in getattr(report, what):
                getattr(observer, what)(*of)
        worker.report = report
        self._level()

    def _on_ask(self, worker: _Worker, ask: li.AskOwner) -> None:
        request = HttpRequest(ask.method, ask.path, ask.headers, b"", ask.request_id, judged=True)
        reply = _Caught(cast("ReplyConnection", None), ask.request_id, ask=ask, link=worker.link)
        try:
            self.paths.own(request, reply)
        except HttpFault as fault:
            reply.fault(fault)
        except Exception:
            # A bug here must cost one answer, not the link to a worker, and with that the worker.
            logger.exception("a request failed inside the router", extra={"path": ask.path})
            reply.fault(HttpFault(500, "the router failed; its log says why", kind="internal_error", code="internal"))

    # ---- time

    def _turn(self) -> None:
        """Called every second."""
        now = self._loop.time()
        for worker in self._workers.values():
            link = worker.link
            if not worker.runs:
                continue
            if worker.behind and link.backlog < READ_AGAIN:
                self._flush()
                worker.behind = False
                link.send(self._roster())
                link.send(self._poison.evidence())
            if now - max(worker.heard_at, self.awake) > SILENT_S:
                logger.error("a worker gives no sign of life: killing it", extra={"worker": worker.number})
                worker.heard_at = math.inf
                worker.process.kill()
        self._legs.keep({(member.name, member.incarnation) for member in self.context.roster.members()})
