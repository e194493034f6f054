"""``python -m xpyd_sidecar.router.workers.worker FD [tls]``: one of several processes that serve clients for one router.

    owner ══ Unix socket FD ══ worker: Server (SO_REUSEPORT), Context, a replica of the roster

Its roster follows the owner's; what its requests find out goes to the owner, and so do their records (``Reports``), of
which the owner makes metrics, history and ``/fleet``.

The owner's end is the worker's: without membership it would serve from a roster that grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sys
from functools import partial

from xpyd_sidecar import logs
from xpyd_sidecar.contract import timeline
from xpyd_sidecar.contract.ids import State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.patience import Alarm, within
from xpyd_sidecar.router.api import faults
from xpyd_sidecar.router.app import RouterProcess, leave_garbage
from xpyd_sidecar.router.endpoints.application import RENDERED_S, Paths
from xpyd_sidecar.router.fleet.member import EngineTarget, InstanceLeaves, InstanceLost
from xpyd_sidecar.router.fleet.watch import FleetWatch
from xpyd_sidecar.router.http.auth import Admin, ClientKeys
from xpyd_sidecar.router.http.reply import HttpRequest, LaterReply, Reply, RequestHandler
from xpyd_sidecar.router.relay.loop import run
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.workers import link as li
from xpyd_sidecar.router.workers.poison_sharing import WorkerPoison
from xpyd_sidecar.router.workers.sharing import Key

logger = logging.getLogger(__name__)

ASKED = frozenset({"/metrics", "/fleet", timeline.PATH, "/dashboard/data"})
"""Paths that the owner answers, for all workers together."""
ASK_S = 5.0
FLUSH_S = 0.02
"""How long a report waits for more."""
MAX_UNSENT = 16 << 20
"""Bytes that the owner may leave unread before records are dropped."""


class Reports:
    """Collects what the owner must hear of, and sends it in few frames."""

    def __init__(self, context: WorkerContext, link: li.WorkerLink[li.Down]) -> None:
        self._context = context
        self._link = link
        self._timer: asyncio.Handle | None = None
        self._legs: dict[Key, int] = {}
        """Open ones as the owner was told."""
        self._report = li.WorkerReport()
        self.applied = 0

    def tell(self, what: str, *of: object) -> None:
        """The observer heard of something (``RouterObserver.told``); dropped while the owner does not read."""
        if what == "opened" or self._link.backlog < MAX_UNSENT:
            getattr(self._report, what).append(of)
        self.soon()

    def soon(self) -> None:
        """Something is to be said."""
        if self._timer is None:
            self._timer = self._context.loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Say it now; also a sign of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        context, report = self._context, self._report
        self._report = li.WorkerReport()
        report.applied, report.in_flight = self.applied, context.observer.metrics.in_flight
        report.queued, report.held = len(context.line), len(context.poison)
        report.retries_left = context.budget.left(context.loop.time())
        legs = {(one.name, one.incarnation): one.in_flight for one in context.roster.members() if one.in_flight}
        changed = {key for key, _ in legs.items() ^ self._legs.items()}
        report.legs, self._legs = [(*key, legs.get(key, 0)) for key in changed], legs
        self._link.send(report)


class RosterFollower(FleetWatch):
    """Keeps a replica, which follows the owner's roster; verdicts of the data path go there. Never probes."""

    link: li.WorkerLink[li.Down]

    def suspect(self, target: EngineTarget, reason: str) -> None:
        """A connection was refused: suspend it here at once."""
        instance, incarnation = target.instance, target.incarnation
        member = self.roster.find(instance, incarnation)
        if member is not None:
            self.roster.on_refused(self._loop.time(), instance, incarnation, reason)
            member.suspected = True
        self.link.send(li.LegVerdict(instance, incarnation, reason))

    def doubt(self, target: EngineTarget) -> None:
        """Let the owner ask whether it lives."""
        self.link.send(li.LegVerdict(target.instance, target.incarnation))

    def tick(self) -> None:
        """Time is the owner's."""


class WorkerContext(RequestContext):
    """What the requests of one worker share."""

    def __init__(self, config: SidecarConfig, link: li.WorkerLink[li.Down], started: float) -> None:
        super().__init__(config)
        router = self.config
        self.reports = Reports(self, link)
        self.observer.told = self.reports.tell
        self.started = started
        follower = RosterFollower(self.roster, self.servings.lost, self.observer.changed, self.observer.probed)
        follower.link = link
        self.watch = follower
        self.shared = self.poison = WorkerPoison(self.loop, self.roster, link.send)
        self.roster.begin(started, router.heartbeat_s + router.resolve_s, beside_engine=router.beside_engine)

    def leg_opened(self, target: EngineTarget) -> None:
        """Count a leg."""
        self.reports.soon()
        super().leg_opened(target)

    def leg_closed(self, target: EngineTarget) -> None:
        """The leg ended."""
        self.reports.soon()
        super().leg_closed(target)


class WorkerPaths(Paths):
    """The paths of a worker: what is of all workers together is asked of the owner."""

    link: li.WorkerLink[li.Down]

    def __init__(self, context: RequestContext, client_keys: ClientKeys, admin: Admin) -> None:
        super().__init__(context, client_keys, admin)
        self._loop = context.loop
        self._asked: dict[int, list[LaterReply]] = {}
        """Who waits for the answer to a question, by its number."""
        self._number = 0
        self._metrics_asked = 0
        """The number of the latest question for metrics, to which others that come meanwhile are added."""
        self._metrics_answer: li.OwnerAnswer | None = None

    def own(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        """Answer a request, which was judged, that is the router's own. Raises HttpFault."""
        if request.path not in ASKED:
            return super().own(request, reply)
        shared = request.path == "/metrics"
        if shared and self._metrics_answer is not None and self._loop.time() < self._metrics_until:
            answer = self._metrics_answer
            reply.whole(answer.status, answer.headers, answer.body)
            return None
        number = self._metrics_asked
        if not shared or number not in self._asked:
            number = self._ask(request, private=reply.private)
            if shared:
                self._metrics_asked = number
        waiting = LaterReply(reply)
        self._asked[number].append(waiting)
        return waiting

    def _ask(self, request: HttpRequest, *, private: bool) -> int:
        self._number += 1
        self._asked[self._number] = []
        Alarm(self._loop, self._loop.time() + ASK_S, partial(self._answered, self._number, None))
        self.link.send(li.AskOwner(
            self._number, request.method, request.path, request.headers, request.request_id, private))
        return self._number

    def answer(self, answer: li.OwnerAnswer) -> None:
        """The owner has answered."""
        self._answered(answer.number, answer)

    def _answered(self, number: int, answer: li.OwnerAnswer | None) -> None:
        asked = self._asked.pop(number, [])
        if asked and number == self._metrics_asked and answer is not None:
            self._metrics_answer, self._metrics_until = answer, self._loop.time() + RENDERED_S
        for waiting in asked:
            if waiting.gone:
                continue
            if answer is None:
                waiting.reply.fault(faults.unavailable("the process that owns membership does not answer"))
            else:
                waiting.reply.whole(answer.status, answer.headers, answer.body)


class WorkerRouter(RouterProcess):
    """A router without membership of its own."""

    def __init__(self, begin: li.BeginWorker, link: li.WorkerLink[li.Down]) -> None:
        self._begin = begin
        self._link = link
        # Nobody but the owner knows the service's key, and it alone checks what is secured with it.
        super().__init__(begin.config, ServiceKey(secrets.token_bytes(32)))

    def _make_context(self, config: SidecarConfig) -> RequestContext:
        self.worker = WorkerContext(config, self._link, self._begin.started)
        return self.worker

    def _make_paths(self, client_keys: ClientKeys, admin: Admin) -> Paths:
        paths = WorkerPaths(self.context, client_keys, admin)
        paths.link = self._link
        self._asking = paths
        return paths

    async def _open(self) -> None:
        self._follow(self._begin.told)
        self.turn_away(self._begin.away)
        self.port = await self.server.listen(self._begin.host, self._begin.port, self._certificate, shared=True)

    def _turn(self) -> None:
        self._link.send(self.vitals())
        self.worker.reports.flush()  # a sign of life

    def _follow(self, told: li.RosterTold) -> None:
        self.context.roster.follow(told.members, told.gone)
        self.worker.reports.applied = told.index
        if any(member.state is State.DRAINING for member in told.members):
            self.worker.reports.soon()  # the drain waits for this worker to know of it

    def on_message(self, stop: asyncio.Event, message: li.Down) -> None:
        """The owner says something. ``stop``: what is set where this process is to end."""
        match message:
            case li.RosterTold():
                self._follow(message)
                self.worker.line.moved()
            case InstanceLost():
                self.context.servings.lost(message)
            case InstanceLeaves():
                self.context.servings.leaving(message)
            case li.Away(away=away):
                self.turn_away(away)
            case li.StopWorker():
                stop.set()
            case li.OwnerAnswer():
                self._asking.answer(message)
            case li.Broke() | li.EndedWell() | li.DeathJudged() | li.SuspectTurn() | li.Evidence():
                self.worker.shared.on_message(message)
            case li.BeginWorker():
                raise ValueError("a second beginning")


async def _run(fd: int) -> int:
    loop = asyncio.get_running_loop()
    stop, begun = asyncio.Event(), loop.create_future()
    early: list[li.Down] = []

    def on_early(message: li.Down) -> None:
        if begun.done():
            early.append(message)
        else:
            begun.set_result(message)

    link: li.WorkerLink[li.Down] = li.WorkerLink(li.Down, on_early)  # type: ignore[arg-type]
    await loop.create_unix_connection(lambda: link, sock=socket.socket(fileno=fd))
    for number in (signal.SIGTERM, signal.SIGINT):
        # A terminal's interrupt goes to every process of its group, and the owner says what follows from it.
        loop.add_signal_handler(number, stop.set if number == signal.SIGTERM else lambda: None)
    await asyncio.wait({begun, link.ended}, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        return 1
    begin: li.BeginWorker = begun.result()
    config = begin.config
    logs.configure(config.log_level, config.log_format, service=config.service, instance=config.instance,
                   worker=str(begin.number))
    try:
        worker = WorkerRouter(begin, link)
        await worker.start()
    except ConfigError as error:
        link.send(li.WorkerFailed(str(error)))
        link.close()
        await link.ended
        return 2
    link.on_message = partial(worker.on_message, stop)
    for message in early:
        link.on_message(message)
    link.send(li.Listening())
    leave_garbage()
    serving = asyncio.ensure_future(_serve(worker, stop))
    await asyncio.wait({serving, link.ended}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        logger.error("the process that owns membership is gone: ending")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await worker.end()
        return 1
    await serving
    worker.worker.observer.tell()
    worker.worker.reports.flush()
    link.close()
    with contextlib.suppress(TimeoutError):
        async with within(2.0):
            await link.ended
    return 0


async def _serve(worker: WorkerRouter, stop: asyncio.Event) -> None:
    await stop.wait()
    await worker.stop()


def main() -> int:
    """The process; its exit code."""
    return run(_run(int(sys.argv[1])), encrypted="tls" in sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
