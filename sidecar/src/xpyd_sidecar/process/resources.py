"""What this process has of its machine: open files, local ports, memory. Whose fault an error of a socket is.

Belongs here: telling a lack of our own from a peer's failure; the limit of open files, and how much may be open within it.
Does not belong here: what is done about it (``accepting``, ``serving.exchange``, ``agent``).

A connection that could not be made because this process has no file, no port or no memory left says nothing of the other
side. Who takes it for the other side's failure ends what is healthy, and at the worst time: when much is to be done.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import re
import resource
import time
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

WORDS = {
    errno.EMFILE: "no file descriptors are left to this process",
    errno.ENFILE: "no file descriptors are left on this machine",
    errno.ENOBUFS: "no memory is left for another connection",
    errno.ENOMEM: "no memory is left for another connection",
    errno.EADDRNOTAVAIL: "no local port is left for another connection",
}
"""Errors of a socket that are our own, and what they mean."""

MOST_FILES = 1 << 20
"""More than that is not asked for: what the kernel allows a process unless told otherwise (``fs.nr_open``)."""
RESERVE = 320
"""Files for everything but clients and engines: 128 of the admin port (its places, and as many that are told that there is
none), 64 of clients that are told so, and 128 for logs, sockets of the membership, probes of engines, libraries that load
late."""
OWN_PIECE = 128 << 10
"""Bytes of memory that are asked of the system by themselves, and given back to it by themselves."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""
PER_REQUEST = 3
"""Files of a request: its client, its prefill, its decode."""
SAY_S = 1.0
"""Between two lines of a log about the same lack."""


class Lack(Exception):
    """Something could not be tried, since this process lacks what it takes. Says nothing of the other side."""


def is_own_lack(error: BaseException) -> bool:
    """Whether an error of a connect, an accept or an open file is this process's own lack; ZeroMQ's have a number, too."""
    return getattr(error, "errno", None) in WORDS


def refuse_lack(error: BaseException) -> None:
    """Raises Lack where an error tells of this process, not of the other side."""
    if is_own_lack(error):
        raise Lack(words(error)) from None


def words(error: BaseException) -> str:
    """What is lacking, for a client too: it names no address. ``error``: one for which ``is_own_lack`` holds."""
    return WORDS[getattr(error, "errno", 0)]


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may have: its container's limit, or the machine's; 0: neither can be read."""
    found = []
    for name, factor in (("sys/fs/cgroup/memory.max", 1), ("sys/fs/cgroup/memory/memory.limit_in_bytes", 1),
                         ("proc/meminfo", 1024)):
        try:
            number = re.search(r"^(?:MemTotal: *)?([0-9]+)", (root / name).read_text())
        except OSError:
            continue
        if number is not None:
            found.append(factor * int(number[1]))
    return min(found, default=0)


class OpenLimits(msgspec.Struct, frozen=True):
    """How much this process may have open at once."""

    connections: int
    """Of clients."""
    in_flight: int
    """Requests."""


def open_limits(files: int, connections: int, in_flight: int) -> OpenLimits:
    """What a limit of open files leaves of the ``connections`` and requests that are allowed.

    A request has ``PER_REQUEST`` files; beside each there is one for a client that waits, is refused, or asks for health.
    """
    free = max(files - RESERVE, PER_REQUEST + 1)
    in_flight = min(in_flight, free // (PER_REQUEST + 1))
    return OpenLimits(min(connections, free - (PER_REQUEST - 1) * in_flight), in_flight)


def raise_files() -> int:
    """Raise the soft limit of open files to the hard one, as vLLM's server does. Returns what it is then.

    Shells and systemd begin with 1,024, for the sake of programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return most


def give_back_memory() -> bool:
    """From now on the C library gives memory back to the system as soon as it is free. False: this one cannot be told so.

    glibc takes pieces of 128 KiB and more from the system, one by one, and gives them back; but each that is freed raises
    that bound, up to 32 MiB, and what is below it lies between what is still in use. After 40 bodies of 31 MiB a router
    kept 425 MiB for ever; with a bound that stays where it is, 54 (51 before).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    pieces, trimmed = mallopt(_M_MMAP_THRESHOLD, OWN_PIECE), mallopt(_M_TRIM_THRESHOLD, OWN_PIECE)
    return bool(pieces == trimmed == 1)


class Complaint:
    """Says in a log what is lacking: a line a second at most, with how often it was found."""

    def __init__(self, what: str) -> None:
        """``what`` could not be done."""
        self._what = what
        self._times = 0
        self._next = 0.0

    def add(self, error: BaseException, now: float | None = None) -> None:
        """It was found once more. ``now``: seconds of a monotonic clock."""
        now = time.monotonic() if now is None else now
        self._times += 1
        if now >= self._next:
            said = error if isinstance(error, Lack) else words(error)
            logger.warning("%s: %s", self._what, said, extra={"times": self._times})
            self._times, self._next = 0, now + SAY_S
