"""What a step tells a backend to do. Names and revisions only: addresses and ports are the backend's."""

from __future__ import annotations

import msgspec

from xpyd_operator.plan.absent import Waiting
from xpyd_operator.plan.desired import Revision
from xpyd_sidecar.contract.ids import InstanceName, Role


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Make an instance."""

    instance: InstanceName
    ordinal: int
    role: Role
    revision: Revision

    def __str__(self) -> str:
        return f"create {self.instance} as {self.role}"


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Ask an instance to take nothing new and to finish what it has."""

    instance: InstanceName
    reason: str

    def __str__(self) -> str:
        return f"drain {self.instance}: {self.reason}"


class Undrain(msgspec.Struct, frozen=True, tag="undrain"):
    """Take a drain back: the instance is wanted again, and taking new work costs nothing."""

    instance: InstanceName
    reason: str

    def __str__(self) -> str:
        return f"undrain {self.instance}: {self.reason}"


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """End an instance and everything of it; nothing that matters runs there."""

    instance: InstanceName
    reason: str
    pause_s: float = 0.0
    """For so long no instance of several parts is made, so that others can have its places (``placing``)."""

    def __str__(self) -> str:
        return f"remove {self.instance}: {self.reason}"


class Switch(msgspec.Struct, frozen=True, tag="switch"):
    """Give a running instance the other role. What it does in the old one goes on to its end; it routes no more."""

    instance: InstanceName
    role: Role
    epoch: int
    """Of the new role."""
    reason: str

    def __str__(self) -> str:
        return f"switch {self.instance} to {self.role}: {self.reason}"


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Start one process of an instance again, of the revision that the instance has; end it first where it still runs."""

    instance: InstanceName
    unit: str
    reason: str

    def __str__(self) -> str:
        return f"restart {self.unit} of {self.instance}: {self.reason}"


class Label(msgspec.Struct, frozen=True, tag="label"):
    """Say which instances route: ``roster``: agents beat to its router; ``router``: clients reach it."""

    instance: InstanceName
    roster: bool
    router: bool

    def __str__(self) -> str:
        what = "routes" if self.router else "learns the roster" if self.roster else "does not route"
        return f"{self.instance} {what}"


class StartRouter(msgspec.Struct, frozen=True, tag="start_router"):
    """Start the router, or start it again; end the old one first where it still runs."""

    revision: Revision
    reason: str

    def __str__(self) -> str:
        return f"start the router: {self.reason}"


class StopRouter(msgspec.Struct, frozen=True, tag="stop_router"):
    """Let the router finish its streams and end it."""

    reason: str

    def __str__(self) -> str:
        return f"stop the router: {self.reason}"


Action = Create | Drain | Undrain | Remove | Switch | Restart | Label | StartRouter | StopRouter


class Plan(msgspec.Struct, frozen=True):
    """The outcome of one step."""

    actions: tuple[Action, ...] = ()
    waits: tuple[Waiting, ...] = ()
    """What is wanted and not done yet, and why."""

    @property
    def settled(self) -> bool:
        """Nothing to do and nothing held up."""
        return not self.actions and not self.waits
