"""A process that has no files left.

    with no_files(): …                 nothing can be opened here
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

STANDARD = 3
"""Input, output and errors are open in every process and stay so."""


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    """This process cannot open another file, whatever its other threads close meanwhile. What is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
