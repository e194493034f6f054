"""Identifiers that must not be mixed up."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NewType

ServiceName = NewType("ServiceName", str)
"""Name of a DisaggService: a DNS label of at most 45 characters."""
InstanceName = NewType("InstanceName", str)
"""``<service>-e<ordinal>``: one engine (all its ranks)."""
Incarnation = NewType("Incarnation", str)
"""32 hex digits minted by an engine's connector at start; a restarted engine has a new one."""
AgentId = NewType("AgentId", str)
"""Minted by an agent's process at start: 12 hex digits of the wall clock in milliseconds, then 8 random ones. Of two, the
greater began later; nothing else is read from it."""
TransferId = NewType("TransferId", str)
"""32 hex digits (128 random bits) minted by the router for one request."""
Attempt = NewType("Attempt", int)
"""Counts the router's tries for one transfer, from 1. The highest authenticated attempt wins."""
Fingerprint = NewType("Fingerprint", str)
"""32 hex digits, and in beats perhaps ``-kv`` and the versions of the KV plane, ``-`` and what stands for the service's
key; KV of equal fingerprints is interchangeable (see ``contract.fingerprint``)."""
HostPort = NewType("HostPort", str)
"""``host:port``; an IPv6 host stands in brackets."""

TRANSFER_ID = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
NAME_MAX = 45


class Role(StrEnum):
    """What an instance does now. Engines run as ``kv_both``, so a role is a matter of routing."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = str.__hash__  # Enum's own is Python's, and every pick asks for it


class State(StrEnum):
    """What an agent says of its instance."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


def split_host_port(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` → ``(host, port)``.

    Raises:
        ValueError: no port, or a port outside 1..65535.
    """
    host, sep, port = address.rpartition(":")
    if not sep or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 host in brackets, [host]:port")
    return host, int(port)


def join_host_port(host: str, port: int | str) -> HostPort:
    """The inverse of ``split_host_port``, and the one place where an address gets its brackets. ``port`` may be a word that
    stands for one.
    """
    return HostPort(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
