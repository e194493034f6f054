"""What a launcher does next, and when it gives up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from xpyd_sidecar.contract.group import LEADER_HERE, LIFE_HERE, PORT_HERE, GroupRound, MemberState

FAILURES_MAX: Final = 3
WITHIN_S: Final = 600.0


def wanted(state: MemberState, told: GroupRound | None) -> Literal["", "begin", "end"]:
    """What is to be done about the engine. A life that has ended here is never begun again."""
    life = told.life if told is not None else ""
    if state.running:
        return "end" if life != state.life else ""
    return "begin" if life and life != state.life else ""


def given_up(failures: Sequence[float], now: float) -> bool:
    """Whether engines have ended by themselves so often, and so lately, that somebody else is to count from here on."""
    return sum(now - at <= WITHIN_S for at in failures) >= FAILURES_MAX


def filled(args: Sequence[str], told: GroupRound) -> list[str]:
    """The engine's arguments, with what is known only now."""
    found = {LIFE_HERE: told.life, LEADER_HERE: told.leader, PORT_HERE: str(told.port)}
    out = []
    for argument in args:
        for mark, text in found.items():
            argument = argument.replace(mark, text)  # noqa: PLW2901  # an argument may have several
        out.append(argument)
    return out
