"""What both links share: a thread that listens, beats every 200 ms and watches for silence.

    Listener    the thread; ``rpc`` and ``shm`` say how a round goes
    Link        what ``steps`` needs of either
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, Protocol

from xpyd_sidecar.dp.frames import Grant, Want
from xpyd_sidecar.dp.watch import PeerWatch
from xpyd_sidecar.errors import PeerGone

logger = logging.getLogger(__name__)

BEAT_S: Final = 0.2
ROUND_S: Final = 0.05
"""How long a round may wait: also the backstop for a wake-up that was lost."""
JOIN_S: Final = 2.0


class Rules(Protocol):
    """What a link tells (``steps.Steps``)."""

    def on_grant(self, grant: Grant) -> None:
        """Other ranks have said something, joined into ``grant``. Called from any thread."""

    def want(self) -> Want:
        """What the others should know."""

    def fail(self, error: Exception) -> None:
        """The ranks cannot go on together. From any thread."""


class StepLink(Protocol):
    """A rank's way to the others."""

    def send(self, want: Want) -> None:
        """Send this rank's state to the others at once; from the engine core's thread. Never blocks."""

    def read_grant(self) -> Grant | None:
        """What the other ranks say now, where that can be read without waiting; else None."""

    def park(self, *, parked: bool) -> None:
        """The engine core is about to sleep, or is awake."""

    def start(self) -> None:
        """Begin to beat and to watch: all ranks are there."""

    def close(self) -> None:
        """Say the last, and end the thread."""


class Listener(threading.Thread):
    """Rounds until ``stop``. An exception ends the engine."""

    def __init__(self, name: str, rules: Rules, watch: PeerWatch, peer: str) -> None:
        """``peer``: what silent peers are called, with their number."""
        super().__init__(name=name, daemon=True)
        self.rules = rules
        self.watch = watch
        self._peer = peer
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        """End after the present round."""
        self._stop_asked.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(JOIN_S)

    def run(self) -> None:
        """Listen until told to end; the body of the thread."""
        beat_at = 0.0
        try:
            while not self._stop_asked.is_set():
                now = time.monotonic()
                if now >= beat_at:
                    self.beat()
                    beat_at = now + BEAT_S
                self.round(ROUND_S)
                now = time.monotonic()
                if (silent := self.watch.silent(now)) is not None:
                    name, seconds = silent
                    self.rules.fail(PeerGone(f"{self._peer} {name}", f"silent for {seconds:.1f} s: dead or cut off"))
                    return
        except Exception as error:  # noqa: BLE001 (whatever it is, this engine must end rather than hang)
            self.rules.fail(error)
        finally:
            self.close_sockets()

    def beat(self) -> None:
        """Say the last frame again."""
        raise NotImplementedError

    def round(self, seconds: float) -> None:
        """Listen for at most ``seconds``."""
        raise NotImplementedError

    def close_sockets(self) -> None:
        """Close the sockets, when the thread has ended."""
