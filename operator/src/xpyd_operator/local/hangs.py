"""Engines that are ended because their agents say that they stand still, as by a kubelet's probe (``contract.liveness``).

    agent: hangs ──first time──▶ DUMP (its processes write their stacks)
          ──for PERIOD_S · FAILURES──▶ END; the planner starts it again, as one that crashed
    agent: silent, or it lives ──▶ nothing, and the time begins anew

The agent decides; here only its word is counted (``next_steps``, which is pure: time is given), and carried out
(``end_hung``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from xpyd_operator.local.instance import LocalInstance
from xpyd_operator.local.observe import Picture
from xpyd_operator.local.procs import Identity
from xpyd_sidecar.contract import liveness
from xpyd_sidecar.contract.ids import InstanceName

logger = logging.getLogger(__name__)
END_S: Final = liveness.PERIOD_S * liveness.FAILURES
GAP_S: Final = 3.0 * liveness.PERIOD_S
"""Nobody looked for longer than this: what was said before that counts no more."""


class HangStep(StrEnum):
    """What is to be done about an engine."""

    DUMP = "dump"
    END = "end"


class HungEngine(NamedTuple):
    """One of which its agent says so."""

    engine: Identity
    """Its process."""
    why: str


class _Counted(NamedTuple):
    engine: Identity
    since: float
    looked: float


class Hangs:
    """Of all instances of a service."""

    def __init__(self) -> None:
        self._counted: dict[InstanceName, _Counted] = {}

    def next_steps(self, now: float, hung: Mapping[InstanceName, HungEngine]) -> dict[InstanceName, HangStep]:
        """What to do with each engine that stands still, from what agents say at ``now`` (seconds).

        ``hung``: engines whose agents say that they stand still; the others live, or nothing is known of them.
        """
        steps: dict[InstanceName, HangStep] = {}
        counted: dict[InstanceName, _Counted] = {}
        for name, one in hung.items():
            before = self._counted.get(name)
            if before is None or before.engine != one.engine or not 0 <= now - before.looked <= GAP_S:
                counted[name], steps[name] = _Counted(one.engine, now, now), HangStep.DUMP
            elif now - before.since >= END_S:
                steps[name] = HangStep.END
            else:
                counted[name] = before._replace(looked=now)
        self._counted = counted
        return steps

    def end_hung(self, picture: Picture, working: Collection[str], instances: Mapping[InstanceName, LocalInstance]) -> None:
        """End engines of which their agents have said for long enough that they stand still; stacks are logged first.

        ``working``: names of what begins or ends by itself, and is let alone.
        """
        hung = {}
        for sight in picture.sights:
            name, status = sight.instance.name, sight.status
            if status is not None and status.hangs and name not in working and name in instances:
                engine = instances[name].engine
                leader = engine.leader()
                if leader is not None and engine.alive():
                    hung[name] = HungEngine(leader, status.hangs)
        for name, step in self.next_steps(time.monotonic(), hung).items():
            engine, why = instances[name].engine, hung[name].why
            match step:
                case HangStep.DUMP:
                    states = ", ".join(f"{process.pid} ({process.state})" for process in engine.dump())
                    logger.warning("the engine of %s stands still: %s; its processes write their stacks to %s: %s",
                                   name, why, engine.log, states)
                case HangStep.END:
                    logger.error("the engine of %s is ended, since it stands still: %s", name, why)
                    engine.abort()
