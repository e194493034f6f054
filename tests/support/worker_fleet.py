"""A router of several real processes, before scripted engines.

    async with several(prefills=1, decodes=2, workers=3) as f:
        await f.ok(stream=True)
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from beats import SERVICE
from replay import Replay
from router_fleet import HOSTS, KEY, Answer, RouterFleet
from scripted_engine import ScriptedEngine

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.router.workers.owner import Owner


class Several(RouterFleet):
    """A fleet whose router is several processes."""

    router: Owner

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in self.router._workers.values() if w.process is not None]

    async def fleet(self) -> Fleet:
        answer = await self.get("/fleet", headers={"Authorization": f"Bearer {keys.admin_token(KEY)}"})
        assert answer.status == 200
        return msgspec.json.decode(answer.body, type=Fleet)

    async def wait_known(self) -> None:
        """Every worker has applied what the owner has taken until now."""
        taken = self.router._index
        await self.wait(lambda: self.router._legs.applied() >= taken and all(
            w.listening and not w.behind for w in self.router._workers.values()), "workers that know all")

    async def ok(self, **fields: Any) -> Answer:
        answer = await self.complete(**fields)
        assert answer.status == 200
        return answer


@contextlib.asynccontextmanager
async def several(prefills: int = 1, decodes: int = 2, workers: int = 3, replay: Replay | None = None,
                  **settings: Any) -> AsyncIterator[Several]:
    """Start engines and a router of so many workers; beats are sent once, far apart."""
    ps = [await ScriptedEngine(f"p{i}", replay).start() for i in range(prefills)]
    ds = [await ScriptedEngine(f"d{i}", replay).start() for i in range(decodes)]
    made: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "members_port": 0, "heartbeat_s": 0.5, "resolve_s": 0.0,
                            "drain_timeout_s": 5.0, "workers": workers, "hosts": HOSTS}
    config = SidecarConfig(service=SERVICE, instance=InstanceName("r0"), key_file="", run_dir="", log_level="error",
                           router=RouterConfig(**(made | settings)))
    router = Owner(config, KEY)
    try:
        await router.start()
        found = Several(router, ps, ds)
        for engine in (*ps, *ds):
            found.beat(engine, interval_s=60.0)
        await found.wait_known()
        yield found
    finally:
        await router.end()
        for engine in (*ps, *ds):
            await engine.stop()
