"""Who works: the state machine of a candidate for the Lease. Pure; ``kube/lease`` does the requests and keeps the time.

    follower ── holder gone, or silent for its own duration ──▶ write ── ok ──▶ leader ── renewed ──▶ leader
        ▲                                                         │ 409           │ another holder,
        └─────────────────────────────────────────────────────────┴───────────────┘ or not renewed for renew_s

Laws (those of client-go's leader election):

- Clocks of two machines are never compared. A follower measures silence on its own clock, from when it last saw the record
  change, for as long as the record says.
- A leader counts from the moment *before* it sent the renewal that was answered. ``renew_s`` after that it stops working;
  followers wait for ``lease_s``. The difference is the time it has to stop.
- Every write carries the resourceVersion that it was decided on, so that of two takers one gets 409.
- A leader that ends hands the record back with an empty holder; followers take that at once.

The record is ``spec`` of ``coordination.k8s.io/v1`` Lease.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

import msgspec

MIN_MARGIN_S: Final = 1.0
"""Least time between a leader's end of work and another's start."""


class Times(msgspec.Struct, frozen=True):
    """Seconds. ``retry_s`` is the pause between two looks at, or renewals of, the Lease."""

    lease_s: int = 10
    renew_s: float = 7.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_s <= self.lease_s - MIN_MARGIN_S:
            raise ValueError(f"a lease of {self.lease_s} s needs 0 < retry ({self.retry_s:g} s) < renew "
                             f"({self.renew_s:g} s) <= lease - {MIN_MARGIN_S:g} s")


class Write(msgspec.Struct, frozen=True):
    """Send this object: POST where it has no resourceVersion, else PUT."""

    body: dict[str, Any]


class LeaseWait(msgspec.Struct, frozen=True):
    """Look again after this many seconds; ``holder`` has the Lease."""

    seconds: float
    holder: str


class LeaseLost(msgspec.Struct, frozen=True):
    """The Lease is another's, or could not be renewed in time: stop working."""

    reason: str


class Election:
    """One candidate. ``on_lease`` is the only way to learn what the Lease says, ``on_written`` what became of a write."""

    def __init__(self, namespace: str, name: str, identity: str, times: Times) -> None:
        self.identity = identity
        self.times = times
        self.held_since: float | None = None
        """When the renewal that counts was sent; None for a follower."""
        self.holder = ""
        """Whom the Lease named when it was last seen."""
        self._place = {"namespace": namespace, "name": name}
        self._record: dict[str, Any] = {}
        self._changed_at = float("-inf")

    @property
    def leading(self) -> bool:
        """Whether this candidate is the leader, as far as it knows."""
        return self.held_since is not None

    def stop_at(self) -> float:
        """When a leader that renews no more must have begun to stop."""
        return float("-inf") if self.held_since is None else self.held_since + self.times.renew_s

    def on_lease(self, lease: dict[str, Any] | None, now: float, wall: dt.datetime) -> Write | LeaseWait | LeaseLost:
        """The Lease was read (None: there is none). Returns what to do. ``now`` is monotonic, ``wall`` for readers."""
        spec = _spec(lease)
        if spec != self._record:
            self._record = spec
            self._changed_at = now
        self.holder = str(spec.get("holderIdentity") or "")
        if self.leading and self.holder != self.identity:
            return self.step_down(f"the Lease is held by {self.holder or 'nobody'}")
        if self.leading or self.holder in {"", self.identity}:
            return self._write(lease, wall)
        left = self._changed_at + _duration(spec, self.times.lease_s) - now
        if left <= 0:
            return self._write(lease, wall)
        return LeaseWait(min(left, self.times.retry_s), self.holder)

    def on_written(self, lease: dict[str, Any], sent_at: float) -> None:
        """A write was accepted and answered with ``lease``; it was sent at ``sent_at``."""
        self._record = _spec(lease)
        self._changed_at = sent_at
        self.holder = self.identity
        self.held_since = sent_at

    def overdue(self, now: float) -> LeaseLost | None:
        """Whether a leader has not renewed for too long."""
        if self.leading and now >= self.stop_at():
            return self.step_down(f"not renewed for {self.times.renew_s:g} s")
        return None

    def step_down(self, reason: str) -> LeaseLost:
        """Be a follower from now on."""
        self.held_since = None
        return LeaseLost(reason)

    def release(self, lease: dict[str, Any] | None, wall: dt.datetime) -> dict[str, Any] | None:
        """What hands the Lease back; None where it is not ours. From now on a follower."""
        self.held_since = None
        spec = _spec(lease)
        if lease is None or spec.get("holderIdentity") != self.identity:
            return None
        given = spec | {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro(wall)}
        return {**lease, "spec": given}

    def _write(self, lease: dict[str, Any] | None, wall: dt.datetime) -> Write:
        """Our name on the Lease, renewed; whatever else is in it stays."""
        base = lease or {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": dict(self._place)}
        spec = _spec(lease)
        ours = {"holderIdentity": self.identity, "leaseDurationSeconds": self.times.lease_s, "renewTime": _micro(wall)}
        if spec.get("holderIdentity") != self.identity:
            ours |= {"acquireTime": _micro(wall), "leaseTransitions": int(spec.get("leaseTransitions") or 0) + bool(lease)}
        return Write({**base, "spec": spec | ours})


def _spec(lease: dict[str, Any] | None) -> dict[str, Any]:
    return dict((lease or {}).get("spec") or {})


def _duration(spec: dict[str, Any], default_s: int) -> float:
    """How long its holder may be silent."""
    return float(spec.get("leaseDurationSeconds") or default_s)


def _micro(wall: dt.datetime) -> str:
    """MicroTime of the Kubernetes API."""
    return wall.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
