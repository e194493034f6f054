"""The agent's unix socket: HTTP on ``<run dir>/agent.sock``, for preStop hooks, the local backend and people.

    GET  /status            state, role, epoch, load, routers with the age of their acks, last problem
    POST /drain             begin to drain; 202 and the state of things
    POST /drain?wait=1      the same, answered when drained, or at the drain deadline: {"drained": …, "reason": …}
    POST /undrain           take the drain back
    GET  /live              {"hangs": …}: why the engine is to be ended; empty where it lives, as far as anybody knows
    POST /stacks            {"first": …}: who asks first since it is to be ended has its stacks written before
    POST /adapters          {"adapters": [{"name": …, "source": …, "revision": …}]}: have these, and no others
    POST /role              {"role": …, "epoch": …}: take this role, if the epoch is higher; 409 where it is too old

Who can open the run folder may ask; the socket is mode 0600. Errors are ``{"error": …}`` with a fitting status.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from xpyd_sidecar.contract import adapters, assignment
from xpyd_sidecar.contract.adapters import AdapterOrder
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.launch import AGENT_SOCKET
from xpyd_sidecar.errors import ConfigError, OurFault
from xpyd_sidecar.process.accepting import Acceptor

UNIX_PATH_MAX = 107
"""Bytes of a unix socket's path, without the final NUL (unix(7))."""
BACKLOG = 128
"""Connections that the kernel keeps until they are accepted."""
MOST = 256
"""Connections that are open at once; others wait in the kernel."""
SHUTDOWN_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TooOld(Exception):
    """A role of an epoch that has passed, or another one of the present epoch; the message says so."""


class Speaker(Protocol):
    """What the socket asks of the agent."""

    def status(self) -> dict[str, Any]:
        """The answer of GET /status."""

    def hangs(self) -> str:
        """The answer of GET /live."""

    def stacks(self) -> bool:
        """The answer of POST /stacks."""

    def drain(self) -> None:
        """Begin to drain; nothing if it drains already."""

    def undrain(self) -> None:
        """Take the drain back; nothing if it does not drain."""

    async def wait_drained(self, timeout_s: float | None) -> tuple[bool, str]:
        """``(drained, reason)`` once drained, at the drain deadline or after ``timeout_s``."""

    def assign(self, told: Assignment) -> None:
        """Take a role; nothing if it is the present one. Raises TooOld, and OSError where it cannot be kept."""

    def order_adapters(self, order: AdapterOrder) -> None:
        """Have the engine follow an order of adapters. Raises OSError where it cannot be kept."""


@contextlib.contextmanager
def short_path(run_dir: Path) -> Iterator[str]:
    """A path of the socket that fits into ``sun_path``: through the folder's descriptor where the real one is too long."""
    path = run_dir / AGENT_SOCKET
    if len(os.fsencode(path)) <= UNIX_PATH_MAX:
        yield str(path)
        return
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{AGENT_SOCKET}"
    finally:
        os.close(folder)


def listen(run_dir: Path) -> socket.socket:
    """The listening socket. A socket file that a dead agent left is replaced.

    Raises:
        ConfigError: another agent answers there, or the folder cannot be used.
    """
    path = run_dir / AGENT_SOCKET
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with short_path(run_dir) as short:
            if path.exists():
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(1.0)
                    if probe.connect_ex(short) == 0:
                        raise ConfigError(f"another agent answers at {path} - at `$.run_dir`")
                path.unlink()
            sock = socket.socket(socket.AF_UNIX)
            try:
                os.fchmod(sock.fileno(), 0o600)
                sock.bind(short)
                path.chmod(0o600)
                sock.listen(BACKLOG)
                sock.setblocking(False)
            except OSError:
                sock.close()
                raise
            return sock
    except OSError as error:
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error} - at `$.run_dir`") from None


def acceptor_of(runner: web.AppRunner, sockets: list[socket.socket],
                crowded: Callable[[Sequence[RequestHandler]], None] | None = None) -> Acceptor:
    """Accepts for an application that is set up: a bounded number a turn, and at once. ``crowded``: told of those that are
    there, the oldest first, when there is no room for more; it may close some.
    """
    server = runner.server
    if server is None:
        raise OurFault("an application that was not set up")

    def full(opening: int) -> bool:
        if len(server.connections) + opening < MOST:
            return False
        if crowded is not None:
            crowded(server.connections)
        return True

    return Acceptor(sockets, server, full, who="the agent's clients")


class Control:
    """The server. ``start`` it, ``close`` it."""

    def __init__(self, run_dir: Path, speaker: Speaker) -> None:
        self._run_dir = run_dir
        self._speaker = speaker
        self._acceptor: Acceptor | None = None
        app = web.Application(middlewares=[answer_errors], client_max_size=adapters.MOST_BYTES)
        app.add_routes([web.get("/status", self._status), web.post("/drain", self._drain),
                        web.post("/undrain", self._undrain), web.post(assignment.PATH, self._role),
                        web.post(adapters.PATH, self._adapters),
                        web.get("/live", self._live), web.post("/stacks", self._stacks)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)

    async def start(self) -> None:
        """Listen. Raises ConfigError as ``listen`` does."""
        sock = listen(self._run_dir)
        await self._runner.setup()
        self._acceptor = acceptor_of(self._runner, [sock])

    async def close(self) -> None:
        """Stop and remove the socket file."""
        if self._runner.server is None:
            return
        if self._acceptor is not None:
            self._acceptor.close(at_once=True)
        await self._runner.cleanup()
        with contextlib.suppress(FileNotFoundError):
            (self._run_dir / AGENT_SOCKET).unlink()

    async def _status(self, _: web.Request) -> web.Response:
        return _json(self._speaker.status())

    async def _drain(self, request: web.Request) -> web.Response:
        wait = request.query.get("wait", "0")
        if wait not in {"0", "1"}:
            raise web.HTTPBadRequest(text=f"wait: 0 or 1, not {wait!r}")
        timeout_s: float | None = None
        if "timeout_s" in request.query:
            try:
                timeout_s = float(request.query["timeout_s"])
            except ValueError:
                timeout_s = 0.0
            if not timeout_s > 0:
                raise web.HTTPBadRequest(text=f"timeout_s: seconds above 0, not {request.query['timeout_s']!r}")
        self._speaker.drain()
        if wait == "0":
            return _json(self._speaker.status(), status=202)
        drained, reason = await self._speaker.wait_drained(timeout_s)
        return _json({"drained": drained, "reason": reason})

    async def _undrain(self, _: web.Request) -> web.Response:
        self._speaker.undrain()
        return _json(self._speaker.status())

    async def _role(self, request: web.Request) -> web.Response:
        return await take_role(request, self._speaker)

    async def _adapters(self, request: web.Request) -> web.Response:
        return await take_adapters(request, self._speaker)

    async def _live(self, _: web.Request) -> web.Response:
        return _json({"hangs": self._speaker.hangs()})

    async def _stacks(self, _: web.Request) -> web.Response:
        return _json({"first": self._speaker.stacks()})


async def take_role(request: web.Request, speaker: Speaker) -> web.Response:
    """``POST /role``, however it came. Raises aiohttp's errors with a reason."""
    try:
        speaker.assign(assignment.decode(await request.read()))
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    except TooOld as error:
        raise web.HTTPConflict(text=str(error)) from None
    except OSError as error:
        raise web.HTTPInternalServerError(text=f"the role cannot be kept: {error}") from None
    return _json(speaker.status())


async def take_adapters(request: web.Request, speaker: Speaker) -> web.Response:
    """``POST /adapters``, however it came. Raises aiohttp's errors with a reason."""
    try:
        order = adapters.decode(await request.read())
        speaker.order_adapters(order)
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    except OSError as error:
        raise web.HTTPInternalServerError(text=f"the order cannot be kept: {error}") from None
    return _json({"order": order.digest}, status=202)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors as JSON."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"error": error.text or error.reason}, status=error.status)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
