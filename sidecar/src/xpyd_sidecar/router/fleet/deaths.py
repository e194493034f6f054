"""Which ends of an engine are a death by itself: told from what a roster is about to hear.

    its agent beats, and GET /health is refused, broken off or answered with an error   DIED
    it did not drain, and another incarnation beats in its place                         DIED: it was restarted at once
    GET /health is answered with success                                                 LIVES
    it drains, or has said goodbye                                                       LIVES: it ends in order
    its agent is silent as well                                                          LOST with its machine
    no answer to GET /health in time                                                     nothing is known

Known weakness: where a machine goes in such a way that its ports are refused at once, the engine counts as dead until the
silence of its agent is noticed, and as lost from then on.
"""

from __future__ import annotations

from enum import Enum

from xpyd_sidecar.contract.ids import Incarnation, State
from xpyd_sidecar.contract.membership import Heartbeat, Up
from xpyd_sidecar.router.fleet.member import FleetMember, Probed


class DeathVerdict(Enum):
    """How an incarnation ended, or that it did not."""

    DIED = "died"
    LIVES = "lives"
    LOST = "lost"


def by_probe(member: FleetMember | None, result: Probed, *, silent: bool) -> DeathVerdict | None:
    """By a probe of the incarnation that ``member`` was before; None: nothing is known. ``silent``: its agent is."""
    if result is Probed.HEALTHY:
        return DeathVerdict.LIVES
    if member is None:
        return None
    if silent:
        return DeathVerdict.LOST
    if result is Probed.SILENT:
        return None
    return DeathVerdict.LIVES if member.state is State.DRAINING else DeathVerdict.DIED


def by_message(member: FleetMember | None, message: Up) -> tuple[Incarnation, DeathVerdict] | None:
    """By a message that was taken, of the incarnation that was there before it; None: it says nothing of one."""
    if member is None or not member.incarnation:
        return None
    if not isinstance(message, Heartbeat):
        return member.incarnation, DeathVerdict.LIVES
    if message.incarnation == member.incarnation:
        return None
    return member.incarnation, DeathVerdict.LIVES if member.state is State.DRAINING else DeathVerdict.DIED
