"""The compiled shortcuts where they could be built (``_fast``), else the same in Python (``plain``).

XPYD_PLAIN=1 in the environment takes Python's, so that the same tests run over both.
"""

from __future__ import annotations

from xpyd_sidecar.process import built
from xpyd_sidecar.router.relay.plain import ANSWER_REVISION, CAREFUL, NOTED, PLAIN, REVISION, Whole

__all__ = ["CAREFUL", "COMPILED", "NOTED", "PLAIN", "Outlet", "Scanner", "UpstreamReceiver", "Whole", "take"]

try:
    from xpyd_sidecar.router.relay import _answer, _fast

    built.check("the shortcuts", _fast.REVISION, REVISION)
    built.check("the shortcuts of answers", _answer.REVISION, ANSWER_REVISION)
    from xpyd_sidecar.router.relay._answer import take
    from xpyd_sidecar.router.relay._fast import Outlet, Scanner, UpstreamReceiver
except ImportError:  # not built, or for another machine: everything works without
    from xpyd_sidecar.router.relay.plain import Outlet, Scanner, UpstreamReceiver, take

COMPILED = UpstreamReceiver.__module__ != "xpyd_sidecar.router.relay.plain"
"""Whether the shortcuts are there; the router's log says so when it starts."""
