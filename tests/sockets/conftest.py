"""Tests without engines that open sockets or start processes."""

from event_loops import pytest_asyncio_loop_factories, pytest_sessionstart  # noqa: F401 (hooks)
from fair_session import fair  # noqa: F401 (a fixture)
