"""Where an agent finds what role it has: the file that the pod's volume shows, and what it was told last.

Both outlive the agent's process. Neither is trusted to be newer: the epoch says which one holds (``beat``).
"""

from __future__ import annotations

import logging
from pathlib import Path

from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import Assignment

logger = logging.getLogger(__name__)


class RoleFiles:
    """The files of one agent."""

    def __init__(self, run_dir: Path, shown: str | None) -> None:
        """``shown``: the file of the volume; None where there is none."""
        self._paths = [run_dir / assignment.KEPT, *([Path(shown)] if shown is not None else [])]
        self._problems: dict[Path, str] = {}

    def read_assignments(self) -> list[Assignment]:
        """Read every assignment that can be read; a file that cannot is logged once and left alone."""
        found = []
        for path in self._paths:
            try:
                told = assignment.read(path)
            except (ValueError, OSError) as error:
                if self._problems.get(path) != str(error):
                    logger.warning("%s: %s; the role stays as it is", path, error)
                    self._problems[path] = str(error)
                continue
            self._problems.pop(path, None)
            if told is not None:
                found.append(told)
        return found
