"""Between an operator and the API server: a proxy that answers for it, delays, loses answers and cuts connections.

    async with FaultProxy(kube, seed=1) as proxy:
        kubeconfig = proxy.kubeconfig(original, folder / "kubeconfig")
        proxy.faults = [Fault("status", share=0.5, status=409, methods=WRITES)]
        proxy.cut_watches()
        proxy.close()   proxy.open()              as if the API server were away
    proxy.pods_left = 3                       the operator is cut off once it has made three more pods
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Literal, Self

import aiohttp
import msgspec
import yaml
from aiohttp import web
from kube_client import Kube

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
READS = frozenset({"GET"})
_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"}
_OWN = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}
"""Headers of one hop. An answer stays packed as its client took it: the API server packs those of 128 KiB and more."""
_ADDED = ("Accept", "Accept-Encoding", "User-Agent")
"""What aiohttp would say of itself where a client says nothing."""


@dataclass(frozen=True)
class Fault:
    """What happens to a share of the requests. ``lose``: carried out, but the answer never comes."""

    kind: Literal["status", "delay", "drop", "lose"]
    share: float = 1.0
    status: int = 500
    delay_s: float = 0.0
    methods: frozenset[str] = WRITES | READS
    part: str = ""
    """Only paths that hold this."""


class FaultProxy:
    """Plain HTTP on loopback in front of the API server."""

    def __init__(self, kube: Kube, seed: int) -> None:
        self.faults: list[Fault] = []
        self.injected: Counter[str] = Counter()
        self.requests: Counter[tuple[str, int]] = Counter()
        """By method and the status that the operator saw; 0: none."""
        self.pods_left: int | None = None
        """Pods that may be made yet; None: all."""
        self.packed = 0
        """Answers that came packed."""
        self._random = Random(seed)
        self._kube = kube
        self._closed = False
        self._open: dict[int, web.Request] = {}
        self._watches: dict[int, web.Request] = {}
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._kube.ssl, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        assert self._runner is not None
        assert self._session is not None
        self.close()
        await self._runner.cleanup()
        await self._session.close()

    def kubeconfig(self, original: Path, path: Path) -> Path:
        """The same user, through this proxy."""
        document = yaml.safe_load(original.read_text())
        document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self.port}"}
        path.write_text(yaml.safe_dump(document))
        return path

    def close(self) -> None:
        """Every connection breaks, and new requests break too."""
        self._closed = True
        for request in list(self._open.values()):
            _abort(request)

    @property
    def closed(self) -> bool:
        """Nobody gets through."""
        return self._closed

    def open(self) -> None:
        """The API server is back."""
        self._closed = False

    def cut_watches(self) -> int:
        """Break the connections that watch; how many."""
        cut = list(self._watches.values())
        for request in cut:
            _abort(request)
        return len(cut)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._open[id(request)] = request
        try:
            return await self._answer(request)
        finally:
            self._open.pop(id(request), None)
            self._watches.pop(id(request), None)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._closed:
            return self._broken(request, "closed")
        if self.pods_left is not None and request.method == "POST" and request.path.endswith("/pods"):
            if not self.pods_left and "dryRun" not in request.query:
                self.close()
                return self._broken(request, "closed")
            self.pods_left -= "dryRun" not in request.query
        fault = self._draw(request)
        if fault is not None:
            self.injected[f"{fault.kind} {fault.status}" if fault.kind == "status" else fault.kind] += 1
            if fault.kind == "delay":
                await asyncio.sleep(fault.delay_s)
            elif fault.kind == "drop":
                return self._broken(request, "drop")
            elif fault.kind == "status":
                return self._refused(request, fault.status)
        return await self._forward(request, lose=fault is not None and fault.kind == "lose")

    def _draw(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if (request.method in fault.methods and fault.part in request.path and request.query.get("watch") != "true"
                    and self._random.random() < fault.share):
                return fault
        return None

    def _refused(self, request: web.Request, status: int) -> web.Response:
        self.requests[request.method, status] += 1
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": _REASONS.get(status, "Unknown"),
                "message": "injected by a test", "code": status, "details": {}}
        headers = {"Retry-After": "1"} if status == 429 else {}
        return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)

    def _broken(self, request: web.Request, why: str) -> web.Response:
        self.requests[request.method, 0] += 1
        _abort(request)
        return web.Response(status=500, text=why)

    async def _forward(self, request: web.Request, *, lose: bool) -> web.StreamResponse:
        assert self._session is not None
        watch = request.query.get("watch") == "true"
        if watch:
            self._watches[id(request)] = request
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
        try:
            async with self._session.request(request.method, f"{self._kube.server}{request.raw_path}", headers=headers,
                                             data=await request.read() or None, skip_auto_headers=_ADDED) as found:
                self.requests[request.method, found.status] += 1
                self.packed += "Content-Encoding" in found.headers
                if lose:
                    await found.read()
                    return self._broken(request, "lose")
                kept = {name: value for name, value in found.headers.items() if name.lower() not in _OWN}
                if not watch:
                    return web.Response(status=found.status, body=await found.read(), headers=kept)
                stream = web.StreamResponse(status=found.status, headers=kept)
                await stream.prepare(request)
                async for chunk in found.content.iter_any():
                    await stream.write(chunk)
                with contextlib.suppress(ConnectionError):
                    await stream.write_eof()
                return stream
        except (aiohttp.ClientError, OSError):
            return self._broken(request, "the API server is away")


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
