"""Event loops of unit tests: asyncio's own, unless a module names others.

    LOOPS = ("asyncio", "uvloop")      each of its tests runs on both (the router runs on uvloop)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvloop

_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {name: _FACTORIES[name] for name in getattr(item.module, "LOOPS", ("asyncio",))}
