"""What a member of a group tells of itself at ``/metrics`` of its agent, in Prometheus' text form. Pure.

A member that has no data-parallel ranks of its own has no server, so nothing else is to be had of it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import InstanceName

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "xpyd_member_"


class MemberFigures(NamedTuple):
    """Figures of one member; steps begin anew with each life."""

    instance: InstanceName
    member: int
    """Its index."""
    serving: bool
    """As its readiness says."""
    running: bool
    """Its launcher runs the engine of the life."""
    lives: int
    """That this agent has had begun."""
    workers: int
    """Processes whose pulse was seen in this life; 0 before they are up."""
    steps: int
    """That they have ended."""
    silent_s: float
    """Since the leader answered; with the leader, since the engine of the most silent member has beaten."""


def exposition(found: MemberFigures) -> str:
    """The metrics page, in Prometheus' text format."""
    labels = f'{{group="{found.instance}",member="{found.member}"}}'
    families = (
        ("serving", "gauge", "Whether the group serves, as this member knows", int(found.serving)),
        ("engine_running", "gauge", "Whether the engine of this member runs", int(found.running)),
        ("lives_total", "counter", "Engines that this member was told to begin", found.lives),
        ("workers", "gauge", "Worker processes of this member whose pulse was seen", found.workers),
        ("steps_total", "counter", "Steps that these workers have ended, in this life", found.steps),
        ("silent_seconds", "gauge", "Since a follower heard of its leader, or the leader of its most silent member",
         round(found.silent_s, 3)),
    )
    return "".join(f"# HELP {PREFIX}{name} {words}\n# TYPE {PREFIX}{name} {kind}\n{PREFIX}{name}{labels} {value}\n"
                   for name, kind, words, value in families)
