"""The stacks of an engine's processes, written to their log before the engine is ended because it stands still.

The interpreter writes them from within the signal's handler, in C: also while a thread holds its lock and never gives it
back. Nobody else need look into the process, which the containers of most clusters may not.
"""

from __future__ import annotations

import faulthandler
from typing import Final

from xpyd_sidecar.contract.liveness import STACKS_SIGNAL

STDERR: Final = 2
"""Not ``sys.stderr``, which vLLM replaces by one that writes a name before each line, and which may have no file."""


def listen() -> None:
    """Begin to listen in this process; once is enough, and twice is no harm."""
    faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True, chain=False)
