"""A vLLM plugin for tests: a thread of the connector that can wait for its sockets no more, from when a file is there.

    PYTHONPATH=<this folder> DYING_THREAD=xpyd-sender DYING_WHEN=/path/of/a/file      vLLM finds it by its entry point
"""

from __future__ import annotations

import os
import selectors
import threading
from pathlib import Path
from typing import Any

THREAD, WHEN = "DYING_THREAD", "DYING_WHEN"


def plugin() -> None:
    """What vLLM calls in each process."""
    import zmq

    for owner, name in ((selectors.EpollSelector, "select"), (zmq.Poller, "poll")):
        if not hasattr(getattr(owner, name), "dying"):
            setattr(owner, name, _dying(getattr(owner, name), os.environ[THREAD], Path(os.environ[WHEN])))


def _dying(call: Any, thread: str, when: Path) -> Any:
    def called(*args: Any, **more: Any) -> Any:
        if threading.current_thread().name == thread and when.exists():
            raise OSError(9, "Bad file descriptor")
        return call(*args, **more)

    called.dying = True  # type: ignore[attr-defined]
    return called
