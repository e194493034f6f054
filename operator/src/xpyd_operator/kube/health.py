"""What the operator tells about itself over HTTP.

    GET /healthz   200 while restarting would not help; the kubelet restarts it otherwise
    GET /readyz    200 while it does its part: a leader that sees everything, or a follower that sees the Lease
    GET /metrics   Prometheus

The bodies of the first two are one line per trouble, or ``ok``. An API server that is away makes it not ready, never
unhealthy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiohttp import web

from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.metrics import CONTENT_TYPE, Metrics

Checks = Callable[[], Sequence[str]]
"""What is wrong now, in words; empty when nothing is."""


class PortTaken(XpydError):
    """The port of --http-port cannot be listened on."""


class Health:
    """The server; ``start`` it first and ``close`` it last, so that it can be asked for the whole life of the process."""

    def __init__(self, metrics: Metrics, unhealthy: Checks, unready: Checks) -> None:
        self._metrics = metrics
        self._unhealthy = unhealthy
        self._unready = unready
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        """Listen on all addresses of both families.

        Raises:
            PortTaken: see there.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._text)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=30.0, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, None, port)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            raise PortTaken(f"--http-port {port}: {error.strerror or error}") from None

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._unhealthy())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._unready())

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _answer(troubles: Sequence[str]) -> web.Response:
    return web.Response(status=503 if troubles else 200, text="\n".join(troubles or ("ok",)) + "\n")
