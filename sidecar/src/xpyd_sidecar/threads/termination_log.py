"""What ends an engine, left where Kubernetes looks for it.

A worker or the engine core ends by an exception, and the API server, which is the container's process, by another one that
only says that it was so. kubelet keeps the last 2,048 bytes of the log, which hold the API server's alone. So whichever
process fails first writes its innermost exception into the container's termination log, which kubelet takes instead.

Outside of a container of Kubernetes there is no such file, and nothing happens.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

TERMINATION_LOG: Final = Path("/dev/termination-log")
FATAL: Final = {
    "vllm.v1.engine.core": ("EngineCore failed to start", "EngineCore encountered a fatal error"),
    "vllm.v1.executor.multiproc_executor": ("WorkerProc failed to start",),
}
"""What vLLM logs, with the exception, before a process of an engine ends; by logger."""
LONGEST: Final = 1000


class TerminationLog(logging.Handler):
    """Writes the exception of the first fatal record into a file that is still empty."""

    def __init__(self, path: Path, phrases: tuple[str, ...]) -> None:
        super().__init__(logging.ERROR)
        self._path = path
        self._phrases = phrases

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, as logging calls it."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.getMessage().startswith(self._phrases):
            leave(self._path, innermost(error))


def listen(path: Path = TERMINATION_LOG) -> None:
    """Begin to listen in this process, where there is such a file; once."""
    if not os.access(path, os.W_OK):
        return
    for name, phrases in FATAL.items():
        theirs = logging.getLogger(name)
        if not any(isinstance(each, TerminationLog) for each in theirs.handlers):
            theirs.addHandler(TerminationLog(path, phrases))


def leave(path: Path, words: str) -> None:
    """Write, unless another process was first. That it cannot be written is no reason to fail otherwise."""
    try:
        with open(path, "r+", encoding="utf-8") as file:
            if not file.read(1):
                file.write(words[:LONGEST])
    except OSError as error:
        logger.debug("cannot write %s: %s", path, error)


def innermost(error: BaseException) -> str:
    """The exception that the others were raised from, in words like those of a traceback."""
    for _ in range(32):
        if error.__cause__ is None:
            break
        error = error.__cause__
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {error}"
