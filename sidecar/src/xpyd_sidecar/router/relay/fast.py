"""The compiled shortcuts where they could be built (``_fast``), else the same in Python (``plain``).

Belongs here: the choice. XPYD_PLAIN=1 in the environment takes Python's, so that the same tests run over both.
"""

from __future__ import annotations

from xpyd_sidecar import built
from xpyd_sidecar.router.relay.plain import CAREFUL, NOTED, PLAIN, REVISION

__all__ = ["CAREFUL", "COMPILED", "NOTED", "PLAIN", "Leg", "Outlet", "Scanner"]

try:
    from xpyd_sidecar.router.relay import _fast

    built.check("the shortcuts", _fast.REVISION, REVISION)
    from xpyd_sidecar.router.relay._fast import Leg, Outlet, Scanner
except ImportError:  # not built, or for another machine: everything works without
    from xpyd_sidecar.router.relay.plain import Leg, Outlet, Scanner

COMPILED = Leg.__module__ != "xpyd_sidecar.router.relay.plain"
"""Whether the shortcuts are there; the router's log says so when it starts."""
