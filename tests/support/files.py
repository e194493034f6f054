"""A process that has no files left: this one, or one that a test started.

    with no_files(): …                 nothing can be opened here
    with no_files(router.pid): …       nothing can be opened there
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


def lowest_free(pid: int) -> int:
    """The descriptor that a process gets next."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


@contextlib.contextmanager
def no_files(pid: int = 0) -> Iterator[int]:
    """The limit of a process is the lowest descriptor that it has free; gives the limit. What is open stays so."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    if pid:
        free = lowest_free(pid)
    else:
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield free
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
