"""Names for requests and transfers: 128 random bits each, asked of the system for many at a time.

A process of its own draws its own: nothing of this is shared with a child.
"""

from __future__ import annotations

import os

_BYTES = 16
_AT_ONCE = 64
_drawn: list[str] = []


def fresh() -> str:
    """32 hex digits that nobody can guess and nobody has seen."""
    if not _drawn:
        made = os.urandom(_BYTES * _AT_ONCE).hex()
        _drawn.extend([made[at:at + 2 * _BYTES] for at in range(0, len(made), 2 * _BYTES)])
    return _drawn.pop()


os.register_at_fork(after_in_child=_drawn.clear)
