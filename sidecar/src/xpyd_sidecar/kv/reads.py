"""Reads of peers' memory by a library that cannot cancel them: when one is begun, which may be believed, what they leave.

One machine for one rank. It serves the thread that reads (``transport.nixl.thread``). A read fills a slot, which is memory
of the rank's own, or a range that whoever orders it has. Numbers of orders are not used twice in a session.

Laws
1. What was read counts only when prefill's ticket of this session was read after it, and was the right one. Prefill wipes
   the ticket before it uses the memory for something else: a read that is done says only that bytes have come.
2. A session has one read of its ticket under way at a time. It speaks for what was done before it was begun, and for
   nothing else.
3. What a read fills is not used again before it is done or has failed, or the agent that reads has ended. A read of a
   session that has ended is stuck until then: nobody can stop it but by the end of the agent.
4. Each order is answered once: by ``HandOver``, or by ``Drop`` when nothing will write into what it was to fill.
5. All sessions together have ``READS`` reads of ``READ_BYTES`` under way, one of them an eighth, or one order where that is
   larger. Sessions take turns.
6. Where something is under way in a session, something of it must be done within ``silence_s``; then the session is lost.
7. The agent ends when a quarter of ``READS`` is stuck, or something for ``fence_s``; not before others' reads are done, or
   have had ``DRAIN_S``. What was under way in sessions that live is read again by the next agent.

    order ─▶ queued ──room──▶ flying ──done──▶ here ──(the next ticket)──▶ handed over ──placed──▶ free
                                 └─ its session ends: stuck ──done, or the agent has ended──▶ dropped, free
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xpyd_sidecar.kv.ring import SHARE, Ring
from xpyd_sidecar.kv.session_bodies import NixlMemory

TICKET_BYTES: Final = 32
METADATA_MAX: Final = 32 << 10
"""Of NIXL's description of a process: some hundred bytes, and as much more for each network device and each region."""
READ_BYTES: Final = 4 << 20
"""Of one read; larger orders are several."""
READS: Final = 64
FENCE_PART: Final = 4
"""One part of so many that is stuck ends the agent."""
DRAIN_S: Final = 0.5


class ReadLimits(NamedTuple):
    """Bounds in seconds in which the thread has looked: for a peer's first answer, for silence, for what is stuck."""

    open_s: float = 2.5
    silence_s: float = 5.0
    fence_s: float = 300.0


class BeginRead(NamedTuple):
    """Begin the reads of an order; answer ``on_done`` or ``on_failed``. ``slot``: where the slots have room for it;
    or None.
    """

    session: int
    number: int
    slot: int | None


class Prove(NamedTuple):
    """Read the ticket; answer ``on_proven`` or ``on_failed``."""

    session: int


class PeerOpened(NamedTuple):
    """The peer's memory can be read."""

    session: int


class HandOver(NamedTuple):
    """These orders are here, and were what prefill had told of; answer ``on_placed``."""

    session: int
    numbers: tuple[int, ...]


class DropOrder(NamedTuple):
    """An order does not come, and nothing writes into what it was to fill."""

    session: int
    number: int


class SessionLost(NamedTuple):
    """A session reads no more; answer ``leave``. ``late``: the peer has never answered."""

    session: int
    reason: str
    late: bool = False


class SessionDrained(NamedTuple):
    """Nothing of a session that has ended is under way any more."""

    session: int


class EndAgent(NamedTuple):
    """End the agent that reads: nothing that it has begun is written after that. Answer ``on_agent_ended``."""


Step = BeginRead | Prove | PeerOpened | HandOver | DropOrder | SessionLost | SessionDrained | EndAgent


@dataclass
class OrderedRead:
    """An order that was begun."""

    size: int
    slot: int | None = None
    here: bool = False
    handed: bool = False

    @property
    def flying(self) -> bool:
        """Whether its bytes are under way."""
        return not self.here

    @property
    def units(self) -> int:
        """How many reads it is."""
        return -(-self.size // READ_BYTES)


@dataclass
class ReadSession:
    """One session that reads: its ticket and its orders."""

    moved_at: float
    queue: deque[tuple[int, int, bool]] = field(default_factory=deque)
    """Number, bytes, and whether a slot is needed."""
    reads: OrderedDict[int, OrderedRead] = field(default_factory=OrderedDict)
    spoken: tuple[int, ...] | None = ()
    """What the read of the ticket that is under way speaks for; None: none is. Before the first one: nothing yet."""
    opening: bool = True
    until: float = math.inf
    """How long it may be opening."""
    lost: bool = False
    left_at: float | None = None

    @property
    def flying(self) -> int:
        """How many reads are under way, the ticket's not counted."""
        return sum(one.units for one in self.reads.values() if one.flying)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self.spoken is not None or any(one.flying for one in self.reads.values())


class Reads:
    """The machine. ``slots``: the memory for orders that have none, in which a session is the holder."""

    def __init__(self, slots: Ring, limits: ReadLimits) -> None:
        self._slots = slots
        self._limits = limits
        self._sessions: OrderedDict[int, ReadSession] = OrderedDict()
        self._ending_at: float | None = None
        """Until when others' reads are waited for, since the agent has to end."""

    @property
    def working(self) -> bool:
        """Whether anything is under way, or waits for room, in a session that lives."""
        return any(one.left_at is None and not one.lost and (one.busy or bool(one.queue))
                   for one in reversed(self._sessions.values()))

    @property
    def stuck_reads(self) -> int:
        """Reads under way of sessions that have ended."""
        return sum(one.flying for one in self._sessions.values() if one.left_at is not None)

    @property
    def lingers(self) -> bool:
        """Whether anything is under way in a session that has ended."""
        return any(one.left_at is not None for one in self._sessions.values())

    # --- sessions and their orders ---

    def join(self, session: int, now: float) -> list[Step]:
        """A session begins: its ticket is read first."""
        self._sessions[session] = ReadSession(now)
        return [Prove(session)]

    def order(self, session: int, number: int, size: int, now: float, *, slot: bool = True) -> list[Step]:
        """Bytes are wanted. ``slot``: they need memory of this side's."""
        one = self._sessions.get(session)
        room = self._slots.size // READ_BYTES * READ_BYTES
        if one is None or one.lost or one.left_at is not None or (slot and size > room):
            return [DropOrder(session, number)]
        one.queue.append((number, size, slot))
        return self._pump(now)

    def on_placed(self, session: int, number: int, now: float) -> list[Step]:
        """What was handed over is where it belongs, or is dropped."""
        one = self._sessions.get(session)
        if one is None or number not in one.reads:
            return []
        self._free(session, one.reads.pop(number))
        return [*self._gone(session, one), *self._pump(now)]

    def leave(self, session: int, now: float) -> list[Step]:
        """A session has ended."""
        one = self._sessions.get(session)
        if one is None or one.left_at is not None:
            return []
        one.left_at = now
        out: list[Step] = [DropOrder(session, number) for number, _, _ in one.queue]
        one.queue.clear()
        for number, read in list(one.reads.items()):
            if read.here and not read.handed:
                out += self._drop(session, one, number)
        return [*out, *self._gone(session, one), *self._pump(now)]

    # --- reads ---

    def on_done(self, session: int, number: int, now: float) -> list[Step]:
        """All bytes of an order have come."""
        one = self._sessions[session]
        one.reads[number].here = True
        one.moved_at = now
        if one.lost or one.left_at is not None:
            return [*self._drop(session, one, number), *self._gone(session, one), *self._pump(now)]
        return [*self._prove(session, one), *self._pump(now)]

    def proven(self, session: int, right: bool, now: float) -> list[Step]:
        """The ticket was read."""
        one = self._sessions[session]
        spoken, one.spoken = one.spoken, None
        one.moved_at = now
        if one.left_at is not None:
            return [*self._gone(session, one), *self._pump(now)]
        if not right:
            return self._lose(session, one, "other memory is where its ticket was" if one.opening else
                              "has given this session up")
        if one.lost:
            return []
        opened: list[Step] = [PeerOpened(session)] if one.opening else []
        one.opening = False
        for number in spoken or ():
            one.reads[number].handed = True
        handed: list[Step] = [HandOver(session, spoken)] if spoken else []
        return [*opened, *handed, *self._prove(session, one), *self._pump(now)]

    def on_failed(self, session: int, number: int | None, reason: str, now: float) -> list[Step]:
        """The reads of an order are over, and not all of it has come; None: the ticket's. The session is lost."""
        one = self._sessions[session]
        out: list[Step] = []
        if number is None:
            one.spoken = None
        else:
            out += self._drop(session, one, number)
        return [*self._lose(session, one, reason), *out, *self._gone(session, one), *self._pump(now)]

    # --- time, and the end of the agent ---

    def tick(self, now: float) -> list[Step]:
        """Do what is due at ``now``, in seconds."""
        out: list[Step] = []
        for session, one in list(self._sessions.items()):
            if one.left_at is None and not one.lost:
                out += self._late(session, one, now)
        if not self._must_end(now):
            self._ending_at = None
            return [*out, *self._pump(now)]
        if self._ending_at is None:
            self._ending_at = now + DRAIN_S
        if now >= self._ending_at or not any(one.left_at is None and one.busy for one in self._sessions.values()):
            out.append(EndAgent())
        return out

    def on_agent_ended(self, now: float) -> list[Step]:
        """The agent has ended."""
        self._ending_at = None
        out: list[Step] = []
        for session, one in list(self._sessions.items()):
            for number, read in reversed(list(one.reads.items())):
                if not read.flying:
                    continue
                if one.lost or one.left_at is not None:
                    out += self._drop(session, one, number)
                    continue
                self._free(session, one.reads.pop(number))
                one.queue.appendleft((number, read.size, read.slot is not None))
            one.moved_at = now
            if one.left_at is not None or one.lost:
                one.spoken = None
            elif one.spoken is not None:
                out.append(Prove(session))
            out += self._gone(session, one)
        return [*out, *self._pump(now)]

    def _must_end(self, now: float) -> bool:
        over = [one.left_at for one in self._sessions.values() if one.left_at is not None and one.busy]
        return bool(over) and (self.stuck_reads * FENCE_PART >= READS or now - min(over) > self._limits.fence_s)

    def _late(self, session: int, one: ReadSession, now: float) -> list[Step]:
        if one.opening and one.until == math.inf:  # its peer has been asked, and not looked at yet
            one.until = now + self._limits.open_s
        elif one.opening and now > one.until:
            return self._lose(session, one, f"no answer within {self._limits.open_s} s", late=True)
        elif not one.opening and one.busy and now - one.moved_at > self._limits.silence_s:
            return self._lose(session, one, f"nothing of its memory has come for {self._limits.silence_s} s")
        return []

    # --- parts of these ---

    @staticmethod
    def _lose(session: int, one: ReadSession, reason: str, *, late: bool = False) -> list[Step]:
        if one.lost or one.left_at is not None:
            return []
        one.lost = True
        return [SessionLost(session, reason, late)]

    @staticmethod
    def _prove(session: int, one: ReadSession) -> list[Step]:
        if one.spoken is not None:
            return []
        ready = tuple(number for number, read in one.reads.items() if read.here and not read.handed)
        if not ready:
            return []
        one.spoken = ready
        return [Prove(session)]

    def _drop(self, session: int, one: ReadSession, number: int) -> list[Step]:
        self._free(session, one.reads.pop(number))
        return [DropOrder(session, number)]

    def _free(self, session: int, read: OrderedRead) -> None:
        if read.slot is not None:
            self._slots.give(session, read.slot, read.units * READ_BYTES)

    def _gone(self, session: int, one: ReadSession) -> list[Step]:
        if one.left_at is None or one.busy or one.reads or session not in self._sessions:
            return []
        del self._sessions[session]
        return [SessionDrained(session)]

    def _pump(self, now: float) -> list[Step]:
        """Begin what there is room for; sessions take turns."""
        out: list[Step] = []
        going = self._ending_at is None
        while going:
            going = False
            for session, one in list(self._sessions.items()):
                waits = bool(one.queue) and not one.opening and not one.lost
                if waits and (step := self._begin(session, one, now)) is not None:
                    out.append(step)
                    self._sessions.move_to_end(session)
                    going = True
        return out

    def _begin(self, session: int, one: ReadSession, now: float) -> BeginRead | None:
        """Begin the next order of a session, if there is room."""
        number, size, needs_slot = one.queue[0]
        read = OrderedRead(size)
        flying, most = one.flying, READS // SHARE
        every = sum(other.flying for other in self._sessions.values())
        if (flying and flying + read.units > most) or (every and every + read.units > READS):
            return None
        if needs_slot:
            read.slot = self._slots.take(session, read.units * READ_BYTES)
            if read.slot is None:
                return None
        if not one.busy:
            one.moved_at = now
        one.queue.popleft()
        one.reads[number] = read
        return BeginRead(session, number, read.slot)


def unusable(memory: NixlMemory) -> str:
    """Why prefill's word on its memory is not used; empty: it may be."""
    if not 0 < len(memory.metadata) <= METADATA_MAX:
        return f"NIXL's description has {len(memory.metadata)} bytes, not 1 to {METADATA_MAX}"
    if len(memory.ticket) != TICKET_BYTES or not any(memory.ticket) or not 0 < len(memory.agent) <= 64:
        return "no agent's name and ticket"
    top = 1 << 64
    if not 0 < memory.base < memory.base + memory.size < top or not 0 < memory.ticket_at < top - TICKET_BYTES:
        return "no memory's place and size"
    return ""
