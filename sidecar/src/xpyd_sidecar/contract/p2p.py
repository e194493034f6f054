"""The older heartbeat, as engines with a P2P or MoRIIO connector and routers of the field send and read it.

    {"type": "P"|"D", "http_address": "ip:port", "zmq_address": "ip:port"}                  P2P connectors
    … "zmq_address": "host:IP,handshake:PORT,notify:PORT", "dp_size", "tp_size",
      "transfer_mode": "READ"|"WRITE"                                                       MoRIIO
    … "role": "P"|"D", "request_address": "http://ip:port/path"                             as other routers read it

A msgpack map in one frame over plain ZMQ (DEALER to ROUTER), every 3 s, with the identity ``ip:kv_port``. There is no
version, acknowledgement, goodbye, load or authentication. Such engines pair by request id: both legs carry the same one,
which holds the ``zmq_address`` of both engines.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Role, join_host_port, split_host_port

MAX_MESSAGE: Final = 4096
INTERVAL_S: Final = 3.0
"""Between two heartbeats of such an engine."""
FINGERPRINT: Final = Fingerprint("p2p")
"""Of engines that say nothing of their KV: they pair among themselves. No digest begins like this, those are hex digits."""
_ROLES: Final = {"P": Role.PREFILL, "D": Role.DECODE, "prefill": Role.PREFILL, "decode": Role.DECODE}
_ZMQ: Final = re.compile(r"[A-Za-z0-9.:,\[\]%-]{1,256}")
"""It becomes part of a header, and connectors take it out again by what stands around it."""
_MODES: Final = ("", "READ", "WRITE")


class P2pBeat(msgspec.Struct, frozen=True):
    """One heartbeat of an older engine, whatever its variant."""

    role: Role
    http: HostPort
    zmq: str
    """As the engine wrote it."""
    tp_size: int = 1
    transfer_mode: str = ""
    """Not empty: the engines also want ``kv_transfer_params``."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Engines pair within one."""
        return Fingerprint(f"{FINGERPRINT}-{self.transfer_mode.lower()}-tp{self.tp_size}") if self.transfer_mode \
            else FINGERPRINT


class _Map(msgspec.Struct, frozen=True):
    type: str = ""
    role: str = ""
    http_address: str = ""
    request_address: str = ""
    zmq_address: str = ""
    dp_size: int = 1
    tp_size: int = 1
    transfer_mode: str = ""


_decode = msgspec.msgpack.Decoder(_Map, strict=False).decode


def decode(raw: bytes | memoryview) -> P2pBeat:
    """Read a heartbeat of any variant; fields that are not known are ignored.

    Raises:
        ValueError: names the field that is missing, wrong, or asks for what is not served.
    """
    try:
        found = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a heartbeat known here: {error}") from None
    role = _ROLES.get(found.type) or _ROLES.get(found.role)
    if role is None:
        raise ValueError(f"type: {(found.type or found.role)[:64]!r} is neither 'P' nor 'D'")
    if not _ZMQ.fullmatch(found.zmq_address):
        raise ValueError(f"zmq_address: {found.zmq_address[:64]!r} is not an address")
    if found.transfer_mode not in _MODES:
        raise ValueError(f"transfer_mode: {found.transfer_mode[:64]!r} is neither 'READ' nor 'WRITE'")
    if found.tp_size < 1:
        raise ValueError(f"tp_size: must be at least 1, not {found.tp_size}")
    if found.dp_size != 1:
        raise ValueError(f"dp_size: {found.dp_size} ranks behind one address are not served: start one engine per rank")
    return P2pBeat(role, _http(found), found.zmq_address, found.tp_size, found.transfer_mode)


def is_p2p(fingerprint: Fingerprint) -> bool:
    """Whether instances of this fingerprint are older engines."""
    return fingerprint.startswith(FINGERPRINT)


def wants_params(fingerprint: Fingerprint) -> bool:
    """Whether they also want ``kv_transfer_params``."""
    return fingerprint != FINGERPRINT


def _http(found: _Map) -> HostPort:
    field = "http_address" if found.http_address else "request_address"
    text = (found.http_address or found.request_address).removeprefix("http://").partition("/")[0]
    try:
        return join_host_port(*split_host_port(text))
    except ValueError as error:
        raise ValueError(f"{field}: {str(error)[:200]}") from None
