"""What a full machine does to an engine of several ranks, made by hand: one stands still, or all get next to nothing.

    with lagging(lambda: engine.group, random.Random(1)):
        …                       for 1 to 3 s of each 2 to 7 s one of its workers makes no step
    with starving(lambda: engine.group):
        …                       its processes have a share of the processors as if 30 others ran beside each
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import Group

RANK = "VLLM::Worker_TP"
LOW = 15
"""A priority with a weight of 36, where others have 1,024: what is left of a processor with 30 processes."""


def ranks(group: Group) -> list[int]:
    """Its workers."""
    found = []
    for pid in group.pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(RANK):
                found.append(pid)
    return found


@contextlib.contextmanager
def _meanwhile(call: Callable[[threading.Event], None]) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=call, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def lagging(group: Callable[[], Group | None], source: random.Random) -> contextlib.AbstractContextManager[None]:
    """``group``: the engine's; None while it is being started again."""
    def lag(over: threading.Event) -> None:
        while not over.wait(source.uniform(1.0, 4.0)):
            now = group()
            if now is None or not (found := ranks(now)):
                continue
            pid = source.choice(found)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                over.wait(source.uniform(1.0, 3.0))
                os.kill(pid, signal.SIGCONT)

    return _meanwhile(lag)


@contextlib.contextmanager
def starving(group: Callable[[], Group | None]) -> Iterator[None]:
    """Beside one busy process for each processor, in sessions of their own, since the kernel may share out by session."""
    def lower(over: threading.Event) -> None:
        while not over.wait(0.5):
            now = group()
            for pid in now.pids() if now is not None else ():
                with contextlib.suppress(OSError):
                    Path(f"/proc/{pid}/autogroup").write_text(str(LOW))
                for thread in Path(f"/proc/{pid}/task").glob("*"):
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, int(thread.name), LOW)

    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True)
            for _ in range(os.cpu_count() or 1)]
    try:
        with _meanwhile(lower):
            yield
    finally:
        for one in busy:
            one.kill()
            one.wait()
