"""How much one connection may do before the others of its thread have their turn."""

from __future__ import annotations

from typing import Final

from xpyd_sidecar.threads.loop import Loop

IO_AT_ONCE: Final = 4 << 20
"""Bytes moved for one connection where others are ready, too."""
ALONE_AT_ONCE: Final = 128 << 20
"""The same where no other one is ready: each time that this thread takes the interpreter up again costs it its caches. A
call ends when another one is.
"""
PATIENCE_MS: Final = 2
"""How long a call may wait for its socket where no other one is ready."""


def bytes_at_once(loop: Loop) -> int:
    """Bytes of a turn that begins now."""
    return ALONE_AT_ONCE if loop.alone else IO_AT_ONCE


def patience_ms(loop: Loop) -> int:
    """How long a call that begins now may wait for its socket; 0: not at all."""
    return PATIENCE_MS if loop.alone else 0
