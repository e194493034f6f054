"""Gates: whether bytes may still be written into blocks, for threads of Python's and for those that do without it.

A gate stands for one try of a load. The engine's thread opens it with the order to load and closes it in the same call that
makes the load's report. Whoever writes into blocks does so only inside, so nothing is written into what was given back:

    engine's thread   open ───────────────────────── close ──▶ report withheld until nobody is inside ──▶ blocks are free
    who writes             enter, write, leave, enter, write, leave │ enter: refused

``Gate`` is one atomic word that threads of C share (``_gate.h``), or a lock where nothing was compiled. It is also a
``memory.marks.CopyMark``: done when closed and nobody is inside.
"""

from __future__ import annotations

import threading

from xpyd_sidecar.process import built

__all__ = ["COMPILED", "REASON", "Gate"]

REVISION = 2
"""Of ``_stripes``, which is not loaded when it was built for other files."""


class LockedGate:
    """Open until closed, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._inside = 0

    def enter(self) -> bool:
        """Begin to write, if still open; then ``leave`` must follow. Several writes may be under way."""
        with self._lock:
            self._inside += self._open
            return self._open

    def leave(self) -> None:
        """A write has ended."""
        with self._lock:
            if not self._inside:
                raise RuntimeError("nobody is inside")
            self._inside -= 1

    def close(self) -> None:
        """No write begins from here on."""
        with self._lock:
            self._open = False

    def done(self) -> bool:
        """Whether nothing is written any more."""
        with self._lock:
            return not self._open and not self._inside


REASON = ""
"""Why there are no threads of C, in words; empty: there are."""
try:
    from xpyd_sidecar.transport import _stripes

    built.check("the stripes", _stripes.REVISION, REVISION)
    from xpyd_sidecar.transport._stripes import Gate
except ImportError as error:  # not built, or for another machine: links that need no threads of C work without
    REASON = f"tcp: its loops were not compiled when xpyd was installed ({error})"
    Gate = LockedGate  # type: ignore[misc, assignment]

COMPILED = not REASON
"""Whether there is the link tcp."""
