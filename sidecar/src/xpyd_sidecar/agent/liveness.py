"""Whether the engine is to be restarted because it stands still. Pure: looks in, a word out; time is given.

             its core stands still, or its server is silent      for ``fresh_s`` no router that is heard holds it
    NONE ─────────────────────────────────────────────▶ WANTED ◀───────────────────────────▶ BEGUN
      ▲  ◀── it steps, or its server answers ─────────────┘          a router holds it         │
      └── it serves again, steps, or its time to start has passed ─────────────────────────────┘

Laws
    1. A core stands still only where looks saw no turn of it for longer than its own patience, and a router that is heard
       said meanwhile that requests which it has sent there wait. What the engine counts as its work is not asked.
    2. Only what was seen counts: between two looks ``LOOK_MOST_S`` at most, and a look that could not be made, or found no
       steps, begins anew.
    3. One turn, or one answer of the server, takes everything back, also the words of routers.
    4. A server is silent only if its health check is, which was answered in this incarnation, or had all its time to start.
    5. Not alive ⇒ no router that is heard holds it, since all of them could hear that it is wanted; and the instance was
       not draining when it began.
    6. What beats say ends with the time to start, so that an engine which does not come back holds nobody up for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from xpyd_sidecar.agent.beat import SLOW_LOOKS, KnownRouter, ProbeResult
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.contract.liveness import RestartWish

LOOK_MOST_S: Final = 5.0
"""A look takes its time-outs at most; what is longer between two, this process stood still itself."""


class Liveness:
    """Whether one engine lives. ``on_probe`` is the one method that changes it."""

    def __init__(self, startup_s: float, fresh_s: float, *, server: bool = True) -> None:
        """``startup_s``: the engine's time to start. ``fresh_s``: a router that has not answered for so long is not heard.
        ``server``: its server is judged here, and not by the group that it is part of.
        """
        self._startup_s, self._fresh_s, self._server = startup_s, fresh_s, server
        self._looked = math.nan
        self._incarnation = Incarnation("")
        self._since = math.nan
        """When this incarnation was seen first; before there was one, the first look."""
        self._turns = -1
        self._still_s = 0.0
        self._accused = False
        """A router has said that it waits, since the last turn."""
        self._answered = False
        """The server has, in this incarnation."""
        self._slow = 0
        self._wanted: float | None = None
        """Since when it stands still, and routers hear of it; None: it does not."""
        self._begun: float | None = None
        """Since when it is being restarted; None: it is not."""
        self._ended = False
        """That which stood still is gone; the one that follows does not serve yet."""
        self._asked = False
        self.restart = RestartWish.NONE
        """For beats."""
        self.reason = ""
        """Why the engine stands still, for people; empty: it does not."""

    @property
    def problem(self) -> str:
        """Why the engine is to be ended; empty: it lives, or nobody knows better."""
        return self.reason if self._begun is not None and not self._ended else ""

    def stacks(self) -> bool:
        """Whether who asks is the first to do so since the engine is to be ended: that one has its stacks written."""
        first = bool(self.problem) and not self._asked
        self._asked = self._asked or first
        return first

    def on_probe(self, now: float, look: ProbeResult, routers: Iterable[KnownRouter], *, serves: bool,
                 draining: bool) -> None:
        """A look was made. ``serves``: routers may send it requests. ``draining``: it goes away by itself."""
        passed, self._looked = now - self._looked, now
        if look.health != "unmade":
            self._known(now, look)
        heard = [router for router in routers if now - router.heard < self._fresh_s]
        self.reason = self._why(now, look, 0.0 if math.isnan(passed) else min(passed, LOOK_MOST_S), heard)
        if not self.reason:
            self._wanted = None
        elif self._wanted is None or any(router.hold for router in heard):
            self._wanted = now
        late = self._begun is not None and now - self._begun > self._startup_s
        if serves or late if self._ended else not self.reason:
            self._begun, self._ended, self._asked = None, False, False
        elif not self._ended and any(router.hold for router in heard):
            self._begun = None
        elif self._begun is None and not draining and self._wanted is not None and now - self._wanted >= self._fresh_s:
            self._begun = now
        if self._begun is None:
            self.restart = RestartWish.WANTED if self.reason and not draining else RestartWish.NONE
        else:
            self.restart = RestartWish.NONE if late else RestartWish.BEGUN

    def _known(self, now: float, look: ProbeResult) -> None:
        """Which incarnation this is."""
        incarnation = look.records[0].incarnation if look.records else Incarnation("")
        if incarnation == self._incarnation and not math.isnan(self._since):
            return
        if self._begun is not None and not self._ended:
            self._ended, self._begun = True, now
        self._incarnation, self._since = incarnation, now
        self._turns, self._still_s, self._accused = -1, 0.0, False
        self._answered, self._slow = False, 0

    def _why(self, now: float, look: ProbeResult, passed: float, heard: list[KnownRouter]) -> str:
        return self._core(look, passed, heard) or (self._silence(now, look) if self._server else "")

    def _core(self, look: ProbeResult, passed: float, heard: list[KnownRouter]) -> str:
        core = look.core
        if core is None or look.health == "unmade":
            self._turns, self._still_s, self._accused = -1, 0.0, False
            return ""
        if core.turns != self._turns:
            self._turns, self._still_s, self._accused = core.turns, 0.0, False
            return ""
        self._still_s += passed
        if self._still_s <= core.patience_s:
            return ""
        self._accused = self._accused or any(router.stalled for router in heard)
        return f"its core has requests and has not stepped for {self._still_s:.0f} s" if self._accused else ""

    def _silence(self, now: float, look: ProbeResult) -> str:
        if look.health == "unmade":
            return ""
        if look.health == "up" or look.answered:
            self._answered, self._slow = True, 0
            return ""
        self._slow = self._slow + 1 if look.health == "slow" else 0
        if look.health != "down" and self._slow < SLOW_LOOKS:
            return ""
        if self._answered:
            return f"it was up and does not answer any more ({look.problem})"
        if now - self._since > self._startup_s:
            return f"it is not up {self._startup_s:g} s after its beginning ({look.problem})"
        return ""
