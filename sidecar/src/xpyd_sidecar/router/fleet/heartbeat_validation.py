"""Which messages a roster takes: those that can be used, of its service, from who speaks for the instance now."""

from __future__ import annotations

from xpyd_sidecar.contract.ids import ServiceName, split_host_port
from xpyd_sidecar.contract.membership import AgentMessage, GoodbyeMessage, Heartbeat
from xpyd_sidecar.router.fleet.member import BeatRefused, FleetMember

VERSIONS = frozenset({1})
"""Wire versions understood."""
MAX_NAME = 253


def refuse_foreign(service: ServiceName, message: AgentMessage) -> None:
    """Another version or service. Raises Refused."""
    if message.v not in VERSIONS:
        raise BeatRefused(f"version {message.v} is not understood here (known: {', '.join(map(str, sorted(VERSIONS)))})")
    if message.service != service:
        raise BeatRefused(f"this router serves {service!r}, not {message.service!r}")


def refuse_stale(member: FleetMember, beat: Heartbeat, *, heard: bool) -> None:
    """A beat of the past, or of an agent that does not speak for the instance. Raises Refused.

    ``heard``: the agent that spoke last is not silent. Of two that are, the one that began later speaks: every router
    decides so from the beats alone, so all of them take the same one.
    """
    if beat.epoch < member.epoch:
        raise BeatRefused(f"epoch {beat.epoch} is older than {member.epoch}")
    if beat.epoch == member.epoch and beat.role is not member.role:
        raise BeatRefused(f"role {beat.role} without a new epoch: epoch {beat.epoch} is {member.role}")
    if beat.agent == member.agent:
        if beat.seq < member.seq:
            raise BeatRefused(f"late: beat {beat.seq} came after beat {member.seq}")
    elif beat.agent < member.agent and heard:
        raise BeatRefused(
            f"two agents speak as {beat.instance!r}: {beat.agent} (incarnation {beat.incarnation or 'none'}), and "
            f"{member.agent} (incarnation {member.incarnation or 'none'}), which began later and is heard")


def refuse_replaced(member: FleetMember, goodbye: GoodbyeMessage) -> None:
    """A goodbye of who does not speak for the instance any more. Raises Refused."""
    if goodbye.incarnation and goodbye.incarnation != member.incarnation:
        raise BeatRefused(f"goodbye of incarnation {goodbye.incarnation}, which has been replaced")
    if goodbye.agent != member.agent:
        raise BeatRefused(f"goodbye of agent {goodbye.agent}, which has been replaced")


def check(beat: Heartbeat) -> None:
    """Values that cannot be used, by their field; looked at once per change, not with every beat. Raises Refused."""
    if not 0 < len(beat.instance) <= MAX_NAME or not beat.instance.isprintable():
        words = f"not a name of at most {MAX_NAME} printable characters: {beat.instance[:64]!r} - at `$.instance`"
        raise BeatRefused(words)
    for field, addresses in (("http", beat.http), ("control", beat.control)):
        for index, address in enumerate(addresses):
            try:
                split_host_port(address)
            except ValueError as error:
                raise BeatRefused(f"{error} - at `$.{field}[{index}]`") from None
