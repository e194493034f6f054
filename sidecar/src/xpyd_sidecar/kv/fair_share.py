"""The rule by which nobody takes the whole of something that several share.

A holder may have up to ``SHARE`` times what is free after it has taken its part (dynamic thresholds: Choudhury and Hahne,
"Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998). So one that stops keeps at most
SHARE / (SHARE + 1) of the bound from the others, and a second one as much of the rest.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 4


def is_fair(mine: int, left: int) -> bool:
    """Whether a holder may have ``mine`` units where ``left`` units are free after it has taken them."""
    return mine <= SHARE * left


def headroom(mine: int, left: int) -> int:
    """Units that a holder of ``mine`` units may take of ``left`` free ones; below 0 where it has too many already."""
    return (SHARE * left - mine) // (SHARE + 1)
