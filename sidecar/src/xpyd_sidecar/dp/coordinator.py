"""The join of what all ranks say: the coordinator's state (rpc), or what a rank reads from all lines (shm). Its laws:

    step    = max over ranks of what they asked for                     only grows
    frozen  = min over ranks of their votes                             only grows; ``at`` is ``step`` when it grew
    leave   = every rank leaves

A vote comes with everything its rank has asked for, and a rank asks for nothing after its vote. So when the last vote is
in, ``step`` is final for this pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xpyd_sidecar.dp.frames import VERSION, Grant, Want
from xpyd_sidecar.errors import ProtocolError


class Coordinator(NamedTuple):
    """The coordinator's state; ``receive`` returns the next one."""

    epoch: int
    votes: tuple[int, ...]
    """By rank."""
    leaving: tuple[bool, ...]
    step: int = 0
    frozen: int = 0
    at: int = 0

    @classmethod
    def initial(cls, epoch: int, size: int) -> Coordinator:
        """The state of ``size`` ranks before any of them has sent a frame."""
        return cls(epoch, (0,) * size, (False,) * size)

    @property
    def grant(self) -> Grant:
        """What the ranks should know; the heartbeat."""
        return Grant(VERSION, self.epoch, self.step, self.frozen, self.at, all(self.leaving))

    def receive(self, want: Want) -> Coordinator:
        """Return the state after a rank's frame. Where ``grant`` differs then, all ranks must be sent it.

        Raises:
            ProtocolError: there is no such rank.
        """
        if want.epoch != self.epoch:
            return self
        if want.rank >= len(self.votes):
            raise ProtocolError(f"rank {want.rank}", f"there are {len(self.votes)} ranks")
        votes = _with(self.votes, want.rank, max(self.votes[want.rank], want.vote))
        leaving = _with(self.leaving, want.rank, self.leaving[want.rank] or want.leaving)
        step = max(self.step, want.step)
        frozen = min(votes)
        at = step if frozen > self.frozen else self.at
        return Coordinator(self.epoch, votes, leaving, step, frozen, at)


def join(epoch: int, votes: Sequence[int], steps: Sequence[int], leaving: Sequence[bool]) -> Grant:
    """The grant that follows from all ranks' lines in shared memory, by rank.

    ``votes`` MUST have been read before ``steps``.
    """
    step = max(steps)
    return Grant(VERSION, epoch, step, min(votes), step, all(leaving))


def _with(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1:])
