"""Pure tests: none of them opens a socket or starts a process (``pure_tests``); what does is in tests/sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from event_loops import pytest_asyncio_loop_factories, pytest_sessionstart  # noqa: F401 (hooks)
from fair_session import fair  # noqa: F401 (a fixture)
from pure_tests import pure


@pytest.fixture(autouse=True)
def machine_left_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """What fixtures of larger scopes do before is not seen."""
    with pure(request.node.nodeid):
        yield
