"""What happened, until the planner tells it."""

from __future__ import annotations

import msgspec

from xpyd_operator.plan.round import Round


class News(msgspec.Struct, frozen=True):
    """One thing that happened."""

    reason: str
    message: str
    warning: bool = False


def news(_before: Round | None, _after: Round) -> tuple[News, ...]:
    """Nothing."""
    return ()
