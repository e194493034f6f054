"""One secret per service, and what is derived from it.

The service key (32 random bytes, hex in a file or a Secret) never travels. Each use has a key of its own, derived with
HMAC-SHA256 over a fixed label, so that a leaked admin token opens no KV port:

    label        used for
    membership   CURVE key pair of the router's heartbeat socket
    control      CURVE key pair of the KV control sockets
    data         HMAC challenge of the KV data links
    broadcast    CURVE key pair of broadcast queues that cross hosts; of those under vLLM's executor, from a key of the life
    admin        bearer token of the router's admin paths (/fleet), for people
    admin call   calls of the operator to routers, and
    agent call   to agents, signed (``contract.signing``)
    client keys  pepper of the digests that stand for clients' keys, and
    cache salt   what keeps a tenant's prefixes apart (``contract.tenants``)

CURVE: agents and peers derive the server's *public* key from the service key. It is never shown, so whoever completes
the handshake holds the service key; no ZAP handler is needed.

In a cluster the service key itself is derived, from the master of the operator (decision 0032), and pods have it in a file
that is named for its digest, so that another one in its place is noticed (``read``).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Literal, NewType

ServiceKey = NewType("ServiceKey", bytes)
Purpose = Literal["membership", "control", "data", "broadcast", "admin", "admin call", "agent call",
                  "client keys", "cache salt"]
_NAMED = re.compile(r"([0-9a-f]{32})\.key")


def mint() -> ServiceKey:
    """A new random service key."""
    return ServiceKey(secrets.token_bytes(32))


def of_service(master: bytes, generation: int, uid: str) -> ServiceKey:
    """The key of the service with this uid, from one generation of the master."""
    said = f"xpyd service key\n{generation}\n{uid}"
    return ServiceKey(hmac.new(master, said.encode(), hashlib.sha256).digest())


def of_life(key: ServiceKey, life: str) -> ServiceKey:
    """The key of the queues of one life of a group's engines (``contract.group``); each life has another."""
    return ServiceKey(hmac.new(key, b"xpyd life " + life.encode(), hashlib.sha256).digest())


def digest(key: ServiceKey) -> str:
    """64 hex digits that stand for the key where the key must not be; the first 8 are its id."""
    return hashlib.sha256(b"xpyd key identity\n" + key).hexdigest()


def file_name(key: ServiceKey) -> str:
    """Name of a file that holds this key and no other."""
    return f"{digest(key)[:32]}.key"


def derive(key: ServiceKey, purpose: Purpose) -> bytes:
    """The 32-byte key of one purpose."""
    return hmac.new(key, b"xpyd " + purpose.encode(), hashlib.sha256).digest()


def admin_token(key: ServiceKey) -> str:
    """Bearer token of the router's admin paths."""
    return derive(key, "admin").hex()


def read(path: Path) -> ServiceKey:
    """Read a key file: 64 hex digits and an optional newline. One that is named by ``file_name`` must hold that very key.

    Raises:
        ValueError: the file holds anything else.
        OSError: it cannot be read.
    """
    found = parse(path.read_text("ascii", errors="replace"))
    if found is None:
        raise ValueError(f"{path}: a service key is 64 hex digits")
    named = _NAMED.fullmatch(path.name)
    if named is not None and not hmac.compare_digest(digest(found)[:32], named[1]):
        raise ValueError(f"{path}: it holds another key ({digest(found)[:8]}) than the service's ({named[1][:8]}): "
                         "somebody else has made this Secret; delete it and the pod, and both are made anew")
    return found


def read_before(path: Path) -> ServiceKey | None:
    """Read the key that a service had before; None where it had none.

    Raises:
        ValueError: the file holds anything else than a key or nothing.
        OSError: it cannot be read.
    """
    return None if not path.read_text("ascii", errors="replace").strip() else read(path)


def parse(text: str) -> ServiceKey | None:
    """64 hex digits, with space around; None for anything else."""
    try:
        raw = bytes.fromhex(text.strip())
    except ValueError:
        return None
    return ServiceKey(raw) if len(raw) == 32 else None


def write(path: Path, key: ServiceKey) -> None:
    """Write a key file that only its owner can read; an existing file is kept as it is."""
    try:
        with open(path, "x", encoding="ascii", opener=_open_private) as file:
            file.write(key.hex() + "\n")
    except FileExistsError:
        return


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
