"""The agent's endpoint on the network, by signed calls (``contract.signing``): ``POST /role``, ``POST /adapters``, and
``POST /member`` where the engine is one of several members (``rounds``). Those also answer the probes of a kubelet, which
signs nothing: ``GET /group/ready``, 200 or 503 and why not; and whoever reads ``GET /metrics`` of a member.

So a role changes at once where the operator is on another host; what it says also reaches the agent by the pod's volume,
later. Errors are ``{"error": …}``: 401 without a right signature, 400 for what is no assignment, 409 for one that is too
old, 413 for a body that is too large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from xpyd_sidecar.agent.control import BACKLOG, Handler, Speaker, acceptor_of, answer_errors, take_adapters, take_role
from xpyd_sidecar.agent.member_metrics import CONTENT_TYPE, MemberFigures, exposition
from xpyd_sidecar.agent.rounds import HelloRefused, Rounds
from xpyd_sidecar.contract import adapters, assignment, group, keys, signing
from xpyd_sidecar.contract.group import MemberHello
from xpyd_sidecar.contract.ids import HostPort, split_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process.accepting import Acceptor, bind

SHUTDOWN_S = 1.0
STRANGER_S = 1.0
"""Where no room is left for more connections, those over which nothing signed came for so long are closed."""
METRICS_PATH = "/metrics"
LARGE = 2
"""Orders of adapters that are read at once: a signature can only be looked at when its body is there."""
LARGE_S = 10.0
"""In which such a body must come."""
OPEN_PATHS = (group.READY_PATH, METRICS_PATH)
"""To be read by whoever reaches the port."""


class Remote:
    """The server. ``start`` it, ``close`` it."""

    def __init__(self, listen: HostPort, key: ServiceKey, speaker: Speaker, instance: str, *,
                 members: bool = False) -> None:
        """``instance``: who this is; ``members``: others of a group come here."""
        self._listen = listen
        self._key = keys.derive(key, "agent call")
        self._calls = signing.CallVerifier(self._key, instance)
        self._speaker = speaker
        self.rounds: Rounds | None = None
        """Who hears the hellos of other members; None: nobody, there are none."""
        self.probed: Callable[[], str] | None = None
        """Why a member is not ready, in words; None: there are no members."""
        self.measured: Callable[[], MemberFigures] | None = None
        """What such a member tells of itself."""
        self._acceptor: Acceptor | None = None
        self._known: set[RequestHandler] = set()
        """Connections over which something signed came."""
        self._strangers: dict[RequestHandler, float] = {}
        """The others, and since when they are in the way."""
        self._most = group.MOST_BYTES if members else assignment.MOST_BYTES
        """Bytes of a body, but of an order of adapters."""
        self._large = asyncio.Semaphore(LARGE)
        app = web.Application(middlewares=[answer_errors, self._check], client_max_size=adapters.MOST_BYTES)
        app.add_routes([web.post(assignment.PATH, self._role), web.post(adapters.PATH, self._adapters),
                        web.post(group.PATH, self._member),
                        web.get(group.READY_PATH, self._ready), web.get(METRICS_PATH, self._metrics)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        host, port = split_host_port(self._listen)
        await self._runner.setup()
        try:
            sockets = await bind(host, port, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen at {self._listen}: {error.strerror or error} - at `$.agent.listen`") from None
        self._acceptor = acceptor_of(self._runner, sockets, self._crowded)

    async def close(self) -> None:
        """Stop serving calls."""
        if self._acceptor is not None:
            self._acceptor.close(at_once=True)
        if self._runner.server is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in ("GET", "HEAD") and request.path in OPEN_PATHS:
            return await handler(request)
        signature = request.headers.get(signing.HEADER)
        if signature is None:
            raise web.HTTPUnauthorized(text="a signed call of the operator is needed")
        if refusal := self._calls.refusal(signature, request.method, request.path, await self._body(request)):
            raise web.HTTPUnauthorized(text=refusal)
        if request.protocol not in self._known:
            self._known = {request.protocol, *(each for each in self._known if each.transport is not None)}
        return await handler(request)

    async def _body(self, request: web.Request) -> bytes:
        if request.path == adapters.PATH:
            try:
                async with self._large, asyncio.timeout(LARGE_S):
                    return await request.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout(text=f"the body did not come within {LARGE_S:g} s") from None
        if request.body_exists and (request.content_length is None or request.content_length > self._most):
            raise web.HTTPRequestEntityTooLarge(self._most, request.content_length or 0)
        return await request.read()

    def _crowded(self, there: Sequence[RequestHandler]) -> None:
        """Strangers who say nothing, or read slowly, must not keep members and the operator out."""
        now = asyncio.get_running_loop().time()
        self._strangers = {each: self._strangers.get(each, now) for each in there if each not in self._known}
        for each, since in self._strangers.items():
            if now - since >= STRANGER_S:
                each.force_close()

    async def _role(self, request: web.Request) -> web.Response:
        return await take_role(request, self._speaker)

    async def _adapters(self, request: web.Request) -> web.Response:
        return await take_adapters(request, self._speaker)

    async def _ready(self, _: web.Request) -> web.Response:
        if self.probed is None:
            raise web.HTTPNotFound(text="this engine is all of its instance")
        if problem := self.probed():
            raise web.HTTPServiceUnavailable(text=problem)
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.measured is None:
            raise web.HTTPNotFound(text="this engine is all of its instance; its server has the metrics")
        return web.Response(body=exposition(self.measured()).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _member(self, request: web.Request) -> web.Response:
        if self.rounds is None:
            raise web.HTTPConflict(text="this engine is all of its instance")
        try:
            answer = self.rounds.receive(msgspec.json.decode(await request.read(), type=MemberHello))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise web.HTTPBadRequest(text=f"no hello of a member: {error}") from None
        except HelloRefused as error:
            raise web.HTTPConflict(text=str(error)) from None
        body = msgspec.json.encode(answer)
        signature = signing.sign_answer(self._key, request.headers.get(signing.HEADER, ""), body)
        return web.Response(body=body, content_type="application/json", headers={signing.HEADER: signature})
