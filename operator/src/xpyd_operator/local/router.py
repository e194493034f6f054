"""The router process of a service on this host."""

from __future__ import annotations

import shutil

import msgspec

from xpyd_operator.local import logs, store
from xpyd_operator.local.paths import ServiceFolder, make_private, run_folder
from xpyd_operator.local.store import Settings
from xpyd_operator.local.units import Unit
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.process import sidecar_process, sidecar_revision
from xpyd_sidecar.contract.launch import SidecarConfig

RESTART_GRACE_S = 30.0
"""How long streams may go on when the router is restarted for new settings; new requests are refused meanwhile."""


class _SavedPorts(msgspec.Struct, frozen=True):
    port: int
    admin_port: int | None = None


class _Saved(msgspec.Struct, frozen=True):
    router: _SavedPorts | None = None


class LocalRouter:
    """The router on this host."""

    def __init__(self, service: ServiceFolder, settings: Settings) -> None:
        self.run_dir = run_folder(settings.run_dir, service.service, "router")
        self.python = settings.python
        self.unit = Unit("router", service.router, service.marker("router", "router"))
        self.file = service.router / "config.json"

    def config(self) -> SidecarConfig | None:
        """What it was started with; None where it was not.

        Raises:
            LocalError: the file is damaged.
        """
        return store.load_config(self.file)

    def admin_port(self) -> int | None:
        """Where it answers this program; one of a release that had no port for that, where clients come. None: it was not
        started.

        Raises:
            LocalError: the file is damaged.
        """
        found = store.load(self.file, _Saved)
        if found is None or found.router is None:
            return None
        return found.router.port if found.router.admin_port is None else found.router.admin_port

    def revision(self) -> Revision | None:
        """Of what it was started with."""
        config = self.config()
        return sidecar_revision(config) if config is not None else None

    async def start(self, config: SidecarConfig) -> None:
        """Start it, again if it runs.

        Raises:
            LocalError: it did not come up.
        """
        if self.unit.alive():
            await self.unit.stop(RESTART_GRACE_S)
        make_private(self.run_dir)
        store.save(self.file, config)
        process = sidecar_process(self.python, str(self.file))
        await self.unit.start(process.argv, process.env)

    async def stop(self, grace_s: float) -> None:
        """End it, its streams first.

        Raises:
            LocalError: it does not end.
        """
        await self.unit.stop(grace_s)
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def bound_log(self) -> None:
        """Keep its log small."""
        logs.bound(self.unit.log)
