"""The requests that are being served: one set, and what the roster and the clock say to all of them.

Belongs here: passing it on to each. Does not belong here: what a request makes of it (``request``, ``fast_path``).
"""

from __future__ import annotations

from typing import Protocol

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import GenerationRequest
from xpyd_sidecar.router.fleet.target import Pair
from xpyd_sidecar.router.stream.failures import FailureReason

STALL_S = 10.0
"""Silence on an open leg after which its engine is probed."""


class InFlightRequest(Protocol):
    """A request that is being served."""

    def handed_over(self) -> tuple[GenerationRequest, Pair] | None:
        """Once it has ended well: what was asked, and of which pair. None: not with KV from prefill, or with trouble."""

    def on_lost(self, instance: str, incarnation: str, reason: FailureReason) -> None:
        """The roster says that this incarnation will never answer."""

    def on_leaving(self, instance: str, incarnation: str, reason: str) -> None:
        """The incarnation ends soon."""

    def sweep(self, now: float, awake: float, stall_s: float) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""

    def abort(self, reason: str) -> None:
        """The router stops before this request could end."""


class InFlight(set[InFlightRequest]):
    """All requests that one process serves."""

    def lost(self, instance: InstanceName, incarnation: Incarnation, reason: FailureReason) -> None:
        """The roster says that this incarnation will never answer."""
        for one in list(self):
            one.on_lost(instance, incarnation, reason)

    def leaving(self, instance: InstanceName, incarnation: Incarnation, reason: str) -> None:
        """The time of its drain is nearly over: what can go on elsewhere does, while nothing is lost yet."""
        for one in list(self):
            one.on_leaving(instance, incarnation, reason)

    def sweep(self, now: float, awake: float) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""
        for one in list(self):
            one.sweep(now, awake, STALL_S)

    def abort(self, reason: str) -> None:
        """Cut off all of them."""
        for one in list(self):
            one.abort(reason)
