"""Whom a request is sent to."""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName


class EngineTarget(msgspec.Struct, frozen=True):
    """Where a leg goes."""

    instance: InstanceName
    incarnation: Incarnation
    fingerprint: Fingerprint
    http: HostPort
    control: HostPort
    """KV control address of the chosen DP rank; empty where the instance has none."""
    dp_rank: int | None = None
    """Set where one HTTP server stands before several ranks: it is told by a header."""
    p2p: str = ""
    """Set for an older engine: its address in request ids, by which it pairs."""


class Pair(msgspec.Struct, frozen=True):
    """What a request gets."""

    decode: EngineTarget
    prefill: EngineTarget | None
