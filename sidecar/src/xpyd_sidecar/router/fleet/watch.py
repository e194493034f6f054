"""Who watches the instances: the roster, and what it instructs.

A router of one process has one ``FleetWatch``. With several, the owner of the membership socket has it, ``told`` of every
event that its roster took, and each worker has a replica of the roster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from xpyd_sidecar import resources
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Heartbeat, Up
from xpyd_sidecar.router.fleet import deaths
from xpyd_sidecar.router.fleet import replica as rep
from xpyd_sidecar.router.fleet import roster as ro
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.fleet.probe import probe_all
from xpyd_sidecar.router.stream.failures import FailureReason

logger = logging.getLogger(__name__)

PROBE_AGAIN_S = 1.0
"""After which a probe is tried again that this process had no file, port or memory for."""
OnLost = Callable[[InstanceName, Incarnation, FailureReason], None]
OnVerdict = Callable[[InstanceName, Incarnation, deaths.DeathVerdict], None]


class FleetNotes(Protocol):
    """Who is told of what happens to instances, for metrics and the dashboard."""

    def changed(self, change: ro.Changed) -> None:
        """The roster changed."""

    def probed(self, result: ro.Probed) -> None:
        """A health probe ended."""


class FleetWatch:
    """Keeps a roster right: beats in, probes out."""

    def __init__(self, roster: ro.Roster, on_lost: OnLost, notes: FleetNotes,
                 told: Callable[[rep.Event], None] | None = None) -> None:
        """``on_lost``: legs on an incarnation will never answer, and why."""
        self._loop = asyncio.get_running_loop()
        self.roster = roster
        self.on_lost = on_lost
        self.on_leaving: Callable[[InstanceName, Incarnation, str], None] = lambda *_: None
        """Streams on an incarnation should go on elsewhere, and why."""
        self.on_verdict: OnVerdict = lambda *_: None
        """It has died by itself, or it has not; what is lost with it was told before."""
        self._notes = notes
        self.told = told
        self._lacks = resources.Complaint("no probe of an engine")
        self._probes: set[asyncio.Task[None]] = set()

    def on_message(self, message: Up) -> int:
        """A heartbeat or goodbye. Returns how many legs are open on the instance. Raises ``roster.BeatRefused``."""
        now = self._loop.time()
        if isinstance(message, Heartbeat) and (same := self.roster.heard(now, message)) is not None:
            if self.told is not None:
                self.told(rep.Message(now, message))
            return same.in_flight
        found = deaths.by_message(self.roster.known(message.instance), message)
        self.take(rep.Message(now, message))
        if found is not None:
            self.on_verdict(message.instance, *found)
        member = self.roster.find(message.instance, message.incarnation)
        return member.in_flight if member is not None else 0

    def suspect(self, target: EngineTarget, reason: str) -> None:
        """A connection was refused."""
        self.take(rep.RefusedAt(self._loop.time(), target.instance, target.incarnation, reason))

    def doubt(self, target: EngineTarget) -> None:
        """An engine failed a request, broke a connection, or is silent."""
        self.take(rep.Doubt(self._loop.time(), target.instance, target.incarnation))

    def tick(self) -> None:
        """Called every second."""
        self.take(rep.RosterTick(self._loop.time()))

    def take(self, event: rep.Event) -> None:
        """An event, seen here or by somebody else. Raises ``roster.BeatRefused``."""
        instructions = rep.apply(self.roster, event)
        if self.told is not None:
            self.told(event)
        self.do(instructions)

    def do(self, instructions: Iterable[ro.Instruction]) -> None:
        """Carry out what the roster says."""
        for instruction in instructions:
            match instruction:
                case ro.Changed(instance=instance, what=what):
                    logger.info("%s: %s", instance, what, extra={"peer": instance})
                    self._notes.changed(instruction)
                case ro.InstanceLost(instance=instance, incarnation=incarnation, reason=reason):
                    self.on_lost(instance, incarnation, reason)
                case ro.InstanceLeaves(instance=instance, incarnation=incarnation, reason=reason):
                    self.on_leaving(instance, incarnation, reason)
                case ro.ProbeInstance():
                    task = self._loop.create_task(self._probe(instruction))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)

    async def _probe(self, wanted: ro.ProbeInstance) -> None:
        end = self._loop.time() + ro.PROBE_LOST_S - PROBE_AGAIN_S
        while True:
            try:
                result, detail = await probe_all((wanted.address, *wanted.others))
                break
            except resources.Lack as lack:  # nobody was asked, so there is nothing to report
                self._lacks.add(lack)
                if self._loop.time() > end:
                    return  # the roster has it made again
                await asyncio.sleep(PROBE_AGAIN_S)
        self._notes.probed(result)
        now, member = self._loop.time(), self.roster.find(wanted.instance, wanted.incarnation)
        silent = member is not None and self.roster.silent(now, member)
        verdict = deaths.by_probe(member, result, silent=silent)
        self.take(rep.ProbeEnded(now, wanted.instance, wanted.incarnation, result, detail))
        if verdict is not None:
            self.on_verdict(wanted.instance, wanted.incarnation, verdict)

    async def close(self) -> None:
        """End the probes."""
        for task in list(self._probes):
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
