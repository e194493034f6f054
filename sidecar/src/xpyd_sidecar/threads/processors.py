"""On which processors a thread runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Set as AbstractSet

logger = logging.getLogger(__name__)


def restrict(thread: int, processors: AbstractSet[int]) -> bool:
    """Have a thread of this process (its id in the kernel; 0: the calling one) run on these processors alone, and all that
    it starts from then on. Whether it does: a kernel that refuses is no reason to end, and is named in the log.
    """
    try:
        os.sched_setaffinity(thread, processors)
    except OSError as error:
        logger.warning("xpyd: a thread stays on the processors that it had, not on %s: %s", sorted(processors),
                       error.strerror)
        return False
    return True
