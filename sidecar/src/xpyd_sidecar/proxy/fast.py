"""The compiled shortcuts where they could be built (``_fast``), else the same in Python (``plain``).

Belongs here: the choice. XPYD_PLAIN=1 in the environment takes Python's, so that the same tests run over both.
"""

from __future__ import annotations

import os

from xpyd_sidecar.proxy.plain import CAREFUL, NOTED, PLAIN, REVISION

__all__ = ["CAREFUL", "COMPILED", "NOTED", "PLAIN", "Leg", "Outlet", "Scanner"]


def _take(revision: int) -> None:
    if os.environ.get("XPYD_PLAIN") == "1":
        raise ImportError("Python's way is wanted")
    if revision != REVISION:
        raise ImportError(f"the shortcuts were built for other files (revision {revision}, not {REVISION})")


try:
    from xpyd_sidecar.proxy import _fast

    _take(_fast.REVISION)
    from xpyd_sidecar.proxy._fast import Leg, Outlet, Scanner
except ImportError:  # not built, or for another machine: everything works without
    from xpyd_sidecar.proxy.plain import Leg, Outlet, Scanner

COMPILED = Leg.__module__ != "xpyd_sidecar.proxy.plain"
"""Whether the shortcuts are there; the router's log says so when it starts."""
