"""The compiled shortcuts where they could be built (``_fast``), else the same in Python (``plain``).

XPYD_PLAIN=1 in the environment takes Python's, so that the same tests run over both.
"""

from __future__ import annotations

from xpyd_sidecar import built
from xpyd_sidecar.router.relay.plain import CAREFUL, NOTED, PLAIN, REVISION

__all__ = ["CAREFUL", "COMPILED", "NOTED", "PLAIN", "Outlet", "Scanner", "UpstreamReceiver"]

try:
    from xpyd_sidecar.router.relay import _fast

    built.check("the shortcuts", _fast.REVISION, REVISION)
    from xpyd_sidecar.router.relay._fast import Outlet, Scanner, UpstreamReceiver
except ImportError:  # not built, or for another machine: everything works without
    from xpyd_sidecar.router.relay.plain import Outlet, Scanner, UpstreamReceiver

COMPILED = UpstreamReceiver.__module__ != "xpyd_sidecar.router.relay.plain"
"""Whether the shortcuts are there; the router's log says so when it starts."""
