"""Whether all workers of a member's engine go on: one word that changes as long as they do. Pure.

A worker that is stopped does not count its pulse up; one that hangs in a step does, and its steps do not end. That may be a
kernel that is compiled at its first use, so it is given ``STUCK_S``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from xpyd_sidecar.contract.group import MemberState, Pulse

STALE_S: Final = 1.5
"""A pulse and a half; what that misses now and then delays the word, and ends nothing."""
STUCK_S: Final = 120.0


class SeenPulse(NamedTuple):
    """The last pulse of one worker."""

    beat: int
    at: float
    """When it changed last."""
    steps: int
    since: float
    """When a step ended last, or began after none was going on."""


class Pulses(NamedTuple):
    """What is known of a life's workers; ``observe`` gives the next state."""

    life: str = ""
    seen: tuple[tuple[int, SeenPulse], ...] = ()
    """By process."""
    times: int = 0
    """All of them were found well."""

    def observe(self, launcher: MemberState, found: Sequence[Pulse], now: float) -> Pulses:
        """Return the state after the pulses ``found`` in the run folder at ``now``, in seconds of a monotonic clock."""
        known = dict(self.seen) if launcher.life == self.life else {}
        for one in found:
            if one.life != launcher.life:
                continue
            before = known.get(one.pid)
            at = now if before is None or before.beat != one.beat else before.at
            since = now if before is None or before.steps != one.steps or not one.inside else before.since
            known[one.pid] = SeenPulse(one.beat, at, one.steps, since)
        well = all(now - one.at <= STALE_S and now - one.since <= STUCK_S for one in known.values())
        return Pulses(launcher.life, tuple(sorted(known.items())), self.times + well)

    def pass_over(self) -> Pulses:
        """Return the state where the run folder could not be read: no worker is to blame, so the word changes all
        the same.
        """
        return self._replace(times=self.times + 1)

    @property
    def word(self) -> str:
        """Another one with each look that found all of them well; before there are any, the launcher's own beat counts."""
        return str(self.times)
