"""``python -m xpyd_sidecar.proxy.worker FD``: one of several processes that serve clients for one router.

    owner ══ Unix socket FD ══ worker: Server (SO_REUSEPORT), Dispatch, a replica of the roster

Belongs here: what a worker does otherwise than a router of one process. Its roster follows the owner's; what its requests
find out goes to the owner; so do records of requests, from which the owner makes metrics, history and ``/fleet``.

The owner's end is the worker's: without membership it would serve from a roster that grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import uvloop

from xpyd_sidecar import logs
from xpyd_sidecar.contract import timeline
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.contract.membership import Heartbeat
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.proxy import link as li
from xpyd_sidecar.proxy.admin import Paths
from xpyd_sidecar.proxy.app import GC_THRESHOLD, Router
from xpyd_sidecar.proxy.auth import ClientKeys
from xpyd_sidecar.proxy.dispatch import Dispatch
from xpyd_sidecar.proxy.lane import Lane
from xpyd_sidecar.proxy.patience import Alarm, within
from xpyd_sidecar.proxy.reply import Handler, HttpRequest, Reply
from xpyd_sidecar.proxy.serving import Serving
from xpyd_sidecar.proxy.watch import Watch
from xpyd_sidecar.routing import faults, fields
from xpyd_sidecar.routing import replica as rep
from xpyd_sidecar.routing import roster as ro
from xpyd_sidecar.routing.pick import Target
from xpyd_sidecar.routing.record import Record
from xpyd_sidecar.routing.straight_record import StraightRecord

logger = logging.getLogger(__name__)

ASKED = frozenset({"/metrics", "/fleet", timeline.PATH, "/dashboard/data"})
"""Paths that the owner answers, for all workers together."""
FLUSH_S = 0.02
"""How long a report waits for more."""
ALIVE_S = 1.0
ASK_S = 5.0
MAX_UNSENT = 16 << 20
"""Bytes that the owner may leave unread before records are dropped."""


class Reports:
    """Collects what the owner must hear of, and sends it in few frames."""

    def __init__(self, loop: asyncio.AbstractEventLoop, link: li.Link[li.Down]) -> None:
        self._loop = loop
        self._link = link
        self._timer: asyncio.Handle | None = None
        self._open: dict[tuple[InstanceName, Incarnation], int] = {}
        self._changed: set[tuple[InstanceName, Incarnation]] = set()
        self._opened: list[int] = []
        self._closed: list[Record] = []
        self._refused: list[li.Refusal] = []
        self._passed: list[tuple[str, str]] = []
        self.levels: Callable[[], tuple[int, int, float]] = lambda: (0, 0, 0.0)
        """Requests being served, those that wait, and retries left."""
        self.applied = 0
        self.dropped = 0

    def leg(self, name: InstanceName, incarnation: Incarnation, change: int) -> None:
        """A leg was opened or closed."""
        key = name, incarnation
        self._open[key] = self._open.get(key, 0) + change
        self._changed.add(key)
        self.soon()

    def opened(self, tokens: int) -> None:
        """A request is being served, whose prompt has about so many tokens."""
        self._opened.append(tokens)
        self.soon()

    def closed(self, record: Record) -> None:
        """It ended."""
        if self._room():
            self._closed.append(record)
        self.soon()

    def refused(self, refusal: li.Refusal) -> None:
        """A request was not served."""
        if self._room():
            self._refused.append(refusal)
        self.soon()

    def passed(self, path: str, outcome: str) -> None:
        """A passed request ended."""
        if self._room():
            self._passed.append((path, outcome))
        self.soon()

    def _room(self) -> bool:
        if self._link.backlog < MAX_UNSENT:
            return True
        self.dropped += 1
        return False

    def soon(self) -> None:
        """Something is to be said."""
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Say it now; also a sign of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        legs = [(name, incarnation, self._open[name, incarnation]) for name, incarnation in self._changed]
        for name, incarnation, count in legs:
            if not count:
                del self._open[name, incarnation]
        self._changed.clear()
        report = li.Report(self.applied, legs, self._opened, self._closed, self._refused, self._passed, *self.levels())
        self._opened, self._closed, self._refused, self._passed = [], [], [], []
        self._link.send(report)


class Follower(Watch):
    """Keeps a replica: the owner's events in, verdicts of the data path out. Never probes."""

    link: li.Link[li.Down]

    def suspect(self, target: Target, reason: str) -> None:
        """A connection was refused: suspend it here at once."""
        event = rep.RefusedAt(self._loop.time(), target.instance, target.incarnation, reason)
        rep.follow(self.roster, event)
        self.link.send(li.Verdict(event))

    def doubt(self, target: Target) -> None:
        """Let the owner ask whether it lives."""
        self.link.send(li.Verdict(rep.Doubt(self._loop.time(), target.instance, target.incarnation)))

    def tick(self) -> None:
        """Time is the owner's."""


class WorkerDispatch(Dispatch):
    """Requests of one worker."""

    def __init__(self, config: SidecarConfig, link: li.Link[li.Down], started: float) -> None:
        super().__init__(config)
        assert config.router is not None
        router = config.router
        self.started = started
        self.reports = Reports(self.loop, link)
        self.reports.levels = lambda: (len(self.servings), len(self.line), self.budget.left(self.loop.time()))
        self.passing.told = self.reports.passed
        follower = Follower(self.roster, self.lost, self.observer)
        follower.link = link
        self.watch = follower
        self.roster.begin(started, router.heartbeat_s + router.resolve_s, beside_engine=router.beside_engine)

    def opened(self, tokens: int) -> None:
        """A request is being served."""
        self.reports.opened(tokens)
        super().opened(tokens)

    def unserved(self, api: fields.Api, request: HttpRequest, outcome: str, status: int, detail: str) -> None:
        """A request ended before it was served."""
        super().unserved(api, request, outcome, status, detail)
        self.reports.refused(li.Refusal(api, request.request_id, outcome, status, detail))

    def closed(self, serving: Serving | Lane, record: Record | StraightRecord) -> None:
        """A request ended."""
        super().closed(serving, record)
        self.reports.closed(record if isinstance(record, Record) else record.record())

    def leg_opened(self, target: Target) -> ro.Member | None:
        """Count a leg."""
        member = super().leg_opened(target)
        if member is not None:
            self.reports.leg(target.instance, target.incarnation, 1)
        return member

    def leg_closed(self, member: ro.Member) -> None:
        """The leg ended."""
        super().leg_closed(member)
        self.reports.leg(member.name, member.incarnation, -1)


class _Waiting:
    """A request that the owner answers."""

    def __init__(self, reply: Reply, timer: Alarm) -> None:
        self.reply = reply
        self.timer = timer
        self.gone = False

    def on_client_gone(self) -> None:
        """The answer goes nowhere."""
        self.gone = True

    def on_pause(self) -> None:
        """It is one write."""

    def on_resume(self) -> None:
        """Likewise."""


class WorkerPaths(Paths):
    """The paths of a worker: what is of all workers is asked of the owner."""

    link: li.Link[li.Down]

    def __init__(self, dispatch: Dispatch, client_keys: ClientKeys, admin_token: str) -> None:
        super().__init__(dispatch, client_keys, admin_token)
        self._loop = dispatch.loop
        self._asked: dict[int, _Waiting] = {}
        self._number = 0

    def handle(self, request: HttpRequest, reply: Reply) -> Handler | None:
        """Answer a request. Raises Fault."""
        if request.path not in ASKED:
            return super().handle(request, reply)
        self._number += 1
        number = self._number
        timer = Alarm(self._loop, self._loop.time() + ASK_S, partial(self._answered, number, None))
        waiting = self._asked[number] = _Waiting(reply, timer)
        self.link.send(li.Ask(number, request.method, request.path, request.headers, request.request_id))
        return waiting

    def answer(self, answer: li.Answer) -> None:
        """The owner has answered."""
        self._answered(answer.number, answer)

    def _answered(self, number: int, answer: li.Answer | None) -> None:
        waiting = self._asked.pop(number, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        if waiting.gone:
            return
        if answer is None:
            waiting.reply.fault(faults.unavailable("the process that owns membership does not answer"))
        else:
            waiting.reply.whole(answer.status, answer.headers, answer.body)


class Worker(Router):
    """A router without membership of its own."""

    def __init__(self, begin: li.Begin, link: li.Link[li.Down]) -> None:
        self._begin = begin
        self._link = link
        # Nobody but the owner knows the service's key, and it alone checks what is secured with it.
        super().__init__(begin.config, ServiceKey(secrets.token_bytes(32)))

    def _make_dispatch(self, config: SidecarConfig) -> Dispatch:
        self.worker = WorkerDispatch(config, self._link, self._begin.started)
        return self.worker

    def _make_paths(self, client_keys: ClientKeys, admin_token: str) -> Paths:
        paths = WorkerPaths(self.dispatch, client_keys, admin_token)
        paths.link = self._link
        self._asking = paths
        return paths

    async def _open(self) -> None:
        rep.catch_up(self.dispatch.roster, self._begin.events)
        self.worker.reports.applied = self._begin.index
        self.turn_away(self._begin.away)
        self.port = await self.server.listen(self._begin.host, self._begin.port, self._certificate, shared=True)

    def on_message(self, message: li.Down, stop: asyncio.Event) -> None:
        """The owner says something."""
        roster, reports = self.dispatch.roster, self.worker.reports
        match message:
            case li.Told(index=index, event=event, gone=gone):
                if event is not None:
                    rep.follow(roster, event)
                for name in gone:
                    rep.forget(roster, self.dispatch.loop.time(), name)
                reports.applied = index
                self.worker.line.moved()
                beat = event.message if isinstance(event, rep.Message) else None
                if isinstance(beat, Heartbeat) and beat.state is State.DRAINING:
                    reports.soon()  # the drain waits for this worker to know of it
                    if beat.leaving:
                        self.dispatch.leaving(beat.instance, beat.incarnation, f"{beat.instance} drains and ends soon")
            case li.LostAt(instance=instance, incarnation=incarnation, reason=reason):
                self.dispatch.lost(instance, incarnation, reason)
            case li.CatchUp(index=index, events=events):
                rep.catch_up(roster, events)
                reports.applied = index
            case li.Away(away=away):
                self.turn_away(away)
            case li.Stop():
                stop.set()
            case li.Answer():
                self._asking.answer(message)
            case li.Begin():
                raise ValueError("a second beginning")


async def _run(fd: int) -> int:
    loop = asyncio.get_running_loop()
    stop, begun = asyncio.Event(), loop.create_future()
    worker: Worker | None = None

    def on_message(message: li.Down) -> None:
        if worker is not None:
            worker.on_message(message, stop)
        elif isinstance(message, li.Begin):
            begun.set_result(message)
        else:
            early.append(message)

    def on_end() -> None:
        if not begun.done():
            begun.cancel()

    early: list[li.Down] = []
    link: li.Link[li.Down] = li.Link(li.Down, on_message, on_end)  # type: ignore[arg-type]
    await loop.create_unix_connection(lambda: link, sock=socket.socket(fileno=fd))
    for number in (signal.SIGTERM, signal.SIGINT):
        # A terminal's interrupt goes to every process of its group, and the owner says what follows from it.
        loop.add_signal_handler(number, stop.set if number == signal.SIGTERM else lambda: None)
    begin: li.Begin = await begun
    config = begin.config
    logs.configure(config.log_level, config.log_format, service=config.service, instance=config.instance,
                   worker=str(begin.number))
    try:
        made = Worker(begin, link)
        await made.start()
    except ConfigError as error:
        link.send(li.Failed(str(error)))
        link.close()
        await link.ended
        return 2
    for message in early:
        made.on_message(message, stop)
    worker = made  # only now: what came while it started must not overtake what came before
    link.send(li.Listening())
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    alive = loop.create_task(_alive(worker.worker.reports))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({stopping, link.ended}, return_when=asyncio.FIRST_COMPLETED)
    if link.ended.done():
        logger.error("the process that owns membership is gone: ending")
        await worker.end()
        return 1
    draining = asyncio.ensure_future(worker.stop())
    await asyncio.wait({draining, link.ended}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await worker.end()
        return 1
    alive.cancel()
    worker.worker.reports.flush()
    link.close()
    with contextlib.suppress(TimeoutError):
        async with within(2.0):
            await link.ended
    return 0


async def _alive(reports: Reports) -> None:
    while True:
        await asyncio.sleep(ALIVE_S)
        reports.flush()


def main() -> int:
    """The process; its exit code."""
    return msgspec.convert(uvloop.run(_run(int(sys.argv[1]))), int)


if __name__ == "__main__":
    sys.exit(main())
