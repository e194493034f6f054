"""When a process that ended by itself is started again.

The n-th crash in a row waits ``min(60, 2^(n-1))`` seconds from its end. A run that was healthy for five minutes before it
ended starts the row anew.
"""

from __future__ import annotations

FIRST_S = 1.0
LONGEST_S = 60.0
HEALTHY_S = 300.0
LOOPING = 3
"""From so many crashes in a row on, nobody waits for the process any more."""


def count_crash(previous: int, ran_s: float) -> int:
    """Crashes in a row after one more end, of a run that lasted ``ran_s`` seconds."""
    return 1 if ran_s >= HEALTHY_S else previous + 1


def delay_s(crashes: int) -> float:
    """Seconds from the end to the next start."""
    if crashes < 1:
        return 0.0
    return min(LONGEST_S, FIRST_S * 2.0 ** min(crashes - 1, 16))


def due(crashes: int, ended: float, now: float) -> float:
    """When the next start is allowed, unix seconds; an end in the future (the clock was set back) holds nothing up."""
    return now if ended > now else ended + delay_s(crashes)


def crashes_in_a_row(counted: int, alive_for_s: float | None) -> int:
    """What is left of a count: nothing once the process has been alive for five minutes (None: it is not alive)."""
    return 0 if alive_for_s is not None and alive_for_s >= HEALTHY_S else counted
