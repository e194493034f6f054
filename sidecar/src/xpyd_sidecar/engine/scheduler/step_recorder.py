"""Tells the agent how far the core has got (``contract.core_steps``): a thread writes once a second, where that changed.

The core's thread counts and never writes. A core that hangs with the interpreter's lock stops this thread as well, which
reads the same: nothing turns.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Final

from xpyd_sidecar.contract import core_steps
from xpyd_sidecar.contract.core_steps import CoreSteps, WrittenSteps
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.engine.scheduler.prompt_backlog import PromptBacklog
from xpyd_sidecar.engine.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0


class StepRecorder:
    """Records the steps of one engine (one DP rank of it)."""

    def __init__(self, run_dir: Path | None, dp_rank: int, incarnation: Incarnation,
                 prompts: PromptBacklog | None = None) -> None:
        """``run_dir``: where the agent reads; None: there is no agent, and nothing is written."""
        self._prompts = prompts or PromptBacklog()
        self._run_dir, self._dp_rank, self._incarnation = run_dir, dp_rank, incarnation
        self._times = StepTimes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xpyd-steps", daemon=True)

    def start(self) -> None:
        """Begin to write steps for the agent."""
        if self._run_dir is not None:
            self._thread.start()

    def begins(self, tokens: int) -> None:
        """A step of so many tokens begins."""
        self._times.begins(time.monotonic(), tokens)

    def ends(self) -> None:
        """A step of the engine has ended."""
        self._times.ends(time.monotonic())

    def stop(self) -> None:
        """End the recorder's thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * EVERY_S)

    def _run(self) -> None:
        assert self._run_dir is not None
        said = ""
        told: WrittenSteps | None = None
        while True:
            steps = CoreSteps(self._times.turns, round(self._times.patience_s, 1))
            written = WrittenSteps(self._incarnation, steps, self._prompts.prompt_work)
            try:
                if written != told:
                    core_steps.write(self._run_dir, self._dp_rank, written)
                    told = written
            except OSError as error:
                if str(error) != said:
                    logger.warning("xpyd: the core's steps cannot be written: %s", error)
                said = str(error)
                self._unwrite()
                told = None
            if self._stop.wait(EVERY_S):
                return

    def _unwrite(self) -> None:
        """What stands there would read as a core that stands still."""
        assert self._run_dir is not None
        try:
            core_steps.path_of(self._run_dir, self._dp_rank).unlink(missing_ok=True)
        except OSError as error:
            logger.debug("xpyd: nor can they be removed: %s", error)
