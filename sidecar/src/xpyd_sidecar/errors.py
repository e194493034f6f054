"""The sidecar's errors.

    SidecarError
    ├── ConfigError        a setting is wrong: ours to fix, said at start with the field
    ├── OurFault           a bug on this side (an invariant does not hold)
    └── PeerError          the other side is at fault; carries its name
        ├── AuthError      it does not hold the service key
        ├── Incompatible   version or fingerprint differ; says which field
        ├── ProtocolError  it sent what the protocol does not allow
        │   └── ChecksumError  what came is not what was sent
        └── PeerGone       connection refused, reset or silent past its deadline
"""

from __future__ import annotations


class SidecarError(Exception):
    """Root of the tree."""


class ConfigError(SidecarError):
    """A setting is wrong. The message names the field and what would be right."""


class OurFault(SidecarError):
    """An invariant of this side does not hold."""


class PeerError(SidecarError):
    """The peer is at fault."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class AuthError(PeerError):
    """The peer does not hold the service key."""


class Incompatible(PeerError):
    """Version or fingerprint differ."""


class ProtocolError(PeerError):
    """The peer sent what the protocol does not allow."""


class ChecksumError(ProtocolError):
    """What came is not what the peer sent."""


class PeerGone(PeerError):
    """Refused, reset, or silent past its deadline."""
