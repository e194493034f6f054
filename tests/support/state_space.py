"""Walks through all states of a model, breadth first, so that the way to a bad state is a shortest one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

StateT = TypeVar("StateT", bound=Hashable)


class Found(NamedTuple):
    """What became of an exploration."""

    verdict: str
    """``ok``, ``cut off`` (more states than allowed), or what is wrong with the last state."""
    states: int
    transitions: int
    trace: tuple[str, ...]
    """The way to the bad state."""


def all_states(first: StateT, moves: Callable[[StateT], Sequence[tuple[str, StateT]]],
               fault: Callable[[StateT, Sequence[tuple[str, StateT]], int], str], most: int) -> Found:
    """``moves``: what may happen in a state, and what follows; ``fault``: what is wrong with one, given these and how many
    states have been met; ``most``: states that are allowed.
    """
    came: dict[StateT, tuple[StateT, str] | None] = {first: None}
    queue, transitions = deque([first]), 0
    while queue:
        state = queue.popleft()
        following = moves(state)
        transitions += len(following)
        if wrong := fault(state, following, len(came)):
            return Found(wrong, len(came), transitions, _way(came, state))
        if len(came) > most:
            return Found("cut off", len(came), transitions, ())
        for name, after in following:
            if after not in came:
                came[after] = (state, name)
                queue.append(after)
    return Found("ok", len(came), transitions, ())


def _way(came: dict[StateT, tuple[StateT, str] | None], state: StateT) -> tuple[str, ...]:
    names: list[str] = []
    while (before := came[state]) is not None:
        state, name = before
        names.append(name)
    return tuple(reversed(names))
