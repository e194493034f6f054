"""The compiled loops over bytes where they could be built (``_moves``), else the same in Python (``moves_plain``).

Belongs here: the choice. XPYD_PLAIN=1 in the environment takes Python's, so that the same tests run over both.
"""

from __future__ import annotations

from xpyd_sidecar.process import built
from xpyd_sidecar.transport.moves_plain import REVISION

__all__ = ["COMPILED", "Scatter", "sums"]

try:
    from xpyd_sidecar.transport import _moves

    built.check("the loops", _moves.REVISION, REVISION)
    from xpyd_sidecar.transport._moves import Scatter, sums
except ImportError:  # not built, or for another machine: everything works without
    from xpyd_sidecar.transport.moves_plain import Scatter, sums

COMPILED = Scatter.__module__ != "xpyd_sidecar.transport.moves_plain"
"""Whether the loops run outside of the interpreter; the log of a link says so where they are not."""
