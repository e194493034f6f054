"""The fixture that makes the clock of a session of tests fair; a conftest that imports it has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fair_clock import fair_clock


@pytest.fixture(scope="session", autouse=True)
def fair() -> Iterator[None]:
    """What has a deadline in this process is not blamed for a machine that has no processor for it (``fair_clock``)."""
    with fair_clock():
        yield
