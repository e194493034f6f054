"""The thread that owns both NIXL agents of this process and is the only one that calls NIXL.

Decode's sessions ask it to reach a peer's memory and to read of it (``join``, ``order``, ``release_order``, ``leave``,
from any thread); ``reading`` does that. It never waits for a peer. Deadlines count the time in which this thread has looked
(``ListeningClock``): an agent is made here, which takes long on a busy machine; meanwhile nobody looks at what peers
have sent, and no peer is called silent for it.

Prefill's agent is served here, too: without RDMA its bytes move only while it is asked for news. It is asked all the time
while a session begins, and while there are sessions and copies in the store; and now and then for a while after that, since
what was being read of a load that was given up has to come to its end.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from xpyd_sidecar.contract.launch import NIXL_SLOT_BYTES
from xpyd_sidecar.kv.leases import ListeningClock
from xpyd_sidecar.kv.reads import ReadLimits
from xpyd_sidecar.kv.session_bodies import NixlMemory
from xpyd_sidecar.threads.commands import CommandThread
from xpyd_sidecar.transport.nixl.driver import LandingMemory, NixlDriver, NixlTarget
from xpyd_sidecar.transport.nixl.reading import Reading, ReadMember, ReadOrder

logger = logging.getLogger(__name__)

POLL_S: Final = 0.0001
"""While something is under way."""
TICK_S: Final = 0.05
LINGER_POLL_S: Final = 0.01
"""While something is that nobody waits for."""
REST_S: Final = 0.2
PAUSE_S: Final = 1.0
LAST_S: Final = 0.5
"""For reads that are under way when this process stops."""


class NixlThread(CommandThread):
    """The thread, for one process."""

    def __init__(self, driver: NixlDriver, limits: ReadLimits, slot_bytes: int = NIXL_SLOT_BYTES) -> None:
        """``slot_bytes``: memory that reads fill where their orders have none, made when it is needed."""
        super().__init__("xpyd-nixl", "its look at reads and deadlines")
        self.version = driver.version
        self.held: Callable[[], bool] = lambda: False
        """Whether the store has copies that peers may read; set before there is a session."""
        self._driver = driver
        self._reading = Reading(driver, limits, slot_bytes)
        self._listened = ListeningClock(min(limits.open_s, limits.silence_s))
        self._target: NixlTarget | None = None
        self._numbers = itertools.count(1)
        self._sessions: set[int] = set()
        """Those that read from here."""
        self._serve_until = self._linger_until = 0.0
        self._pauses: dict[str, float] = {}
        """By the words for it: until when something is not tried again."""
        self._tick_at = 0.0
        self.thread.start()

    # --- at the start ---

    def register(self, regions: Sequence[tuple[int, int]], seconds: float) -> tuple[str, bytes]:
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

    def give(self, ring: LandingMemory) -> None:
        """Orders may be ranges of this memory; said before there is a session."""
        self._reading.agent.ring = ring

    @property
    def has_ring(self) -> bool:
        """Whether orders may be ranges of memory that was given."""
        return self._reading.agent.ring is not None

    # --- decode's sessions, from any thread ---

    def join(self, member: ReadMember, memory: NixlMemory) -> int:
        """Reach a peer's memory. The session's number in this process."""
        number = next(self._numbers)
        self.tell(partial(self._reading.join, number, member, memory))
        return number

    def order(self, session: int, order: ReadOrder) -> None:
        """Read bytes of a session's peer."""
        self.tell(partial(self._reading.order, session, order))

    def release_order(self, session: int, number: int) -> None:
        """What has come of an order is not needed any more."""
        self.tell(partial(self._reading.release_order, session, number))

    def leave(self, session: int) -> None:
        """Have a session's reads ended."""
        self.tell(partial(self._reading.leave, session))

    # --- prefill's sessions, from any thread ---

    def serve(self, session: int, seconds: float) -> None:
        """A session begins in which this side is read from; it has so long to begin."""
        self.tell(partial(self._serve_session, session, seconds))

    def linger(self, seconds: float) -> None:
        """A peer has reads under way, perhaps for so long."""
        self.tell(partial(self._linger_for, seconds))

    def serve_no_more(self, session: int) -> None:
        """Take note that the session has ended."""
        self.tell(partial(self._sessions.discard, session))

    # --- on the thread ---

    def rest(self) -> float:
        """Seconds until the next look."""
        if self._reading.working or self._serving():
            return POLL_S
        return LINGER_POLL_S if self._reading.lingers or time.monotonic() < self._linger_until else REST_S

    def poll_once(self) -> bool:
        """Look at everything once; whether a read was done."""
        now = time.monotonic()
        if self._target is not None and (self._serving() or now < self._linger_until):
            self._guarded(self._target.poll, "cannot serve those who read from here")
        moved = self._reading.poll_once(self._listened.advance(now))
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._guarded(self._reading.tick, "cannot look after its connections")
        return moved

    def end(self) -> None:
        """End every session; reads that are under way have a moment."""
        until = time.monotonic() + LAST_S
        while self._reading.flying and time.monotonic() < until:
            self._reading.poll_once(self._listened.advance(time.monotonic()))
            time.sleep(POLL_S)
        self._reading.end()
        if self._target is not None:
            self._target.end()
            self._target = None

    def _serving(self) -> bool:
        return time.monotonic() < self._serve_until or (bool(self._sessions) and self.held())

    def _serve_session(self, session: int, seconds: float) -> None:
        self._sessions.add(session)
        self._serve_until = max(self._serve_until, time.monotonic() + seconds)

    def _linger_for(self, seconds: float) -> None:
        self._linger_until = max(self._linger_until, time.monotonic() + seconds)

    def _guarded(self, call: Callable[[], None], words: str) -> None:
        """What NIXL says against it may be one peer's: it ends nobody."""
        if time.monotonic() < self._pauses.get(words, 0.0):
            return
        try:
            call()
        except Exception:
            self._pauses[words] = time.monotonic() + PAUSE_S
            logger.exception("xpyd: NIXL %s; tried again in %s s", words, PAUSE_S)
