"""Where a process runs: what tells hosts apart, and the network stacks of one host."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
NETWORK: Final = Path("/proc/self/ns/net")


def host() -> str:
    """What tells two kernels apart; containers of one host have the same. Empty where that cannot be known."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def place() -> str:
    """The same in two processes if shared memory can be handed over between them through an abstract unix socket.

    Where that cannot be known, a name that nobody else has.
    """
    try:
        return f"{BOOT_ID.read_text(encoding='ascii').strip()} {os.stat(NETWORK).st_ino}"
    except OSError:
        return secrets.token_hex(16)
