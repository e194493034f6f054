"""Tells the agent which prefixes are in the engine's cache (``contract.held_prefixes``), where that has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, KeysView
from pathlib import Path

from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.engine.prefix_ledger import PrefixLedger

logger = logging.getLogger(__name__)


class PrefixRecorder:
    """Records the held prefixes of one engine (one DP rank of it)."""

    def __init__(self, run_dir: Path, dp_rank: int, incarnation: Incarnation, ledger: PrefixLedger,
                 cached: Callable[[], KeysView[bytes]]) -> None:
        """``run_dir``: where the agent reads; ``cached``: what the engine's cache has blocks under, now."""
        self._run_dir, self._dp_rank, self._incarnation = run_dir, dp_rank, incarnation
        self._ledger, self._cached = ledger, cached
        self._told: HeldPrefixes | None = None
        self._complaint = ""

    def record(self) -> None:
        """Look at the cache once, and write what has changed. What cannot be written is written at the next look."""
        now = self._ledger.compare(self._cached())
        if now == self._told:
            return
        try:
            held_prefixes.write(self._run_dir, self._dp_rank, self._incarnation, now)
        except OSError as error:
            if str(error) != self._complaint:
                logger.warning("xpyd: the prefixes in the cache cannot be written: %s", error)
            self._complaint = str(error)
            return
        self._told = now
