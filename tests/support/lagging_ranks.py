"""One rank of a tensor-parallel engine stands still for a while, now and then: what a full machine does to it.

    with lagging(engine.group, random.Random(1)):
        …                                          for 1 to 3 s of each 2 to 7 s one of its workers makes no step
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import Group

RANK = "VLLM::Worker_TP"


def ranks(group: Group) -> list[int]:
    """Its workers."""
    found = []
    for pid in group.pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(RANK):
                found.append(pid)
    return found


@contextlib.contextmanager
def lagging(group: Callable[[], Group], source: random.Random) -> Iterator[None]:
    """``group``: the engine's, which may be started again meanwhile."""
    over = threading.Event()

    def lag() -> None:
        while not over.wait(source.uniform(1.0, 4.0)):
            if not (found := ranks(group())):
                continue  # it is being started
            pid = source.choice(found)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                over.wait(source.uniform(1.0, 3.0))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=lag)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
