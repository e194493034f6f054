"""The communicator thread: it owns every NCCL communicator of this process and is the only one that calls NCCL.

Sessions ask for groups and give messages (``join``, ``move``, ``leave``, from any thread) and are told what became of them
on their own I/O threads (``GroupMember``). ``kv.groups`` decides; this thread carries out, and asks NCCL and CUDA how far
they are. It never waits for either: making a group takes as long as the peer takes, and two engines that open groups to
each other at once must both go on.

Only an abort may take long (NCCL waits for its kernels and its helper threads), so each runs on a thread of its own. Until
it returns, the messages of that group are not given back.

What belongs to one group is guarded by itself.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

from xpyd_sidecar.kv import groups
from xpyd_sidecar.kv.groups import Groups, Way
from xpyd_sidecar.threads.commands import CommandThread
from xpyd_sidecar.transport.nccl.driver import Communicator, Driver, Message

logger = logging.getLogger(__name__)

POLL_S: Final = 0.0002
"""While something is under way. The GPU may be that much ahead of us."""
REST_S: Final = 0.2
TICK_S: Final = 0.05
DEPTH: Final = 2
"""Messages of one group at once: one is on the wire while the next one is prepared."""
FLIGHT: Final = 4
"""Messages of all groups at once, in each direction: so many slots to send from. With ``ctas`` channels each, their kernels
must find room on the GPU together, else those of two groups could wait for each other (docs/decisions/0021)."""
STOP_S: Final = 5.0


class NcclLimits(NamedTuple):
    """Bounds of one process."""

    groups: int = 16
    open_s: float = 10.0
    move_s: float = 5.0
    idle_s: float = 60.0
    hold_s: float = 3.0


class NcclUsage(NamedTuple):
    """What there is of NCCL now. ``memory``: bytes of GPU memory that the groups take."""

    groups: int
    memory: int


class GroupMember(Protocol):
    """One side of a group, called on its own I/O thread."""

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on that thread."""

    def on_group_begun(self, number: int, uid: bytes) -> None:
        """The group of this number (``join``) is being made; the peer needs ``uid`` to join."""

    def on_group_open(self, number: int) -> None:
        """The peer has joined it."""

    def on_posted(self, message: Message) -> None:
        """A message is being received: the peer may send it."""

    def on_moved(self, message: Message) -> None:
        """A message is done."""

    def on_group_lost(self, number: int, reason: str) -> None:
        """The group of this number does no more."""

    def on_released(self, messages: tuple[Message, ...]) -> None:
        """The GPU has let go of these, which were not done: the group's, or one that was given to it too late."""


@dataclass
class JoinedGroup:
    """A group that this process has joined, or is joining."""

    member: GroupMember
    way: Way
    uid: bytes | None
    comm: Communicator | None = None
    memory: int = 0
    counted: bool = False
    """``memory`` is what NCCL says."""
    flying: list[Message] = field(default_factory=list)
    """That were launched and are not done."""


class NcclThread(CommandThread):
    """The thread, for one process and its GPU."""

    def __init__(self, driver: Driver, limits: NcclLimits) -> None:
        super().__init__("xpyd-nccl", "its look at groups and deadlines")
        self.driver = driver
        self.usage = NcclUsage(0, 0)
        self._machine = Groups[Message](most=limits.groups, flight=FLIGHT, depth=DEPTH, open_s=limits.open_s,
                                      move_s=limits.move_s, idle_s=limits.idle_s, hold_s=limits.hold_s)
        self._joined: dict[int, JoinedGroup] = {}
        self._numbers = itertools.count(1)
        self._slots = list(driver.slots)
        """To send from, and free."""
        self._tick_at = 0.0
        self.thread.start()

    # --- from any thread ---

    def join(self, member: GroupMember, way: Way, uid: bytes | None = None) -> int:
        """Make a group (rank 0 mints its ``uid``) or join the peer's. Its number in this process."""
        number = next(self._numbers)
        self.tell(partial(self._join, number, member, way, uid))
        return number

    def move(self, number: int, message: Message, member: GroupMember) -> None:
        """Send or receive a message, after those given before."""
        self.tell(partial(self._move, number, message, member))

    def leave(self, number: int, reason: str) -> None:
        """Have a group ended."""
        self.tell(lambda: self._carry_out(self._machine.close(number, reason)))

    # --- on the thread ---

    def enter(self) -> None:
        """Before the first call."""
        self.driver.device.enter()

    def rest(self) -> float:
        """Seconds until the next look."""
        return POLL_S if self._machine.working else REST_S

    def poll_once(self) -> bool:
        """Ask NCCL and CUDA how far they are. Never worth asking again at once: the GPU takes its time."""
        self._poll()
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._carry_out(self._machine.tick(now))
        return False

    def end(self) -> None:
        """End all groups; threads that abort some tell when they are done."""
        until = time.monotonic() + STOP_S
        while self._joined and time.monotonic() < until:
            for number in list(self._joined):
                self.guard(partial(self._close, number))
            self.make_calls(REST_S)
        if self._joined:
            logger.error("xpyd: %d NCCL groups could not be ended within %s s", len(self._joined), STOP_S)

    def _close(self, number: int) -> None:
        self._carry_out(self._machine.close(number, "this engine stops"))

    def _poll(self) -> None:
        for number in list(self._machine.opening()):
            if self._settled(number):
                self._carry_out(self._machine.on_opened(number, time.monotonic()))
        for number in list(self._machine.launching()):
            if self._settled(number):
                joined = self._joined[number]
                assert joined.comm is not None
                self._try(number, partial(joined.comm.on_launched, joined.flying[-1]))
                self._carry_out(self._machine.on_launched(number, time.monotonic()))
        for number, message in list(self._machine.running()):
            if message.mark is not None and self._try(number, message.mark.done):
                self._carry_out(self._machine.on_piece_done(number, time.monotonic()))

    def _settled(self, number: int) -> bool:
        """Whether the call in progress on a communicator is over; it breaks the group where it has failed."""
        comm = self._joined[number].comm
        return comm is not None and self._try(number, lambda: not comm.pending())

    def _try(self, number: int, call: Callable[[], object]) -> bool:
        """Ask NCCL or CUDA. What they raise ends this group alone."""
        try:
            return call() is not False
        except Exception as error:  # noqa: BLE001  # the binding's, torch's and CUDA's have no common root
            logger.warning("xpyd: NCCL group %d: %s", number, error)
            self._carry_out(self._machine.on_broken(number, f"nccl: {error}"))
            return False

    def _join(self, number: int, member: GroupMember, way: Way, uid: bytes | None) -> None:
        self._joined[number] = JoinedGroup(member, way, uid)
        self._carry_out(self._machine.open(number, way, time.monotonic()))

    def _move(self, number: int, message: Message, member: GroupMember) -> None:
        if number in self._joined:
            self._carry_out(self._machine.move(number, message, time.monotonic()))
        else:
            member.post(partial(member.on_released, (message,)))

    def _carry_out(self, steps: list[groups.Step[Message]]) -> None:
        for step in steps:
            joined = self._joined.get(step.number)
            if joined is None:
                continue
            member = joined.member
            if isinstance(step, groups.MakeGroup):
                self._try(step.number, partial(self._begin, step.number, joined))
            elif isinstance(step, groups.LaunchPiece):
                self._try(step.number, partial(self._launch, joined, step.piece))
            elif isinstance(step, groups.EndGroup):
                self._end(step.number, joined)
            elif isinstance(step, groups.GroupOpened):
                member.post(partial(member.on_group_open, step.number))
            elif isinstance(step, groups.PieceMoved):
                self._moved(step.number, joined, step.piece)
            elif isinstance(step, groups.GroupLost):
                member.post(partial(member.on_group_lost, step.number, step.reason))
            else:
                self._over(step.number, joined, step.pieces)
        self._measure()

    def _begin(self, number: int, joined: JoinedGroup) -> None:
        uid = self.driver.unique_id() if joined.uid is None else joined.uid
        joined.comm = Communicator(self.driver, uid, joined.way)
        joined.memory = groups.group_bytes(self.driver.ctas)
        joined.member.post(partial(joined.member.on_group_begun, number, uid))

    def _launch(self, joined: JoinedGroup, message: Message) -> None:
        assert joined.comm is not None
        if joined.way is Way.SEND:
            message.memory = self._slots.pop()
        joined.flying.append(message)
        joined.comm.launch(message)
        if joined.way is Way.RECEIVE:
            joined.member.post(partial(joined.member.on_posted, message))

    def _moved(self, number: int, joined: JoinedGroup, message: Message) -> None:
        joined.flying.remove(message)
        self._give_back(joined.way, message)
        if not joined.counted and joined.comm is not None and self._settled(number):
            joined.memory, joined.counted = joined.comm.memory(), True
        joined.member.post(partial(joined.member.on_moved, message))

    def _give_back(self, way: Way, message: Message) -> None:
        """What a message was sent from may be used for another one."""
        if way is Way.SEND and message.memory is not None:
            self._slots.append(message.memory)
            message.memory = None

    def _end(self, number: int, joined: JoinedGroup) -> None:
        if joined.comm is None:
            self.tell(partial(self._ended, number))
            return
        name = f"xpyd-nccl-end-{number}"
        threading.Thread(target=self._abort, args=(number, joined.comm), name=name, daemon=True).start()

    def _abort(self, number: int, comm: Communicator) -> None:
        """On a thread of its own."""
        try:
            comm.abort()
        except Exception:
            logger.exception("xpyd: NCCL group %d could not be aborted; its memory stays taken", number)
            return
        self.tell(partial(self._ended, number))

    def _ended(self, number: int) -> None:
        self._carry_out(self._machine.on_ended(number, time.monotonic()))

    def _over(self, number: int, joined: JoinedGroup, messages: tuple[Message, ...]) -> None:
        del self._joined[number]
        for message in messages:
            self._give_back(joined.way, message)
        if joined.comm is not None:
            self.driver.streams.append(joined.comm.stream)
        joined.member.post(partial(joined.member.on_released, messages))

    def _measure(self) -> None:
        self.usage = NcclUsage(sum(one.comm is not None for one in self._joined.values()),
                               sum(one.memory for one in self._joined.values()))
