"""The requests that are being served: one set, and what the roster and the clock say to all of them."""

from __future__ import annotations

from typing import Protocol

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import GenerationRequest
from xpyd_sidecar.router.fleet.member import Pair
from xpyd_sidecar.router.stream.failures import FailureReason

STALL_S = 10.0
"""Silence on an open leg after which its engine is probed."""


class InFlightRequest(Protocol):
    """A request that is being served (``request.Serving``, ``fast_path.FastPath``)."""

    def handed_over(self) -> tuple[GenerationRequest, Pair] | None:
        """Once it has ended well: what was asked, and of which pair. None: not with KV from prefill, or with trouble."""

    def on_lost(self, instance: str, incarnation: str, reason: FailureReason) -> None:
        """The roster says that this incarnation will never answer."""

    def on_leaving(self, instance: str, incarnation: str) -> None:
        """The incarnation ends soon."""

    def sweep(self, now: float, awake: float) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""

    def abort(self, reason: str) -> None:
        """The router stops before this request could end."""


class InFlight(set[InFlightRequest]):
    """All requests that one process serves. What one of them hears may end others."""

    def lost(self, instance: InstanceName, incarnation: Incarnation, reason: FailureReason) -> None:
        """The roster says that this incarnation will never answer."""
        for one in list(self):
            one.on_lost(instance, incarnation, reason)

    def leaving(self, instance: InstanceName, incarnation: Incarnation, _: str) -> None:
        """The time of its drain is nearly over: what can go on elsewhere does, while nothing is lost yet."""
        for one in list(self):
            one.on_leaving(instance, incarnation)

    def sweep(self, now: float, awake: float) -> None:
        """Called every second."""
        for one in list(self):
            one.sweep(now, awake)

    def abort(self, reason: str) -> None:
        """Cut off all of them."""
        for one in list(self):
            one.abort(reason)
