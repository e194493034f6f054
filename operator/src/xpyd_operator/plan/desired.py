"""What is wanted of one service, as far as the planner must know it."""

from __future__ import annotations

import hashlib
from typing import Any, Final, NewType

import msgspec

from xpyd_sidecar.contract.adapters import AdapterOrder
from xpyd_sidecar.contract.ids import Role, ServiceName

Revision = NewType("Revision", str)
"""12 hex digits over everything a process is rendered from; a difference means that it must be replaced."""


STARTUP_S: Final = 1800.0
"""What a start has where the document says nothing (``engine.startupTimeout``)."""


class RoleTarget(msgspec.Struct, frozen=True):
    """How many instances of one role, and of which revision."""

    replicas: int
    revision: Revision
    max_surge: int = 1
    """Instances that may exist above the replicas while a revision is replaced, leaving ones included."""
    max_unavailable: int = 0
    """Instances that serve and may be missing while a revision is replaced."""
    parts: int = 1
    """Of one instance, each with a place of its own (``placing``)."""


class DesiredService(msgspec.Struct, frozen=True):
    """What a service is to be like, as its document and pools say. Times are in seconds."""

    service: ServiceName
    prefill: RoleTarget
    decode: RoleTarget
    router: Revision | None
    """Revision of the router process; None where no process of its own routes."""
    drain_timeout_s: float = 600.0
    startup_timeout_s: float = STARTUP_S
    hang_timeout_s: float = 120.0
    """How long an engine that was ready may fail its health checks before it is restarted."""
    max_sidecars: int = 0
    """Most decode instances whose own router serves clients; 0: routers are elsewhere."""
    keep_terminating: bool = True
    """An instance that drains can be taken back (False: its removal has begun with the drain, as with pods)."""
    switches: bool = False
    """Instances of the two roles are equal but for the role: one can take the other role while it runs."""
    no_switch: str = ""
    """Why not, in words; empty where they can, or nobody asked."""
    switch_window_s: float = 0.0
    """How long a surplus of one role waits for the other to want it; instances that began to start so lately are not
    worth waiting for when one that runs could switch."""
    counts_since: float = 0.0
    """Since when the counts are what they are, unix seconds, where each can change without the other; else 0."""
    held: str = ""
    """Which limit keeps the counts from what was asked for, in words; empty where none does."""
    limited: tuple[str, str] = ("", "")
    """The part of ``held`` that is about prefill, and about decode."""
    uid: str = ""
    """Of the service, where it has one: by it services that would do the same at the same time are kept apart."""
    place_after: float = 0.0
    """Before this, unix seconds, no instance of several parts is made (``placing``)."""
    gang: bool = False
    """A scheduler is told which parts are one instance, and places all of them or none (``placing``)."""
    same_places: bool = False
    """A place of an instance of one role would do for one of the other (``stranded``)."""
    decode_first: bool = False
    """Where nobody of either role is there, decode is made first: it serves alone until prefill is there (``stranded``)."""
    adapters: AdapterOrder = AdapterOrder()
    """What agents are told of LoRA adapters."""
    suspended_since: float = 0.0
    """Since when nothing of it is to run, unix seconds, as far as this process has seen; 0: it is not suspended."""
    stopping: bool = False
    """The service is to end: router first, so that nothing new comes in, then the instances."""

    def target(self, role: Role) -> RoleTarget:
        """The part that is about one role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def shape(self) -> str:
        """Wanted counts as text: ``1P3D`` for one prefill and three decode instances."""
        return shape(self.prefill.replicas, self.decode.replicas)


def shape(prefill: int, decode: int) -> str:
    """Counts of prefill and decode instances as text: 1 and 3 are ``1P3D``."""
    return f"{prefill}P{decode}D"


def revision_of(parts: Any) -> Revision:
    """Hash of what something is rendered from: any msgspec-encodable value, dictionaries in any order."""
    raw = msgspec.json.encode(parts, order="sorted")
    return Revision(hashlib.sha256(b"xpyd revision 1\n" + raw).hexdigest()[:12])
