"""All parts of a router: made, started, run until it is told to stop, drained and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
from collections.abc import Callable
from functools import partial

import msgspec

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.contract.waking import CALL_MAX
from xpyd_sidecar.errors import OurFault
from xpyd_sidecar.process import resources
from xpyd_sidecar.process.beside import Draining
from xpyd_sidecar.process.patience import GRACE_S, late, timeout_with_grace
from xpyd_sidecar.router.api.paths import STREAMED
from xpyd_sidecar.router.balance.told_prefixes import ToldPrefixes
from xpyd_sidecar.router.endpoints.admin import AdminPaths
from xpyd_sidecar.router.endpoints.application import Paths
from xpyd_sidecar.router.endpoints.probes import Probes
from xpyd_sidecar.router.endpoints.traces import Tracer
from xpyd_sidecar.router.endpoints.waking import WakeEndpoint
from xpyd_sidecar.router.fleet.heartbeat_listener import HeartbeatListener
from xpyd_sidecar.router.fleet.roster import STANDSTILL_S
from xpyd_sidecar.router.http.auth import Admin, ClientKeys
from xpyd_sidecar.router.http.connection import ClientConnection
from xpyd_sidecar.router.http.ledger import HeldKind
from xpyd_sidecar.router.http.places import ConnectionPlaces
from xpyd_sidecar.router.http.server import ADMIN_CONNECTIONS, MAX_CONNECTIONS, Certificate, RequestBounds, Server
from xpyd_sidecar.router.observing.metrics import Vitals
from xpyd_sidecar.router.relay import fast
from xpyd_sidecar.router.serving.context import RequestContext

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
LEAVES = "no instance is ready, and this router ends: another one may know of one"
"""What is said to those who are held for an instance."""
ADMIN_RECEIVE_S = 5.0
"""How long a request may take to come at the admin port, where bodies are small."""
GC_THRESHOLD = (20_000, 20, 20)
"""Objects of a request go by their reference counts; the collector looks for the few cycles, which can wait."""


def leave_garbage() -> None:
    """Objects made at start live for ever: the collector need not look at them again and again, nor often at others."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


class RouterProcess:
    """All parts of one router, started and stopped together."""

    def __init__(self, config: SidecarConfig, key: ServiceKey) -> None:
        if config.router is None:
            raise OurFault("run_router without a router section")
        self.files = resources.raise_files()
        """Files that this process may have open."""
        room = resources.open_limits(self.files, MAX_CONNECTIONS, config.router.max_in_flight)
        config = msgspec.structs.replace(config, router=msgspec.structs.replace(
            config.router, max_in_flight=room.in_flight))
        assert config.router is not None
        self._config = config.router
        self._key = key
        self._client_keys = ClientKeys(self._config.api_key_file, keys.derive(key, "client keys"))
        self.context = RequestContext(config)
        self.context.serve_clients(self._client_keys, keys.derive(key, "cache salt"))
        self.probes = Probes(self.context)
        self.tracer = Tracer(self.context, key)
        bounds = RequestBounds(self._config.max_header_bytes, self._config.max_body_bytes, self._config.receive_timeout_s)
        self.server = Server(Paths(self.context, self._client_keys, self.probes), bounds, STREAMED,
                             connect=ClientConnection, body_budget=self._config.budget_bytes,
                             places=ConnectionPlaces(room.connections, self._config.trusted_proxies))
        self.server.bodies.shares.several = self.context.several
        self.wakes = WakeEndpoint(self.context, key)
        admin_paths = AdminPaths(self.context, self.probes, Admin(key, config.instance), self.tracer, self.wakes)
        small = RequestBounds(self._config.max_header_bytes, CALL_MAX, ADMIN_RECEIVE_S)
        self.admin = Server(admin_paths, small, connect=ClientConnection, places=ConnectionPlaces(ADMIN_CONNECTIONS),
                            setting="admin_port")
        """What clients do to their server is nothing to this one's connections."""
        self.context.pool.most = (resources.PER_REQUEST - 1) * room.in_flight
        take, count = self.context.on_message, partial(self.context.observer.metrics.count, "membership_messages")
        self.members = HeartbeatListener(config.instance, take, count, self.context.watch.verdict,
                                        self.context.poison.refusals)
        self.members.demand = self.context.demand_words
        if self.context.picker.holdings is not None:
            self.members.take_prefixes = ToldPrefixes(self.context.roster, self.context.picker.holdings).take
        cert, key_file = self._config.tls_cert_file, self._config.tls_key_file
        self._certificate = Certificate(cert, key_file) if cert is not None and key_file is not None else None
        self.port = self.members_port = self.admin_port = 0
        self.awake = -math.inf
        """When this process last came back from standing still."""
        self._sweeper: asyncio.Task[None] | None = None
        self._vitals = Vitals()
        self.context.observer.metrics.vitals = self.vitals

    def vitals(self) -> Vitals:
        """What this process knows of itself, now."""
        vitals = self._vitals
        vitals.connections, vitals.refused = len(self.server.connections), self.server.refusals
        vitals.gave_way = self.server.gave_way
        ledger = self.server.ledger
        vitals.held = {kind.value: ledger.held_bytes(kind) for kind in HeldKind}
        vitals.held[HeldKind.BODIES.value] = self.server.bodies.held_bytes  # the reserve for small ones, too
        vitals.accept_errors = self.server.accept_errors
        return vitals

    async def start(self) -> None:
        """Listen on all ports. Raises ConfigError: names the port that is taken, or the setting that is wrong."""
        try:
            self.members_port = self.members.listen(self._config.host, self._config.members_port, self._key)
            self.admin_port = await self.admin.listen(self._config.host, self._config.admin_port, self._certificate)
            self.port = await self.server.listen(self._config.host, self._config.port, self._certificate)
        except BaseException:
            await self.end()
            raise
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        logger.info("router listens", extra={"port": self.port, "members_port": self.members_port,
                    "admin_port": self.admin_port, "policy": self._config.policy, "files": self.files,
                    "connections": self.server.places.most,
                    "in_flight": self._config.max_in_flight, "compiled": fast.COMPILED})

    def turn_away(self, away: bool) -> None:
        """Send clients elsewhere (not ready, ``Connection: close``) while serving all who come, or take that back.

        While the engine beside drains: the pod goes, and connections that clients keep would find it gone.
        """
        self.context.draining = self.server.turned_away = away
        if away:
            self.context.hold.close(LEAVES)
        else:
            self.context.hold.open()

    async def stop(self) -> None:
        """Drain: no longer ready, no new connections after ``listen_on_s``, own requests end within ``drain_timeout_s``."""
        self.context.draining = True
        self.server.drain()
        self.context.hold.close(LEAVES)
        await asyncio.sleep(self._config.listen_on_s)
        self.server.stop_listening()
        with contextlib.suppress(TimeoutError):
            async with timeout_with_grace(self._config.drain_timeout_s):
                while self.context.servings or self.server.connections or self.server.opening:
                    await asyncio.sleep(0.02)
                    self.server.leave()
        if self.context.servings:
            logger.warning("cut off requests that outlived the drain", extra={"requests": len(self.context.servings)})
            self.context.abort("the router stopped")
            await asyncio.sleep(0.05)  # for the error events to leave
        await self.end()

    async def end(self) -> None:
        """Close everything now."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        self.server.abort()
        self.wakes.close()
        self.admin.abort()
        self.context.abort("the router stopped")
        await self.tracer.close()
        await self.context.close()
        self.members.close()

    async def _sweep(self) -> None:
        loop, gap = asyncio.get_running_loop(), min(SWEEP_S, self._config.heartbeat_s / 2)
        turns: list[Callable[[], object]] = [lambda: self.context.sweep(self.awake),
                                             lambda: self.server.sweep(self.awake),
                                             lambda: self.admin.sweep(self.awake),
                                             self.members.read_messages, self._client_keys.reload]
        while True:
            due = loop.time() + gap
            await asyncio.sleep(gap)
            self._vitals.count_lag((now := loop.time()) - due)
            if late(now, due):
                if now - due > STANDSTILL_S:
                    self.awake = now
                    logger.warning("this process stood still", extra={"seconds": round(now - due, 1)})
                self.context.watch.tick()  # the roster must know of it before anything else it hears
                await asyncio.sleep(GRACE_S)
            for turn in turns:
                try:
                    turn()
                except Exception:
                    logger.exception("a turn of the clock failed")


async def run_router(config: SidecarConfig, key: ServiceKey, stop: asyncio.Event, draining: Draining | None = None) -> None:
    """Run a router until ``stop`` is set, then drain it; ``draining``: of the agent beside. Raises ConfigError."""
    resources.give_back_memory()
    router = RouterProcess(config, key)
    await router.start()
    if draining is not None:
        draining.listen(router.turn_away)
    leave_garbage()
    try:
        await stop.wait()
    except BaseException:
        await router.end()
        raise
    await router.stop()
