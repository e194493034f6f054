"""One rank in an engine core: the rules (``dp.rank``), a link, and the core that must be woken or ended.

``begin``, ``dummy``, ``idle``, ``pause`` and ``may_leave`` are called by the core's thread, ``on_grant`` and ``fail`` by
threads of the link. A lock keeps the state whole; what must be said is said by the core's thread before the forward begins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.dp.frames import Grant, Want
from xpyd_sidecar.dp.rank import Dummy, Event, Forward, GrantReceived, Idle, LeaveAsked, PauseAsked, Rank
from xpyd_sidecar.engine.dp_plugin.counters import COUNTERS, Counters
from xpyd_sidecar.engine.dp_plugin.links import StepLink
from xpyd_sidecar.errors import OurFault

logger = logging.getLogger(__name__)

LEAVE_POLL_S: Final = 0.005
GRACE_S: Final = 3.0
"""How long a core that is stuck in a collective may take to notice that its peers are gone."""


class Steps:
    """Counts the steps of one rank, and says when it must run a dummy one."""

    def __init__(self, rank: Rank, wake: Callable[[], None], abandon: Callable[[Exception], None],
                 timeout_s: float, counters: Counters = COUNTERS) -> None:
        """``wake``: have a core that waits for input look again. ``abandon``: end a process whose core does not answer.

        ``counters``: this rank's alone.
        """
        self._rank = rank
        self._wake = wake
        self._abandon = abandon
        self._timeout_s = timeout_s
        self._counters = counters
        self._lock = threading.Lock()
        self._link: StepLink | None = None
        self._fault: Exception | None = None
        self._noticed = threading.Event()
        self._leave_at: float | None = None

    def use(self, link: StepLink) -> None:
        """The link, before anything else is done."""
        self._link = link

    @property
    def link(self) -> StepLink:
        """The way to the others."""
        if self._link is None:
            raise OurFault("steps without a link")
        return self._link

    @property
    def state(self) -> Rank:
        """The state of the rank, as it is now."""
        return self._rank

    def want(self) -> Want:
        """What this rank tells the others: the heartbeat."""
        return self._rank.want

    # --- the core's thread ---

    def check(self) -> None:
        """Raise what a link's thread has found: vLLM then reports a dead engine.

        Raises:
            PeerGone: a peer is silent.
            ProtocolError: the coordinator does not speak the protocol.
        """
        if self._fault is not None:
            self._noticed.set()
            raise self._fault

    def busy(self) -> bool:
        """Whether the core must not wait for input: a step is granted, or the ranks cannot go on."""
        self._look()
        return self._rank.is_behind or self._fault is not None

    def begin(self, budget: int) -> None:
        """A forward with tokens is handed to the executor now."""
        self._counters.forward(self._do(Forward(budget)))

    def dummy(self) -> None:
        """A dummy is handed to the executor now."""
        self._counters.dummy(self._do(Dummy()))

    def idle(self) -> bool:
        """Nothing is left to run: vote, if a pause is asked for. Whether the pause holds (or none was asked for).

        The core waits for input after this, whatever it says. What is granted meanwhile may have been seen here first, and
        then is no news to the listener: so the core is woken from here.
        """
        self._look()
        with self._lock:
            behind, want = self._rank.is_behind, None
            if not behind:
                self._rank, want = self._rank.handle(Idle())
        if want is not None:
            self.link.send(want)
            self._look()
        if self._rank.is_behind:
            self._wake()
        return not behind and not self._rank.pausing

    def pause(self) -> None:
        """Stop at a step on which all agree."""
        self._do(PauseAsked())

    @property
    def pausing(self) -> bool:
        """Whether a pause does not hold yet."""
        return self._rank.pausing

    def may_leave(self) -> bool:
        """Whether this core may end: all ranks want to, or have not said so in time. Waits a moment."""
        now = time.monotonic()
        if self._leave_at is None:
            self._leave_at = now
        self._do(LeaveAsked())
        self._look()
        if self._rank.leave:
            return True
        if now - self._leave_at > self._timeout_s:
            logger.warning("xpyd: DP rank %d leaves; the others run on after %g s", self._rank.rank, self._timeout_s)
            return True
        time.sleep(LEAVE_POLL_S)
        return False

    def close(self) -> None:
        """Give the link up."""
        self._noticed.set()
        self.link.close()

    # --- any thread ---

    def on_grant(self, grant: Grant) -> None:
        """Join what others say; wake the core if it changes anything."""
        with self._lock:
            before = self._rank
            self._rank, _ = before.handle(GrantReceived(grant))
            changed = self._rank != before
            woken = self._rank.is_behind and not before.is_behind
        if woken:
            self._counters.count_granted()
        if changed:
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the engine: its core if it still answers, else the process. A rank that leaves ends anyway."""
        if self._rank.leaving:
            with self._lock:
                self._rank = self._rank._replace(leave=True)
            return
        if self._fault is not None or self._noticed.is_set():
            return
        logger.error("xpyd: DP rank %d cannot go on at step %d: %s", self._rank.rank, self._rank.local, error)
        self._fault = error
        self._wake()
        if not self._noticed.wait(GRACE_S):
            self._abandon(error)

    def _look(self) -> None:
        grant = self.link.read_grant()
        if grant is not None:
            with self._lock:
                before = self._rank
                self._rank, _ = before.handle(GrantReceived(grant))
                woken = self._rank.is_behind and not before.is_behind
            if woken:
                self._counters.count_granted()

    def _do(self, event: Event) -> Rank:
        with self._lock:
            self._rank, want = self._rank.handle(event)
            after = self._rank
        if want is not None:
            self.link.send(want)
        return after
