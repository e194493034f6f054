"""Instances that are started on demand, by requests: what one router knows of them. Pure: time is an argument.

    state      when (the first that holds)                   a request that finds no instance
    disabled   not ``enabled``                               as in a service without starts on demand
    awake      the operator wants decode instances           is held until they are ready
    serving    a decode instance is ready                    as in a service without starts on demand
    refused    the operator says that none will start        is refused with the operator's reason
    asleep     else                                          is held if it generates, and has instances started

The operator's latest message (``WakeCall``) counts for ``FRESH_S`` seconds. After that a request may start instances again:
the operator that sent it may have ended, and another one may have begun.
"""

from __future__ import annotations

import math
from typing import Final

from xpyd_sidecar.contract.waking import POLL_S, WakeCall

FRESH_S: Final = 3 * POLL_S
"""So long what was said last is believed, seconds."""


class Standby:
    """What one router knows of starts on demand. ``now`` is in seconds of the router's clock."""

    def __init__(self, *, enabled: bool) -> None:
        """``enabled``: this service may have no instances, and requests start them."""
        self.enabled = enabled
        self._call = WakeCall(0)
        self._heard = -math.inf
        self._serving = False

    def on_call(self, call: WakeCall, now: float) -> None:
        """Take a message of the operator, received at ``now``."""
        self._call, self._heard = call, now

    def update(self, *, serving: bool) -> None:
        """Note whether a decode instance is ready (``serving``), even one that gets no requests now.

        If one is, an earlier message of the operator that none will start counts no more.
        """
        self._serving = serving
        if serving and self._call.refused:
            self._heard = -math.inf

    def expects(self, now: float) -> bool:
        """Whether a request that may start instances can wait for one: the state is asleep or awake."""
        return self.awake(now) or self.asleep(now)

    def awake(self, now: float) -> bool:
        """Whether the operator wants decode instances, so that all requests may wait for them."""
        return self.enabled and self._fresh(now) and self._call.wanted > 0 and not self._call.refused

    def asleep(self, now: float) -> bool:
        """Whether no decode instance is ready, wanted or refused, as far as is known: a request has to start one."""
        return self.enabled and not self._serving and not self._refused(now) and not self.awake(now)

    def why_not(self, now: float) -> str:
        """Return why no instance has started yet or will start, for an error message; empty where nothing is known."""
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
