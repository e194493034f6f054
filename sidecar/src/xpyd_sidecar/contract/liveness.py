"""When an engine is restarted because it stands still, as agents, routers and whoever ends it say (decision 0082).

    router ──ack: stalled, hold──▶ agent ──beats: restart──▶ routers
                                     └──GET /live──▶ the kubelet's probe in the engine's container, or the supervisor:
                                                     FAILURES times in a row, PERIOD_S apart ──▶ stacks, then the end

An engine's processes write the stacks of their threads to their log when they get ``STACKS_SIGNAL``.
"""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import Final

PERIOD_S: Final = 10
"""Between two questions whether an engine lives."""
FAILURES: Final = 12
"""So many times in a row the agent says that it does not; then it is ended. Silence of the agent is none of them."""
STACKS_SIGNAL: Final = signal.SIGRTMIN + 12
"""To be sent only to a process that catches it (``catches``): it would end any other."""


class RestartWish(StrEnum):
    """What an agent says of restarting its engine."""

    NONE = ""
    """No need of it."""
    WANTED = "wanted"
    """The engine stands still, and a router holds its restart."""
    BEGUN = "begun"
    """The engine stands still and is being ended, or was, and does not serve again yet."""


def catches(status: str, number: int) -> bool:
    """Whether a process catches a signal, by the text of its ``/proc/<pid>/status``; False where that does not say."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (number - 1) & 1)
    return False
