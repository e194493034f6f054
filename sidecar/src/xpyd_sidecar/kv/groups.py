"""NCCL groups of one process: which exist, what runs in them, in which order, and when one is given up.

A group joins two ranks, prefill's (NCCL rank 0, which sends) and decode's (rank 1, which receives), and belongs to their
session. The machine serves one thread (``transport.nccl.thread``), which alone calls NCCL.

Laws
1. A group is begun once and ended once; nothing is launched before it is open, and nothing after its end has begun.
2. Pieces of a group are launched in the order in which they were given, one launch at a time: NCCL forbids any other call
   on a communicator while one is in progress.
3. No more than ``depth`` pieces of a group run at once, and no more than ``flight`` of the process in each direction. The
   directions are counted apart: else two engines with as many receives as may run would wait for each other's sends.
4. At most ``most`` groups have memory, those that are being ended included. One more takes the place of the one that has
   been idle for longest; where none is idle, it is refused.
5. What a group's pieces use is given back when they are done, or else when the group's end is complete: until then the GPU
   may still read or write it.
6. To make a group takes memory of the GPU, and so does its first piece, with which NCCL connects the two ranks. To take
   memory may wait for all kernels of the process, and a receive waits for its peer, which may be taking memory itself. So
   neither begins while a receive runs; while one is under way, or could begin if none ran, no receive is launched. The
   first piece of a group goes alone, and is no receive that runs: NCCL begins none before both ranks have called, and else
   two first pieces that cross would wait for each other. Every receive that runs ends by itself: the send that it waits
   for waits for nothing here.
7. A group that takes longer than ``hold_s`` to open, while pieces wait to be received, is given up: a peer that cannot be
   reached holds up the others no longer.
8. Opening lasts no longer than ``open_s``, a piece no longer than ``move_s`` from its turn; a group that is idle for
   ``idle_s`` ends (twice that on the sending side: decode says what is fetched, so it is the one to end it, and nothing
   that it asks for meets a group that prefill has just ended).

    WAITING ──room──▶ OPENING ──opened──▶ OPEN ──(launch ──launched──▶ running ──done──▶)*
       │                 │                  │
       └─────────────────┴──────────────────┴── close, broken, a deadline, idle, eviction ──▶ ENDING ──ended──▶ (gone)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

BUFFER_BYTES: Final = (512 << 10) + (4 << 20) + 4_915_200
"""GPU memory of one channel of one connection, 9.19 MiB: NCCL's buffers of the protocols LL (512 threads, 8 lines of 16
bytes, 8 steps), SIMPLE (``NCCL_BUFFSIZE``, which no setting of a single communicator changes) and LL128 (640 threads, 120
words of 8 bytes, 8 steps)."""
FIXED_BYTES: Final = 4 << 20
"""What a communicator has besides: work queues, peers' addresses. A guess on the safe side."""
P = TypeVar("P")


def group_bytes(ctas: int) -> int:
    """GPU memory that a group of ``ctas`` channels may take on each of its two ranks: one connection, which may be either
    rank's to hold.
    """
    return ctas * BUFFER_BYTES + FIXED_BYTES


class Way(Enum):
    """What this process does in a group."""

    SEND = "send"
    RECEIVE = "receive"


class GroupState(Enum):
    """Where one NCCL group stands."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    ENDING = "ending"


class MakeGroup(NamedTuple):
    """Begin to make a communicator; answer ``on_opened`` or ``on_broken``."""

    number: int


class LaunchPiece(NamedTuple, Generic[P]):
    """Launch a piece; answer ``on_launched`` when the call is no longer in progress, then ``on_piece_done``; or
    ``on_broken``.
    """

    number: int
    piece: P


class EndGroup(NamedTuple):
    """Abort the communicator; answer ``on_ended``, however long that takes."""

    number: int


class GroupOpened(NamedTuple):
    """To its owner: pieces are launched from now on."""

    number: int


class PieceMoved(NamedTuple, Generic[P]):
    """To its owner: a piece is done."""

    number: int
    piece: P


class GroupLost(NamedTuple):
    """To its owner: the group will do no more."""

    number: int
    reason: str


class GroupOver(NamedTuple, Generic[P]):
    """To its owner, once for each group: its memory is given back, and so are these pieces, which were never done."""

    number: int
    pieces: tuple[P, ...]


Step = MakeGroup | LaunchPiece[P] | EndGroup | GroupOpened | PieceMoved[P] | GroupLost | GroupOver[P]


@dataclass
class NcclGroup(Generic[P]):
    """One NCCL group: its direction, its state and its pieces."""

    way: Way
    since: float
    """When it was asked for; when open, when it last did something."""
    state: GroupState = GroupState.WAITING
    queued: deque[P] = field(default_factory=deque)
    launching: P | None = None
    running: deque[P] = field(default_factory=deque)
    began: deque[float] = field(default_factory=deque)
    """When those under way were launched, the one that is being launched included."""
    used: bool = False
    """Its first piece is done: both ranks are connected."""

    @property
    def flying(self) -> int:
        """Number of pieces under way."""
        return len(self.began)

    @property
    def receives(self) -> bool:
        """Whether a kernel of it waits for the peer."""
        return self.way is Way.RECEIVE and self.state is GroupState.OPEN and self.used and self.flying > 0

    @property
    def connects(self) -> bool:
        """Whether its first piece is under way."""
        return self.state is GroupState.OPEN and not self.used and self.flying > 0

    @property
    def idle(self) -> bool:
        """Whether it may be ended without loss."""
        return self.state is GroupState.OPEN and not self.queued and not self.flying

    def take_all(self) -> tuple[P, ...]:
        """Every piece that it has, oldest first."""
        out = (*self.running, *(() if self.launching is None else (self.launching,)), *self.queued)
        self.running.clear()
        self.queued.clear()
        self.began.clear()
        self.launching = None
        return out


class Groups(Generic[P]):
    """The machine. Numbers name groups and are never used twice by their owners."""

    def __init__(self, *, most: int, flight: int, depth: int, open_s: float, move_s: float, idle_s: float,
                 hold_s: float = math.inf) -> None:
        if min(most, flight, depth) < 1:
            raise ValueError(f"most {most}, flight {flight} and depth {depth} must be at least 1")
        self._most = most
        self._flight = flight
        self._depth = depth
        self._open_s = open_s
        self._move_s = move_s
        self._idle_s = idle_s
        self._hold_s = hold_s
        self._groups: dict[int, NcclGroup[P]] = {}
        self._turns: deque[int] = deque()
        """Groups that want to launch, the next one first."""

    @property
    def count(self) -> int:
        """Groups that have memory."""
        return sum(one.state is not GroupState.WAITING for one in self._groups.values())

    @property
    def working(self) -> bool:
        """Whether anything is to be asked of NCCL now."""
        return any(one.state is GroupState.OPENING or (one.flying and one.state is GroupState.OPEN)
                   for one in self._groups.values())

    def opening(self) -> Iterator[int]:
        """Groups whose communicator is being made."""
        return (number for number, one in self._groups.items() if one.state is GroupState.OPENING)

    def launching(self) -> Iterator[int]:
        """Groups with a launch in progress."""
        return (number for number, one in self._groups.items()
                if one.launching is not None and one.state is GroupState.OPEN)

    def running(self) -> Iterator[tuple[int, P]]:
        """The oldest piece that runs, of each group."""
        return ((number, one.running[0]) for number, one in self._groups.items()
                if one.running and one.state is GroupState.OPEN)

    def open(self, number: int, way: Way, now: float) -> list[Step[P]]:
        """A group is wanted."""
        if number in self._groups:
            raise ValueError(f"group {number} is there")
        self._groups[number] = NcclGroup(way, now)
        waiting = sum(one.state is GroupState.WAITING for one in self._groups.values())
        if self.count + waiting <= self._most:
            return self._begin(now)
        ending = sum(one.state is GroupState.ENDING for one in self._groups.values())
        if ending >= waiting:
            return []
        idle = [(one.since, other) for other, one in self._groups.items() if one.idle]
        if not idle:
            del self._groups[number]
            return [GroupLost(number, f"{self._most} groups are in use"), GroupOver(number, ())]
        return self._end(min(idle)[1], "another group needs its place")

    def on_opened(self, number: int, now: float) -> list[Step[P]]:
        """The communicator of group ``number`` is ready."""
        group = self._groups.get(number)
        if group is None or group.state is not GroupState.OPENING:
            return []
        group.state, group.since = GroupState.OPEN, now
        return [GroupOpened(number), *self._go_on(now)]

    def move(self, number: int, piece: P, now: float) -> list[Step[P]]:
        """A piece is to be sent or received, after those given before. Of a group that is gone it is given back."""
        group = self._groups.get(number)
        if group is None:
            return [GroupOver(number, (piece,))]
        group.queued.append(piece)
        return self._launch(now)

    def on_launched(self, number: int, now: float) -> list[Step[P]]:
        """The launch of the group's piece is no longer in progress."""
        group = self._groups.get(number)
        if group is None or group.launching is None:
            return []
        group.running.append(group.launching)
        group.launching = None
        return self._go_on(now)

    def on_piece_done(self, number: int, now: float) -> list[Step[P]]:
        """The oldest piece of the group that runs is done."""
        group = self._groups.get(number)
        if group is None or not group.running or group.state is not GroupState.OPEN:
            return []
        group.since, group.used = now, True
        group.began.popleft()
        if group.began:
            group.began[0] = max(group.began[0], now)  # it could not move before
        return [PieceMoved(number, group.running.popleft()), *self._go_on(now)]

    def on_broken(self, number: int, reason: str) -> list[Step[P]]:
        """NCCL says that the group cannot go on."""
        return self._end(number, reason)

    def close(self, number: int, reason: str) -> list[Step[P]]:
        """The owner of the group, or the peer, does not want it any more."""
        return self._end(number, reason)

    def on_ended(self, number: int, now: float) -> list[Step[P]]:
        """The communicator of the group is gone: nothing of it runs on the GPU."""
        group = self._groups.get(number)
        if group is None or group.state is not GroupState.ENDING:
            return []
        del self._groups[number]
        return [GroupOver(number, group.take_all()), *self._go_on(now)]

    def tick(self, now: float) -> list[Step[P]]:
        """Do what is due at ``now``, in monotonic seconds."""
        out: list[Step[P]] = []
        for number, group in list(self._groups.items()):
            if group.state in {GroupState.WAITING, GroupState.OPENING} and now - group.since > self._open_s:
                out += self._end(number, f"the group was not open within {self._open_s:g} s")
            elif group.state is GroupState.OPENING and now - group.since > self._hold_s and self._receives_wait():
                out += self._end(number, f"the group was not open within {self._hold_s:g} s, and others wait to receive")
            elif group.began and group.state is GroupState.OPEN and now - group.began[0] > self._move_s:
                out += self._end(number, f"a piece took longer than {self._move_s:g} s")
            elif group.idle and now - group.since > self._idle_s * (2 if group.way is Way.SEND else 1):
                out += self._end(number, "idle")
        return out + self._go_on(now)

    def _receives_wait(self) -> bool:
        return any(one.way is Way.RECEIVE and one.state is GroupState.OPEN and one.queued for one in self._groups.values())

    def _go_on(self, now: float) -> list[Step[P]]:
        """What can be begun and launched now."""
        return [*self._begin(now), *self._launch(now)]

    def _begin(self, now: float) -> list[Step[P]]:
        """Groups that wait, as far as there is room and nothing is received. Their time to open counts from here."""
        out: list[Step[P]] = []
        if any(one.receives or (one.connects and one.way is Way.RECEIVE) for one in self._groups.values()):
            return out
        for number, group in self._groups.items():
            if group.state is GroupState.WAITING and self.count < self._most:
                group.state, group.since = GroupState.OPENING, now
                out.append(MakeGroup(number))
        return out

    def _quiet(self, one: NcclGroup[P], free: dict[Way, int]) -> bool:
        """Whether a piece of a group may be launched by law 6."""
        receiving = any(other.receives for other in self._groups.values())
        if one.way is Way.SEND:
            return one.used or not receiving
        if receiving and not one.used:
            return False
        room = self.count < self._most
        for other in self._groups.values():
            if other.state is GroupState.OPENING or other.connects or (other.state is GroupState.WAITING and room):
                return False
            first = other.way is Way.SEND and other.state is GroupState.OPEN and not other.used and other.queued
            if first and free[Way.SEND] > 0:
                return False
        return True

    def _launch(self, now: float) -> list[Step[P]]:
        for number, group in self._groups.items():
            if group.state is GroupState.OPEN and group.queued and number not in self._turns:
                self._turns.append(number)
        out: list[Step[P]] = []
        free = {way: self._flight - sum(one.flying for one in self._groups.values() if one.way is way) for way in Way}
        for _ in range(len(self._turns)):
            number = self._turns.popleft()
            one = self._groups.get(number)
            if one is None or one.state is not GroupState.OPEN or not one.queued:
                continue
            room = one.flying < (self._depth if one.used else 1) and free[one.way] > 0
            if one.launching is None and room and self._quiet(one, free):
                free[one.way] -= 1
                one.launching = one.queued.popleft()
                one.began.append(now)
                out.append(LaunchPiece(number, one.launching))
                if not one.queued:
                    continue
            self._turns.append(number)
        return out

    def _end(self, number: int, reason: str) -> list[Step[P]]:
        group = self._groups.get(number)
        if group is None or group.state is GroupState.ENDING:
            return []
        lost = GroupLost(number, reason)
        if group.state is GroupState.WAITING:
            del self._groups[number]
            return [lost, GroupOver(number, group.take_all())]
        group.state = GroupState.ENDING
        return [lost, EndGroup(number)]
