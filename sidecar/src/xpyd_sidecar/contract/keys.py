"""One secret per service, and what is derived from it.

The service key (32 random bytes, hex in a file or a Secret) never travels. Each use has a key of its own, derived with
HMAC-SHA256 over a fixed label, so that a leaked admin token opens no KV port:

    label        used for
    membership   CURVE key pair of the router's heartbeat socket
    control      CURVE key pair of the KV control sockets
    data         HMAC challenge of the KV data links
    broadcast    CURVE key pair of broadcast queues that cross hosts
    admin        bearer token of the router's admin paths (/fleet)
    agent        bearer token of who tells agents their role

CURVE: agents and peers derive the server's *public* key from the service key. It is never shown, so whoever completes
the handshake holds the service key; no ZAP handler is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal, NewType

ServiceKey = NewType("ServiceKey", bytes)
Purpose = Literal["membership", "control", "data", "broadcast", "admin", "agent"]


def mint() -> ServiceKey:
    """A new random service key."""
    return ServiceKey(secrets.token_bytes(32))


def derive(key: ServiceKey, purpose: Purpose) -> bytes:
    """The 32-byte key of one purpose."""
    return hmac.new(key, b"xpyd " + purpose.encode(), hashlib.sha256).digest()


def admin_token(key: ServiceKey) -> str:
    """Bearer token of the router's admin paths."""
    return derive(key, "admin").hex()


def agent_token(key: ServiceKey) -> str:
    """Bearer token of who tells agents their role; who may look at the fleet need not be able to change it."""
    return derive(key, "agent").hex()


def read(path: Path) -> ServiceKey:
    """Read a key file: 64 hex digits and an optional newline.

    Raises:
        ValueError: the file holds anything else.
        OSError: it cannot be read.
    """
    text = path.read_text("ascii", errors="replace").strip()
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise ValueError(f"{path}: a service key is 64 hex digits")
    return ServiceKey(raw)


def write(path: Path, key: ServiceKey) -> None:
    """Write a key file that only its owner can read; an existing file is kept as it is."""
    try:
        with open(path, "x", encoding="ascii", opener=_open_private) as file:
            file.write(key.hex() + "\n")
    except FileExistsError:
        return


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
