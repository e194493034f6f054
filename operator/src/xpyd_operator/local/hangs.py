"""Engines that are ended because their agents say that they stand still, as by a kubelet's probe (``contract.liveness``).

    agent: hangs ──first time──▶ DUMP (its processes write their stacks)
          ──for PERIOD_S · FAILURES──▶ END; the planner starts it again, as one that crashed
    agent: silent, or it lives ──▶ nothing, and the time begins anew

The agent decides; here only its word is counted. Pure; time is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from xpyd_operator.local.procs import Identity
from xpyd_sidecar.contract import liveness
from xpyd_sidecar.contract.ids import InstanceName

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

    def look(self, now: float, hung: Mapping[InstanceName, HungEngine]) -> dict[InstanceName, HangStep]:
        """What follows from what agents say at ``now`` (seconds). ``hung``: engines whose agents say that they stand still;
        the others live, or nothing is known of them.
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
