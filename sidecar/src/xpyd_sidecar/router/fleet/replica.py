"""Events of a roster as values, so that several processes can hold the same one.

    owner                                            worker
    event ── apply(roster) ── encode ──▶ socket ──▶ decode ── apply(replica): same instances, same states

Laws
  * A roster changes by ``apply`` alone (``Roster.heard`` is what it does with most beats), and the time is in the event:
    replicas that get the same events in the same order from the same beginning are equal in all but the open legs, which
    each process counts for itself.
  * ``beginning`` of a roster makes an equal one from nothing. It needs each instance's latest beat alone, since a beat says
    everything; what suspends it is said again.
  * What makes instances leave the roster by time (ticks, probes) is the owner's to count: it tells who left.
  * A worker's own verdict (a refused connection) may be applied ahead of its turn: it can only suspend, and the owner's
    answer to it comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import WIRE_VERSION, Goodbye, Heartbeat, Up
from xpyd_sidecar.contract.p2p import is_p2p
from xpyd_sidecar.router.fleet.member import BeatRefused, Instruction, Probed
from xpyd_sidecar.router.fleet.roster import Roster


class Message(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat or a goodbye came."""

    at: float
    message: Up


class RefusedAt(msgspec.Struct, frozen=True, tag=True):
    """The data path could not connect."""

    at: float
    instance: InstanceName
    incarnation: Incarnation
    reason: str


class Doubt(msgspec.Struct, frozen=True, tag=True):
    """An engine broke a connection, failed a request or is silent."""

    at: float
    instance: InstanceName
    incarnation: Incarnation


class ProbeEnded(msgspec.Struct, frozen=True, tag=True):
    """A health probe ended."""

    at: float
    instance: InstanceName
    incarnation: Incarnation
    result: Probed
    detail: str


class RosterTick(msgspec.Struct, frozen=True, tag=True):
    """Time went on."""

    at: float


Event = Message | RefusedAt | Doubt | ProbeEnded | RosterTick
_TAKERS: dict[type[Event], Callable[..., list[Instruction]]] = {
    Message: Roster.on_message, RefusedAt: Roster.on_refused, Doubt: Roster.on_doubt, ProbeEnded: Roster.on_probe,
    RosterTick: Roster.on_tick}


def apply(roster: Roster, event: Event) -> list[Instruction]:
    """Apply an event. Raises BeatRefused: a message that is not taken; nothing has changed."""
    return _TAKERS[type(event)](roster, *msgspec.structs.astuple(event))


def follow(roster: Roster, event: Event) -> None:
    """Apply an event that the owner took to a replica. What the owner took is taken, whatever was known here."""
    try:
        apply(roster, event)
    except BeatRefused:
        if isinstance(event, Message):
            forget(roster, event.at, event.message.instance)
            if isinstance(event.message, Heartbeat):
                apply(roster, event)


def forget(roster: Roster, at: float, name: InstanceName) -> None:
    """The owner's roster does not have this instance any more."""
    roster.on_message(at, Goodbye(v=WIRE_VERSION, service=roster.service, instance=name))


def catch_up(roster: Roster, events: Iterable[Event]) -> None:
    """Make a replica that missed events equal again; ``events`` are a ``Beginning``'s."""
    given = list(events)
    names = {event.message.instance for event in given if isinstance(event, Message)}
    for member in roster.members():
        if member.name not in names:
            forget(roster, member.beat_at, member.name)
        elif member.suspended:
            roster.on_probe(member.beat_at, member.name, member.incarnation, Probed.HEALTHY, "")
    for event in given:
        follow(roster, event)


class Beginning:
    """Remembers what makes an equal roster from nothing: the latest beat of each instance."""

    def __init__(self) -> None:
        self._beats: dict[InstanceName, Message] = {}

    def note(self, event: Event) -> None:
        """An event that was applied."""
        if isinstance(event, Message):
            if isinstance(event.message, Heartbeat):
                self._beats[event.message.instance] = event
            elif isinstance(event.message, Goodbye):
                self._beats.pop(event.message.instance, None)

    def events(self, roster: Roster) -> list[Event]:
        """The events, in order of time; instances that are gone are forgotten."""
        members = {member.name: member for member in roster.members()}
        self._beats = {name: beat for name, beat in self._beats.items() if name in members}
        beats = sorted(self._beats.values(), key=lambda beat: beat.at)
        return [*beats, *(RefusedAt(beat.at, name, member.incarnation, member.suspended) if member.suspended else
                          ProbeEnded(beat.at, name, member.incarnation, Probed.HEALTHY, "")
                          for name, beat in self._beats.items()
                          if (member := members[name]).suspended or is_p2p(member.fingerprint))]
