"""Tells the agent which prefixes are in the engine's cache (``contract.held_prefixes``): a thread looks once a second, and
writes where that has changed.

It has a thread of its own: a core whose steps are not written reads as one that hangs (``step_recorder``), and prefixes
that are not told cost a router some cache hits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, KeysView
from pathlib import Path
from typing import Final

from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.engine.scheduler.prefix_ledger import PrefixLedger

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0


class PrefixRecorder:
    """Records the held prefixes of one engine (one DP rank of it)."""

    def __init__(self, run_dir: Path, dp_rank: int, incarnation: Incarnation, ledger: PrefixLedger,
                 cached: Callable[[], KeysView[bytes]]) -> None:
        """``run_dir``: where the agent reads; ``cached``: what the engine's cache has blocks under, now."""
        self._run_dir, self._dp_rank, self._incarnation = run_dir, dp_rank, incarnation
        self._ledger, self._cached = ledger, cached
        self._told: HeldPrefixes | None = None
        self._complaint = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xpyd-prefixes", daemon=True)

    def start(self) -> None:
        """Begin to write prefixes for the agent."""
        self._thread.start()

    def stop(self) -> None:
        """End the recorder's thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * EVERY_S)

    def record(self) -> None:
        """Look at the cache once, and write what has changed. What cannot be written is written at the next look; what was
        written before may be in the cache no longer, and is withdrawn.
        """
        now = self._ledger.compare(self._cached())
        if now == self._told:
            return
        try:
            held_prefixes.write(self._run_dir, self._dp_rank, self._incarnation, now)
        except OSError as error:
            self._complain(f"cannot be written: {error}")
            self._withdraw()
            return
        self._told = now

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                self.record()
            except Exception as error:  # noqa: BLE001 (said once, and what was told is withdrawn)
                self._complain(f"cannot be told: {error!r}", trace=True)
                self._withdraw()

    def _complain(self, words: str, *, trace: bool = False) -> None:
        """Once for the same words."""
        if words != self._complaint:
            logger.warning("xpyd: the prefixes in the cache %s", words, exc_info=trace)
        self._complaint = words

    def _withdraw(self) -> None:
        """Say that none is held, so that routers believe no longer what they were told; where that cannot be written
        either, nothing stands there.
        """
        self._told = None
        try:
            held_prefixes.write(self._run_dir, self._dp_rank, self._incarnation, HeldPrefixes())
        except OSError:
            try:
                held_prefixes.path_of(self._run_dir, self._dp_rank).unlink(missing_ok=True)
            except OSError as error:
                logger.debug("xpyd: nor can they be removed: %s", error)
