"""How often instances of one role were asked for one request, and who of them failed."""

from __future__ import annotations

from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.router.serving.instructions import SendAttempt

MAX_REFUSALS = 8
"""Refused connections of one request that do not count as legs: those engines never saw it."""
NOBODY: frozenset[InstanceName] = frozenset()


class RoleAttempts:
    """The attempts of one role. They are counted here, and nowhere else."""

    __slots__ = ("bad", "begun", "open", "sent", "tries")

    def __init__(self) -> None:
        self.open: SendAttempt | None = None
        self.begun = False
        """The first event of what is open came."""
        self.sent = self.tries = 0
        """And of those, how many since the answer came further."""
        self.bad = NOBODY
        """Who failed since then."""


def answer_words(leg: SendAttempt, status: int) -> str:
    """What the instance of a leg answered, in words."""
    return f"instance {leg.target.instance} answered {status}"
