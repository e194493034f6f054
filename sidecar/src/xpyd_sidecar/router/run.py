"""The router as one coroutine: of one process or of several, it runs until it is told to stop, drains, and ends."""

from __future__ import annotations

import asyncio

from xpyd_sidecar.beside import Draining
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.router.app import RouterProcess, leave_garbage
from xpyd_sidecar.router.workers.owner import OwnerRouter


async def run_router(config: SidecarConfig, key: ServiceKey, stop: asyncio.Event, draining: Draining | None = None) -> None:
    """Run a router until ``stop`` is set, then drain it; ``draining``: of the agent beside. Raises ConfigError."""
    several = config.router is not None and config.router.workers > 1
    router = OwnerRouter(config, key) if several else RouterProcess(config, key)
    await router.start()
    if draining is not None:
        draining.listen(router.turn_away)
    leave_garbage()
    stopping, failing = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(router.wait_failed())
    try:
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
    except BaseException:
        await router.end()
        raise
    finally:
        stopping.cancel()
        failing.cancel()
    await router.stop()
