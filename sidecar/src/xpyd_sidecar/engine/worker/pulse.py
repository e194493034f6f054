"""A worker of a group says once a second that it lives, and how many steps it has ended (``contract.group.Pulse``).

By a thread of its own, so that a worker that is stopped or whose process is stuck in the kernel says nothing, while one in
a long forward does. Whether steps end is for the reader to judge.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

from xpyd_sidecar.contract import group, run_folder
from xpyd_sidecar.contract.group import Pulse

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0


class PulseThread:
    """The pulse of one worker. ``begins`` and ``ends`` are called by the worker's own thread."""

    def __init__(self, run_dir: Path, life: str) -> None:
        """Begin at once."""
        self._path = group.pulse_path(run_dir, os.getpid())
        self._life = life
        self._steps = 0
        self._inside = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xpyd-pulse", daemon=True)
        self._thread.start()

    def begins(self) -> None:
        """A step of this worker begins."""
        self._inside = True

    def ends(self) -> None:
        """A step of this worker has ended."""
        self._steps += 1
        self._inside = False

    def stop(self) -> None:
        """End the pulse thread."""
        self._stop.set()
        self._thread.join(EVERY_S * 2)

    def _run(self) -> None:
        beat, said = 0, ""
        while True:
            beat += 1
            try:
                run_folder.write(self._path, Pulse(os.getpid(), self._life, beat, self._steps, self._inside))
            except OSError as error:  # read as silence, which ends the round if it lasts
                if str(error) != said:
                    logger.warning("xpyd: the pulse cannot be written: %s", error)
                said = str(error)
            if self._stop.wait(EVERY_S):
                return
