"""Instances that are started when a request asks for them: what a router knows of that. Pure: time is an argument.

    not enabled                                   nobody is started for anybody
    enabled, somebody decodes                     serving: who is not there is as in any other service, except for whom the
                                                  operator wants and has not got yet
    enabled, nobody decodes, none is wanted       asleep: a request that generates is held, and starts them
    enabled, some are wanted                      awake: whoever asks is held for them
    enabled, and the operator says that none      refused: nobody is held, and hears why
    comes

What the operator said counts for ``FRESH_S``; after that somebody is expected anew, since it may have gone, and another one
begins.
"""

from __future__ import annotations

import math
from typing import Final

from xpyd_sidecar.contract.waking import POLL_S, WakeCall

FRESH_S: Final = 3 * POLL_S
"""So long what was said last is believed, seconds."""


class Standby:
    """Of one router."""

    def __init__(self, *, enabled: bool) -> None:
        """``enabled``: this service may have no instances, and requests start them."""
        self.enabled = enabled
        self._call = WakeCall(0)
        self._heard = -math.inf
        self._serving = False

    def on_call(self, call: WakeCall, now: float) -> None:
        """The operator said something. ``now``: seconds of the router's clock, as everywhere here."""
        self._call, self._heard = call, now

    def update(self, *, serving: bool) -> None:
        """Note whether an instance of decode is ready, be it picked or not (``serving``). If so, the operator's word that
        none comes counts no more.
        """
        self._serving = serving
        if serving and self._call.refused:
            self._heard = -math.inf

    def expects(self, now: float) -> bool:
        """Whether somebody comes for a request that may start instances."""
        return self.awake(now) or self.asleep(now)

    def awake(self, now: float) -> bool:
        """Whether instances are wanted, so that all requests may wait for them."""
        return self.enabled and self._fresh(now) and self._call.wanted > 0 and not self._call.refused

    def asleep(self, now: float) -> bool:
        """Whether nobody is there and nobody is wanted, as far as is known, so that a request has to start them."""
        return self.enabled and not self._serving and not self._refused(now) and not self.awake(now)

    def why_not(self, now: float) -> str:
        """Why nobody came, or comes, as far as the operator says; empty: it says nothing."""
        if not self.enabled:
            return ""
        if why := self._refused(now):
            return f"no instance can be started: {why}"
        if not self._fresh(now):
            return "" if self._serving else "no instance runs, and no operator asks this router whether one is needed"
        if not self._call.waits:
            return ""
        what = "the instance that was started waits" if self._call.wanted > 0 else "no instance could be started yet"
        return f"{what}: {self._call.waits}"

    def _fresh(self, now: float) -> bool:
        return now - self._heard < FRESH_S

    def _refused(self, now: float) -> str:
        return self._call.refused if self._fresh(now) else ""
