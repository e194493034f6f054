"""Parking on a word of shared memory, waking who parked there, and fences.

The futex is Linux's own primitive for it: no descriptor, no message, and the kernel compares the word with the value that
the sleeper saw, so that a change in between is never slept over (futex(2)). The words are shared between processes, so the
private form is not used. Python has no call for it: ctypes makes the system call.

``wait`` lets other Python threads run; ``wake`` does not let go of the interpreter's lock, since it never blocks.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from ctypes import util
from typing import Final

from xpyd_sidecar.errors import ConfigError

_WAIT: Final = 0
_WAKE: Final = 1
_ALL: Final = 0x7FFF_FFFF
_SEQ_CST: Final = 5
NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
"""The system call on each processor."""
TSO: Final = frozenset({"x86_64"})
"""Processors that keep every order but a store before a later load."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Waits and wakes on the words that begin at ``address``. One per thread: it keeps the arguments of its calls, since
    making them anew takes longer than the call.
    """

    def __init__(self, address: int, machine: str = platform.machine()) -> None:
        """Raises ConfigError on a processor whose system call is not known."""
        if machine not in NUMBERS:
            raise ConfigError(f"the broadcast queue runs on {' and '.join(sorted(NUMBERS))}, not on {machine}")
        self._address = address
        self._blocking = ctypes.CDLL(None).syscall
        self._short = ctypes.PyDLL(None).syscall
        self._blocking.restype = self._short.restype = ctypes.c_long
        self._at, self._value, self._span = ctypes.c_void_p(), ctypes.c_uint32(), _Timespec()
        number, none = ctypes.c_long(NUMBERS[machine]), ctypes.c_uint32(0)
        self._wait = (number, self._at, ctypes.c_int(_WAIT), self._value, ctypes.byref(self._span), None, none)
        self._wake = (number, self._at, ctypes.c_int(_WAKE), ctypes.c_uint32(_ALL), None, None, none)

    def wait(self, word: int, value: int, timeout_s: float) -> None:
        """Sleep while the word has this value, until it is woken, a signal comes or the time is over; it may end early."""
        self._at.value = self._address + 4 * word
        self._value.value = value
        self._span.seconds = int(timeout_s)
        self._span.nanoseconds = int(timeout_s % 1 * 1e9)
        self._blocking(*self._wait)

    def wake(self, word: int) -> None:
        """Wake everybody who sleeps on the word."""
        self._at.value = self._address + 4 * word
        self._short(*self._wake)


class Fences:
    """The fences of this processor.

    ``full``: every access before it is visible before any after it. On x86 taking and giving a free lock does it: both are
    locked instructions, whichever way this Python makes its locks. Elsewhere the C library's fence does it (libatomic).
    ``order``: the same, where the processor may reorder more than a store before a later load; None on x86.
    """

    def __init__(self, machine: str = platform.machine()) -> None:
        """Raises ConfigError where a fence is needed and libatomic is missing."""
        self.full: Callable[[], object]
        self.order: Callable[[], object] | None
        if machine in TSO:
            lock = threading.Lock()
            self._acquire, self._release = lock.acquire, lock.release
            self.full = self._locked
            self.order = None
            return
        try:
            fence = ctypes.PyDLL(util.find_library("atomic") or "libatomic.so.1").atomic_thread_fence
        except (OSError, AttributeError) as error:
            raise ConfigError(f"the broadcast queue needs libatomic on {machine} (Debian: libatomic1): {error}") from None
        order = ctypes.c_int(_SEQ_CST)
        self.full = self.order = lambda: fence(order)

    def _locked(self) -> None:
        self._acquire()
        self._release()
