"""The thread that owns every NIXL agent of this process and is the only one that calls NIXL.

Sessions ask it to reach a peer's memory and to read pieces of it (``join``, ``read``, ``leave``, from any thread), and are
told what became of that on their own I/O threads (``ReadMember``). ``kv.reads`` decides what may be believed.

It never waits for a peer. A peer that is stopped leaves reads under way. They cannot be cancelled, so when the session ends
its agent and its memory stay for a while ("lingering"), until those reads are done or have failed; then, or when that while
is over, the agent ends, and with it all that could still write there. The agent is not ended at once, since over UCX's
software a peer that wakes up and answers reads of an agent that is gone is often ended by UCX (docs/decisions/0038).

What belongs to one session is guarded by itself.

Deadlines count the time in which this thread has looked (``Listened``). An agent is made here, which takes long on a busy
machine; meanwhile nobody looks at what peers have sent, and no peer is called silent for it.

Prefill's agent is served here, too: without RDMA its bytes move only while it is asked for news. It is asked while
something is on offer, or a session begins.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from xpyd_sidecar.kv import bodies, reads
from xpyd_sidecar.kv.leases import Listened
from xpyd_sidecar.kv.reads import TICKET_BYTES, Reads
from xpyd_sidecar.threads.commands import CommandThread
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.nixl.driver import NixlDriver, NixlTarget
from xpyd_sidecar.transport.nixl.session import ReadLimits, ReadMember, ReadSession

logger = logging.getLogger(__name__)

POLL_S: Final = 0.0001
"""While something is under way."""
TICK_S: Final = 0.05
LINGER_POLL_S: Final = 0.01
REST_S: Final = 0.2
PAUSE_S: Final = 1.0
LAST_S: Final = 0.5
"""For reads that are under way when this process stops."""
LINGERING: Final = 8
"""Sessions that have ended and wait for their reads; the oldest one's agent ends where there are more."""
T = TypeVar("T")


class NixlThread(CommandThread):
    """The thread, for one process."""

    def __init__(self, driver: NixlDriver, limits: ReadLimits) -> None:
        super().__init__("xpyd-nixl", "its look at reads and deadlines")
        self.version = driver.version
        self._driver = driver
        self._limits = limits
        self._listened = Listened(min(limits.open_s, limits.silence_s))
        self._now = 0.0
        """Seconds in which it has looked, at the last look."""
        self._target: NixlTarget | None = None
        self._joined: dict[int, ReadSession] = {}
        self._lingering: deque[ReadSession] = deque()
        self._unfenced: list[ReadSession] = []
        """Sessions whose agent could not be ended: their memory is never given back."""
        self._numbers = itertools.count(1)
        self._open = threading.Semaphore(limits.sessions)
        """Sessions that may still be opened."""
        self._offers = 0
        self._serve_until = 0.0
        self._pause_until = 0.0
        self._tick_at = 0.0
        self.thread.start()

    # --- at the start ---

    def register(self, regions: list[tuple[int, int]], seconds: float) -> tuple[str, bytes]:
        """Make the agent that is read from, and let peers read memory (address, bytes), which must outlive this thread.

        Waits. The agent's name, and what peers need for that.

        Raises:
            Exception: NIXL's own, which have no common root; TimeoutError.
        """
        answer: Future[tuple[str, bytes]] = Future()

        def run() -> None:
            try:
                self._target = target = self._driver.target()
                answer.set_result((target.name, target.register(regions)))
            except Exception as error:  # noqa: BLE001  # told to who waits
                answer.set_exception(error)

        self.tell(run)
        try:
            return answer.result(seconds)
        except TimeoutError:
            raise TimeoutError(f"NIXL has not answered within {seconds} s") from None

    # --- from any thread ---

    def join(self, member: ReadMember, memory: bodies.NixlMemory, slots: memoryview) -> int:
        """Reach a peer's memory, to read it into ``slots``. The session's number in this process; 0: too many are open."""
        if not self._open.acquire(blocking=False):
            return 0
        number = next(self._numbers)
        joined = ReadSession(member, memory, slots, Reads(self._limits.silence_s))
        self.tell(partial(self._join, number, joined))
        return number

    def read(self, number: int, at: int, address: int, size: int) -> None:
        """Read a piece of the peer's memory to ``at`` in the session's."""
        self.tell(partial(self._read, number, at, address, size))

    def leave(self, number: int) -> None:
        """End a session."""
        self.tell(partial(self._leave, number))

    def offers(self, change: int) -> None:
        """So many sessions more, or fewer, have something on offer here."""
        self.tell(partial(self._offer, change))

    def serve_reads(self, seconds: float) -> None:
        """A session begins, or has just ended, in which this side is read from."""
        self.tell(partial(self._serve_for, seconds))

    # --- on the thread ---

    def rest(self) -> float:
        """Seconds until the next look."""
        return POLL_S if self._working() else LINGER_POLL_S if self._lingering else REST_S

    def look(self) -> bool:
        """Look at everything once; whether a read was done."""
        moved = False
        self._now = now = self._listened.look(time.monotonic())
        if self._target is not None and self._serving():
            self._serve(self._target)
        for joined in list(self._joined.values()):
            if not joined.over and joined.reader is not None:
                moved |= bool(self._try(joined, partial(self._look, joined)))
        if self._lingering:
            self._linger(now)
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            for joined in list(self._joined.values()):
                self._tick(joined, now)
        return moved

    def end(self) -> None:
        """End every session; reads that are under way have a moment."""
        for number in list(self._joined):
            self._leave(number)
        until = time.monotonic() + LAST_S
        while self._lingering and time.monotonic() < until:
            self._linger(self._now)
            time.sleep(POLL_S)
        while self._lingering:
            self._fence(self._lingering.popleft())
        if self._target is not None:
            self._target.end()
            self._target = None

    def _offer(self, change: int) -> None:
        self._offers += change

    def _serve_for(self, seconds: float) -> None:
        self._serve_until = max(self._serve_until, time.monotonic() + seconds)

    def _serve(self, target: NixlTarget) -> None:
        """Let those who read this process's memory go on. What NIXL says against it may be one peer's: it ends nobody."""
        if time.monotonic() < self._pause_until:
            return
        try:
            target.poll()
        except Exception:
            self._pause_until = time.monotonic() + PAUSE_S
            logger.exception("xpyd: NIXL cannot serve those who read from here; tried again in %s s", PAUSE_S)

    def _serving(self) -> bool:
        return self._offers > 0 or time.monotonic() < self._serve_until

    def _working(self) -> bool:
        return self._serving() or any(not one.over and (one.opening or one.reads.busy) for one in self._joined.values())

    def _join(self, number: int, joined: ReadSession) -> None:
        self._joined[number] = joined
        self._try(joined, partial(self._reach, joined))

    def _reach(self, joined: ReadSession) -> None:
        joined.reader = self._driver.reader(joined.memory, address_of(joined.slots), len(joined.slots))
        self._read_ticket(joined)

    def _read_ticket(self, joined: ReadSession) -> None:
        assert joined.reader is not None
        at = joined.ticket_at
        joined.slots[at:] = bytes(TICKET_BYTES)
        joined.ticket = joined.reader.read(address_of(joined.slots) + at, joined.memory.ticket_at, TICKET_BYTES)

    def _read(self, number: int, at: int, address: int, size: int) -> None:
        joined = self._joined.get(number)
        if joined is None or joined.over:
            return
        piece = joined.reads.begin(self._now)
        self._try(joined, partial(self._start, joined, piece, at, address, size))

    @staticmethod
    def _start(joined: ReadSession, piece: int, at: int, address: int, size: int) -> None:
        assert joined.reader is not None
        joined.pieces[piece] = joined.reader.read(address_of(joined.slots) + at, address, size)

    def _look(self, joined: ReadSession) -> bool:
        """Look how far its reads are; whether one was done."""
        pieces, ticket = joined.done()
        for piece in pieces:
            self._carry_out(joined, joined.reads.done(piece, self._now))
        if ticket:
            right = bytes(joined.slots[joined.ticket_at:]) == joined.memory.ticket
            if not joined.opening:
                self._carry_out(joined, joined.reads.proven(right, self._now))
            elif right:
                joined.opening = False
                joined.member.post(joined.member.opened)
            else:
                self._lose(joined, "other memory is where its ticket was")
        return ticket or bool(pieces)

    def _try(self, joined: ReadSession, call: Callable[[], T]) -> T | None:
        """What NIXL raises ends this session alone."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # the binding's have no common root
            self._lose(joined, f"{type(error).__name__}: {error}"[:300])
            return None

    def _carry_out(self, joined: ReadSession, steps: list[reads.Step]) -> None:
        for step in steps:
            if isinstance(step, reads.Prove):
                self._read_ticket(joined)
            elif isinstance(step, reads.HandOver):
                joined.member.post(partial(joined.member.come, step.pieces))
            else:
                self._lose(joined, step.reason)

    def _lose(self, joined: ReadSession, reason: str, *, late: bool = False) -> None:
        if not joined.over:
            joined.over = True
            joined.member.post(partial(joined.member.lost, reason, late=late))

    def _tick(self, joined: ReadSession, now: float) -> None:
        if joined.over:
            return
        if not joined.opening:
            self._carry_out(joined, joined.reads.tick(now))
        elif joined.until == math.inf:  # its peer has been asked, and not looked at yet
            joined.until = now + self._limits.open_s
        elif now > joined.until:
            self._lose(joined, f"no answer within {self._limits.open_s} s", late=True)

    def _leave(self, number: int) -> None:
        joined = self._joined.pop(number, None)
        if joined is None:
            return
        joined.over = True
        self._open.release()
        if not joined.reading:
            self._fence(joined)
            return
        joined.until = self._now + self._limits.linger_s
        self._lingering.append(joined)
        if len(self._lingering) > LINGERING:
            self._fence(self._lingering.popleft())

    def _linger(self, now: float) -> None:
        """End the agents of sessions whose reads are over, or have had their time."""
        for joined in list(self._lingering):
            try:
                joined.done()
            except Exception as error:  # noqa: BLE001  # the binding's have no common root
                logger.info("xpyd: reads of a session that has ended: %s", error)
                joined.forget()
            if now > joined.until or not joined.reading:
                self._lingering.remove(joined)
                self._fence(joined)

    def _fence(self, joined: ReadSession) -> None:
        """Nothing is written into a session's memory after this."""
        joined.forget()
        try:
            if joined.reader is not None:
                joined.reader.end()
                joined.reader = None
        except Exception:
            logger.exception("xpyd: a NIXL agent could not be ended; the memory of its session stays taken")
            self._unfenced.append(joined)
