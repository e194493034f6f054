"""What was found, written at once wherever it changes, and what is said while it is found."""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

TAIL_BYTES: Final = 400_000


class OutOfTimeError(BaseException):
    """The run's time is over. No part takes it for a fault of its own."""


class TooLongError(Exception):
    """A part has taken all of its time."""


class Report:
    """Of one run, below a folder."""

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.found: dict[str, Any] = {}
        self._began, self._seconds = time.monotonic(), seconds
        self._said = (folder / "said.txt").open("a", encoding="utf-8")

    def left(self) -> float:
        """Seconds until the run's time is over."""
        return self._seconds - (time.monotonic() - self._began)

    def say(self, *what: object) -> None:
        """A line, on standard output and in a file."""
        line = f"[{time.monotonic() - self._began:6.1f}] {' '.join(map(str, what))}"
        print(line, flush=True)
        self._said.write(line + "\n")
        self._said.flush()

    def note(self, part: str, **found: Any) -> None:
        """Put down what a part has found, beside what it has found before."""
        self.found.setdefault(part, {}).update(found)
        file = self.folder / "result.json"
        file.with_suffix(".part").write_text(json.dumps(self.found, indent=1) + "\n")
        file.with_suffix(".part").replace(file)

    def keep(self, logs: Iterable[tuple[str, Path]]) -> None:
        """Pack the ends of logs."""
        made = self.folder / "logs.tar.gz"
        with tarfile.open(made.with_suffix(".part"), "w:gz", compresslevel=3) as archive:
            for name, path in logs:
                _add_end(archive, f"{name}.log", path)
        made.with_suffix(".part").replace(made)


def _add_end(archive: tarfile.TarFile, name: str, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        entry = tarfile.TarInfo(name)
        entry.size = min(size, TAIL_BYTES)
        file.seek(size - entry.size)
        archive.addfile(entry, file)
