"""Watches the instances for a router: feeds the roster with heartbeats and health probes, and does what it instructs.

A probe is ``GET /health`` of an engine on a new connection: an engine that is shutting down refuses new ones at once,
while old ones may stay open and silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName, split_host_port
from xpyd_sidecar.contract.membership import Heartbeat, Up
from xpyd_sidecar.process import resources
from xpyd_sidecar.process.patience import timeout_with_grace
from xpyd_sidecar.router.fleet import restarts
from xpyd_sidecar.router.fleet import roster as ro
from xpyd_sidecar.router.fleet.heartbeat_listener import Verdict
from xpyd_sidecar.router.fleet.member import (
    PROBE_S,
    DeathVerdict,
    EngineTarget,
    HealthResult,
    InstanceLeaves,
    InstanceLost,
    Instruction,
    ProbeInstance,
    RosterChange,
    by_message,
    by_probe,
)
from xpyd_sidecar.router.http.wire import MAX_HEAD, HeadReader, MalformedMessage

logger = logging.getLogger(__name__)

PROBE_AGAIN_S = 1.0
"""After which a probe is tried again that this process had no file, port or memory for."""


class FleetWatch:
    """Feeds a roster with heartbeats, failed connections and probe results, and carries out its instructions."""

    def __init__(self, roster: ro.Roster, on_lost: Callable[[InstanceLost], None], changed: Callable[[RosterChange], None],
                 probed: Callable[[HealthResult], None]) -> None:
        """Must be made in a running event loop.

        Args:
            roster: the instances of one service.
            on_lost: called when upstream requests to an instance will never be answered.
            changed: called with each change of the roster, for metrics and the dashboard.
            probed: called with how each probe ended, for metrics.
        """
        self._loop = asyncio.get_running_loop()
        self.roster = roster
        self.on_lost = on_lost
        self.on_leaving: Callable[[InstanceLeaves], None] = lambda _: None
        self.on_verdict: Callable[[InstanceName, Incarnation, DeathVerdict], None] = lambda *_: None
        """It has died by itself, or it has not; what is lost with it was told before."""
        self._note_change, self._note_probe = changed, probed
        self._lacks = resources.Complaint("no probe of an engine")
        self._probes: set[asyncio.Task[None]] = set()

    def on_message(self, message: Up) -> int:
        """Take a heartbeat or goodbye. Returns how many upstream requests of this router are open on the instance.

        Raises:
            BeatRefused: the roster does not take the message; the text says why.
        """
        now = self._loop.time()
        if isinstance(message, Heartbeat) and (same := self.roster.take_unchanged_beat(now, message)) is not None:
            return same.in_flight
        found = by_message(self.roster.find_by_name(message.instance), message)
        self.take(self.roster.on_message(now, message))
        if found is not None:
            self.on_verdict(message.instance, *found)
        member = self.roster.find(message.instance, message.incarnation)
        return member.in_flight if member is not None else 0

    def verdict(self, message: Up) -> Verdict:
        """What the acknowledgement of a message says of its instance: whether it is ejected, is stalled or must put off a
        restart, and ``seq`` of the last message about its prefix cache; False and 0 where the roster does not have it.
        """
        member = self.roster.find(message.instance, message.incarnation)
        if member is None:
            return Verdict()
        hold = bool(member.restart) and restarts.holds(self._loop.time(), member, self.roster.members())
        return Verdict(bool(member.ejected), restarts.is_stalled(member), hold, member.prefixes_seq)

    def suspect(self, target: EngineTarget, reason: str) -> None:
        """Suspend an instance that refused a connection: it gets no new requests until a probe finds it healthy."""
        instance, incarnation = target.instance, target.incarnation
        self.take(self.roster.on_refused(self._loop.time(), instance, incarnation, reason))

    def request_probe(self, target: EngineTarget) -> None:
        """Have an engine probed that failed a request, broke a connection or is silent, and that still gets requests."""
        self.take(self.roster.on_doubt(self._loop.time(), target.instance, target.incarnation))

    def tick(self) -> None:
        """Have instances probed that are silent, suspended or in doubt. Must be called every second."""
        self.take(self.roster.on_tick(self._loop.time()))

    def take(self, instructions: Iterable[Instruction]) -> None:
        """Carry out instructions of the roster: log changes, begin probes, tell of instances that are lost or leave."""
        for instruction in instructions:
            match instruction:
                case RosterChange(instance=instance, what=what):
                    logger.info("%s: %s", instance, what, extra={"peer": instance})
                    self._note_change(instruction)
                case InstanceLost():
                    self.on_lost(instruction)
                case InstanceLeaves():
                    self.on_leaving(instruction)
                case ProbeInstance():
                    task = self._loop.create_task(self._probe(instruction))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)

    async def _probe(self, wanted: ProbeInstance) -> None:
        end = self._loop.time() + ro.PROBE_LOST_S - PROBE_AGAIN_S
        while True:
            try:
                result, detail = await probe_all((wanted.address, *wanted.others), wanted.patience_s)
                break
            except resources.Lack as lack:  # nobody was asked, so there is nothing to report
                self._lacks.add(lack)
                if self._loop.time() > end:
                    return  # the roster has it made again
                await asyncio.sleep(PROBE_AGAIN_S)
        self._note_probe(result)
        now, member = self._loop.time(), self.roster.find(wanted.instance, wanted.incarnation)
        silent = member is not None and self.roster.silent(now, member)
        verdict = by_probe(member, result, silent=silent)
        self.take(self.roster.on_probe(now, wanted.instance, wanted.incarnation, result, detail))
        if verdict is not None:
            self.on_verdict(wanted.instance, wanted.incarnation, verdict)

    async def close(self) -> None:
        """Cancel the probes in progress, and wait until they have ended."""
        for task in list(self._probes):
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)


async def probe(address: HostPort, timeout_s: float = PROBE_S) -> tuple[HealthResult, str]:
    """Send ``GET /health`` to one server, once. Returns the result, and why it is not healthy ("" where it is).

    What the server does wrong is a result and never raises.

    Raises:
        Lack: nobody was asked, since this process has no file, port or memory for a connection.
    """
    try:
        async with timeout_with_grace(timeout_s):
            return await _ask(address)
    except TimeoutError:
        return HealthResult.SILENT, f"no answer to GET /health within {timeout_s:g} s"
    except (OSError, ValueError, EOFError, MalformedMessage) as error:
        if isinstance(error, OSError) and resources.is_own_lack(error):
            raise resources.Lack(resources.words(error)) from None
        return HealthResult.DEAD, f"GET /health: {error}"


async def probe_all(addresses: Sequence[HostPort], timeout_s: float = PROBE_S) -> tuple[HealthResult, str]:
    """Probe several servers of one instance at once. Returns the worst result: dead, else silent, else healthy.

    Raises:
        Lack: a server was not asked, since this process has no file, port or memory for a connection.
    """
    found = await asyncio.gather(*(probe(each, timeout_s) for each in addresses))
    return next((one for wanted in (HealthResult.DEAD, HealthResult.SILENT) for one in found if one[0] is wanted), found[0])


async def _ask(address: HostPort) -> tuple[HealthResult, str]:
    host, port = split_host_port(address)
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % address.encode())
        heads, found = HeadReader(), None
        while found is None:
            data = await reader.read(MAX_HEAD)
            if not data:
                raise EOFError("the connection was closed without an answer")
            found = heads.feed(data)
    finally:
        writer.transport.abort()
    status = found[0].status
    return (HealthResult.HEALTHY, "") if status < 300 else (HealthResult.DEAD, f"GET /health answered {status}")
