"""Whether what was compiled for this package may be taken. XPYD_PLAIN=1 in the environment takes Python's way instead."""

from __future__ import annotations

import os


def check(what: str, revision: int, wanted: int) -> None:
    """Nothing, where it may.

    Raises:
        ImportError: Python's way is wanted, or it was built for other files than these.
    """
    if os.environ.get("XPYD_PLAIN") == "1":
        raise ImportError("Python's way is wanted")
    if revision != wanted:
        raise ImportError(f"{what} were built for other files (revision {revision}, not {wanted})")
