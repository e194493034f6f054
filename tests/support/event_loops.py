"""Event loops of tests/unit and tests/sockets: asyncio's own, unless a module names others. What hypothesis tries is
the same in every run.

    LOOPS = ("asyncio", "uvloop")      each of its tests runs on both (the router runs on uvloop)
    LOOPS = ("virtual",)               time passes only while nothing is to be done; for tests without sockets and threads

    HYPOTHESIS_PROFILE=explore pytest …      other examples in every run

With CI=true a run without one of the extensions fails: all tests of it would be left out, and nobody would see it.
"""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from compiled import missing
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("CI") == "true" and os.environ.get("XPYD_PLAIN") != "1" and (absent := missing()):
        names = ", ".join(absent)
        raise pytest.UsageError(f"not compiled, or for other files: {names}; python sidecar/hatch_build.py says why")


class _Selector(selectors.DefaultSelector):
    """Does not wait for a time to come: it has come."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0.0 if timeout else timeout)
        if not found and timeout:
            self.passed_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers run in their order and at their times, whatever else the machine does, and nobody waits for them."""

    def __init__(self) -> None:
        self._passing = _Selector()
        super().__init__(self._passing)

    def time(self) -> float:
        return self._passing.passed_s


_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop, "virtual": VirtualLoop}


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {name: _FACTORIES[name] for name in getattr(item.module, "LOOPS", ("asyncio",))}
