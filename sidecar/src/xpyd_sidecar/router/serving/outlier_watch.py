"""What requests tell of instances, and what follows from it: who carries out ``fleet.outliers`` for one router.

    a request ends ──on_over──▶ faults, suspicions ─▶ Outliers ──EjectInstance──▶ roster; of who hangs, legs move
    a leg is silent ──suspect─────────────────────▶         └──SendCanary──▶ canaries ──on_canary──▶ Outliers
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.router.fleet.first_bytes import FirstBytes
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.fleet.outliers import (
    CanaryResult,
    EjectInstance,
    OutlierInstruction,
    Outliers,
    ReadmitInstance,
    SendCanary,
)
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.fleet.watch import FleetWatch
from xpyd_sidecar.router.observing.record import LegRecord, Record
from xpyd_sidecar.router.serving.canaries import Canaries
from xpyd_sidecar.router.upstream.pool import EnginePool

logger = logging.getLogger(__name__)

CANARY_MOST_S: Final = 10.0
"""A canary takes so long at most. Who is so busy that it takes longer gives bytes to others meanwhile, and is acquitted."""
_DONE = "2xx"
Blamed = tuple[Role, EngineTarget, str]
"""A leg that failed: its role, where it went, and what was wrong."""


class OutlierWatch:
    """Of one router."""

    def __init__(self, name: str, roster: Roster, watch: FleetWatch, pool: EnginePool, *,
                 hung: Callable[[], None], stalled: Callable[[InstanceName, Incarnation], None],
                 note: Callable[[CanaryResult], None]) -> None:
        """``name``: this router's. ``hung`` is called when somebody answers nothing any more: legs that have not begun
        there are to be left; before it ``stalled``, where it is since the core of that incarnation stands still. ``note``
        hears how canaries ended.
        """
        self._loop, self._roster, self._watch = pool.loop, roster, watch
        self._hung, self._stalled, self._note = hung, stalled, note
        self._outliers = Outliers(name, roster.members)
        self._canaries = Canaries(pool)
        self.first_bytes = FirstBytes()

    # ---- what requests tell

    def on_failed(self, target: EngineTarget) -> None:
        """A leg failed there, whoever is to blame."""
        member = self._roster.find(target.instance, target.incarnation)
        if member is not None:
            self._outliers.on_failed(self._loop.time(), member)

    def suspect(self, target: EngineTarget) -> None:
        """It is silent for too long."""
        member = self._roster.find(target.instance, target.incarnation)
        if member is not None:
            self._outliers.on_suspected(self._loop.time(), member)

    def on_over(self, record: Record, sent: Mapping[Role, EngineTarget], blamed: Sequence[Blamed],
                who: Callable[[], Hashable]) -> None:
        """A request has ended. ``sent``: where its last legs went. ``blamed``: its legs that failed. ``who``: whose it is,
        asked where one of them counts.
        """
        if record.outcome == "ok":
            for leg in record.legs:
                if leg.result == _DONE and (target := sent.get(leg.role)) is not None and target.instance == leg.instance:
                    target.member.well += 1
        if record.api:
            self._learn(record)
        if blamed:
            self._judge(record, blamed, who)

    def _learn(self, record: Record) -> None:
        prefilled = math.nan
        for leg in record.legs:
            if math.isnan(leg.first_at):
                continue
            if leg.role is Role.PREFILL:
                prefilled = leg.ended
                self.first_bytes.add(leg.first_at - leg.opened, record.prompt_size)
            elif record.stream:
                handed = leg.attempt > 0 and prefilled >= leg.opened
                since, work = (prefilled, 0) if handed else (leg.opened, record.prompt_size)
                self.first_bytes.add(max(0.0, leg.first_at - since), work)

    def _judge(self, record: Record, blamed: Sequence[Blamed], who: Callable[[], Hashable]) -> None:
        now = self._loop.time()
        for role, target, why in blamed:
            member = self._roster.find(target.instance, target.incarnation)
            if member is None or member.role is not role:
                continue
            if record.outcome == "ok" and _elsewhere(role, target.instance, record.legs):
                self._do(self._outliers.on_fault(now, member, (role, who()), why))
            self._outliers.on_suspected(now, member)

    # ---- time

    def tick(self) -> None:
        """Called every second."""
        self._do(self._outliers.on_tick(self._loop.time()))

    def close(self) -> None:
        """End the canaries."""
        self._canaries.close()

    # ---- instructions

    def _do(self, instructions: Iterable[OutlierInstruction]) -> None:
        for one in instructions:
            match one:
                case EjectInstance(instance=name, incarnation=incarnation, reason=reason, hung=hung):
                    self._watch.take(self._roster.on_verdict(name, incarnation, reason, hung=hung))
                    member = self._roster.find(name, incarnation)
                    if hung and member is not None and member.stalled_s:
                        self._stalled(name, incarnation)
                    if hung:
                        self._hung()
                case ReadmitInstance(instance=name, incarnation=incarnation, reason=reason):
                    self._watch.take(self._roster.on_verdict(name, incarnation, "", reason))
                case SendCanary():
                    self._send(one)

    def _send(self, wanted: SendCanary) -> None:
        member = self._roster.find(wanted.instance, wanted.incarnation)
        if member is None:
            return
        reference = None if wanted.reference is None else self._roster.find_by_name(wanted.reference)
        patience_s = min(CANARY_MOST_S, self.first_bytes.bound_s(member.queued_tokens))
        self._canaries.send(member, reference, patience_s, partial(self._ended, wanted))

    def _ended(self, wanted: SendCanary, result: CanaryResult, detail: str, answered: bool) -> None:
        self._note(result)
        member = self._roster.find(wanted.instance, wanted.incarnation)
        logger.info("%s: a canary is %s%s", wanted.instance, result.value, f" ({detail})" if detail else "",
                    extra={"peer": wanted.instance})
        if member is not None:
            self._do(self._outliers.on_canary(self._loop.time(), member, result, detail, answered=answered))


def _elsewhere(role: Role, instance: InstanceName, legs: Sequence[LegRecord]) -> bool:
    """Whether the same work ended well on another instance, and not on this one. Decode may do prefill's, too."""
    done = [leg for leg in legs if leg.result == _DONE and leg.role in (role, Role.DECODE)]
    return any(leg.instance != instance for leg in done) and not any(
        leg.instance == instance and leg.role is role for leg in done)
