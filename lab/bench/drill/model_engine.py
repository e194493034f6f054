"""An HTTP engine whose times are those of the simulation (``core``), and an agent that tells routers of it as real ones do.

    router ──/v1/completions──▶ engine: prefill's leg ─▶ handed (transfer) ─▶ decode's leg ─▶ tokens
    router ◀──beats (CURVE)──── its agent: role, state, load, what it has of prompts, what it took in; what other routers
                                 say of their tenants
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq
from beats import beat, bye
from completions import Asked, body_of, choice_of, decode_asked, encode, event, ids_behind, send_whole, usage_of
from core import Core

from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.instance import DECODE, PREFILL
from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.contract.demand import RouterDemand, newest_demands
from xpyd_sidecar.contract.ids import AgentId, HostPort, Incarnation, Role, ServiceName, State
from xpyd_sidecar.contract.intake import Intake
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import Ack, Load
from xpyd_sidecar.process import curve

BEAT_S = 0.5
BACKLOG = 2048
MOST_HANDED = 4096
"""Prompts whose KV nobody has asked for, at most; the oldest are dropped."""
HANDED_S = 60.0
_agents = itertools.count(1)


class Handed:
    """KV on its way between the engines of a drill."""

    def __init__(self) -> None:
        self._all: OrderedDict[tuple[str, int], asyncio.Future[tuple[Core, float]]] = OrderedDict()

    def of(self, leg: legs.Leg) -> asyncio.Future[tuple[Core, float]]:
        """Done when prefill is through: by whom, and when it began."""
        key = leg.transfer, leg.attempt
        if key not in self._all:
            self._all[key] = asyncio.get_running_loop().create_future()
            while len(self._all) > MOST_HANDED:
                self._all.popitem(last=False)
        return self._all[key]

    def over(self, leg: legs.Leg) -> None:
        """Nobody asks for it any more."""
        self._all.pop((leg.transfer, leg.attempt), None)


class ModelEngine:
    """One instance: listens while it serves, beats from its start to its end."""

    def __init__(self, name: str, role: Role, host: str, model: EngineModel, handed: Handed, *, service: str, served: str,
                 key: ServiceKey) -> None:
        self.name, self.role, self.host = name, role, host
        self._model, self._handed = model, handed
        self._service, self._served, self._key = ServiceName(service), served, key
        self._core: Core | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sockets: dict[HostPort, zmq.Socket[bytes]] = {}
        self._agent = AgentId(f"{next(_agents):020d}")
        self._demands: dict[str, RouterDemand] = {}
        """By router."""
        self._seq = 0
        self._lives = 0
        self._told = Incarnation("")
        """Of its last beat."""
        self.requests = 0
        """Open ones."""
        self._waiting = 0
        """Decode: of those, whose KV is not here."""
        self._prompts = self._received = 0
        """Tokens of prompts of decode, and those of them that came as KV."""
        self.port = 8000

    @property
    def serves(self) -> bool:
        """It listens."""
        return self._core is not None

    async def begin(self) -> None:
        """A new life: serve from now on."""
        self._lives += 1
        self._core = Core(self._model, PREFILL if self.role is Role.PREFILL else DECODE)
        self._prompts = self._received = 0
        self._server = await asyncio.start_server(self._connected, self.host, self.port, limit=1 << 26, backlog=BACKLOG)

    async def die(self) -> None:
        """All connections break, and nobody is told."""
        core, self._core = self._core, None
        if self._server is not None:
            self._server.close()
            self._server = None
        if core is not None:
            core.stop()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what its agent tells

    def tell(self, context: zmq.Context[Any], routers: Iterable[HostPort], *, draining: bool) -> None:
        """One beat to each router. What they answer is not needed."""
        wanted = set(routers)
        for address in self._sockets.keys() - wanted:
            self._sockets.pop(address).close()
        for address in wanted - self._sockets.keys():
            socket = self._sockets[address] = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            curve.connect(socket, self._key, "membership")
            socket.connect(f"tcp://{address}")
        self._seq += 1
        state = State.DRAINING if draining else State.READY if self.serves else State.STARTING
        self._told = Incarnation(f"{self.name}-{self._lives}" if self.serves else "")
        self._send(beat(
            self.name, self.role, f"{self.host}:{self.port}", service=self._service, seq=self._seq, state=state,
            agent=self._agent, model=self._served, interval_s=BEAT_S, control=(HostPort(f"{self.host}:7000"),),
            incarnation=self._told, max_model_len=1 << 20, demands=newest_demands(tuple(self._demands.values())),
            load=self._load(), drained=draining and not self.requests))

    def farewell(self) -> None:
        """It goes, and says so."""
        self._send(bye(self.name, service=self._service, agent=self._agent, incarnation=self._told))
        for socket in self._sockets.values():
            socket.close(linger=500)
        self._sockets.clear()

    def _send(self, message: Any) -> None:
        raw = msgspec.msgpack.encode(message)
        for socket in self._sockets.values():
            with contextlib.suppress(zmq.Again):
                while True:
                    self._hear(socket.recv(zmq.NOBLOCK))
            with contextlib.suppress(zmq.Again):  # a router that does not answer is told again with the next beat
                socket.send(raw, zmq.NOBLOCK)

    def _hear(self, raw: bytes) -> None:
        """What a router says of its tenants goes to all routers with the next beat."""
        said = msgspec.msgpack.decode(raw, type=Ack).demand
        if said is not None:
            self._demands[said.router] = said

    def _load(self) -> Load:
        core = self._core
        if core is None:
            return Load()
        instance = core.instance
        work = PromptWork(core.queued, core.computed)
        if self.role is Role.PREFILL:
            return Load(running=min(1, instance.count), waiting=max(0, instance.count - 1), prompts=work)
        kv = max(0.0, instance.kv + instance.reserved) / instance.model.kv_tokens
        taken = Intake(prompts=self._prompts, received=self._received,
                       links=(("tcp", int(self._received * instance.model.kv_bytes)),) if self._received else ())
        running = len(instance.batch) + len(instance.prompts)
        return Load(running=running, waiting=self._waiting + len(instance.waiting), kv_usage=kv, prompts=work, intake=taken)

    # ---- requests

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if head[0].startswith("GET "):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return headers.get("connection") != "close"
        try:
            asked = decode_asked(raw)
        except msgspec.DecodeError as error:
            await send_whole(writer, 400, {"error": {"message": str(error), "type": "BadRequest", "code": 400}})
            return True
        if asked.max_tokens < 1:  # a router takes a leg back
            await send_whole(writer, 400, {"error": {"message": "max_tokens must be at least 1", "type": "X", "code": 400}})
            return True
        self.requests += 1
        answering = asyncio.ensure_future(self._answer(asked, headers.get("x-request-id", ""), writer))
        watching = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return False  # who asked has gone
            answering.result()
            return True
        finally:
            self.requests -= 1
            for each in (answering, watching):
                each.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _answer(self, asked: Asked, request: str, writer: asyncio.StreamWriter) -> None:
        core = self._core
        if core is None:
            raise ConnectionError("it has died")
        params = asked.kv_transfer_params
        leg = legs.decode(params) if params and "role" in params else None  # what decode computes alone names its prefixes
        if self.role is Role.PREFILL and leg is not None:
            await self._prefill(core, leg, asked, request, writer)
        else:
            await self._decode(core, leg, asked, request, writer)

    async def _prefill(self, core: Core, leg: legs.Leg, asked: Asked, request: str, writer: asyncio.StreamWriter) -> None:
        tokens = len(asked.ids)
        begins, over = core.prefill(tokens)
        await asyncio.sleep(max(0.0, over - core.now()))
        handed = self._handed.of(leg)
        if not handed.done():
            handed.set_result((core, begins))
        body = body_of(asked, request, [choice_of("x", "length", None)], usage_of(tokens, 1))
        body["kv_transfer_params"] = {legs.CACHED: 0}
        await send_whole(writer, 200, body)

    async def _decode(self, core: Core, leg: legs.Leg | None, asked: Asked, request: str, writer: asyncio.StreamWriter
                      ) -> None:
        tokens = len(asked.ids)
        parts: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        received = leg is not None and await self._receive(core, leg, tokens)
        self._prompts += tokens
        self._received += tokens if received else 0
        begin: Callable[..., int] = core.admit if received else core.compute
        number = begin(tokens, asked.max_tokens, lambda more, last: parts.put_nowait((more, last)))
        try:
            await self._stream(parts, asked, request, writer)
        finally:
            core.forget(number)

    async def _receive(self, core: Core, leg: legs.Leg, tokens: int) -> bool:
        """Wait for the KV of a prompt; False: it does not come, and the prompt is to be computed."""
        self._waiting += 1
        try:
            source, begins = await asyncio.wait_for(self._handed.of(leg), min(HANDED_S, leg.remaining_s))
            model = core.instance.model
            here = max(source.instance.carry(tokens, begins), core.instance.carry(tokens, begins),
                       core.now() + model.handover_s(tokens))
            await asyncio.sleep(max(0.0, here - core.now()))
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._waiting -= 1
            self._handed.over(leg)

    async def _stream(self, parts: asyncio.Queue[tuple[int, bool]], asked: Asked, request: str, writer: asyncio.StreamWriter
                      ) -> None:
        prompt, given, last = asked.ids, 0, False
        if not asked.stream:
            while not last:
                more, last = await parts.get()
                given += more
            choices = [choice_of("x" * given, "length", None)]
            await send_whole(writer, 200, body_of(asked, request, choices, usage_of(len(prompt), given)))
            return
        out = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        while not last:
            more, last = await parts.get()
            ids = ids_behind(len(prompt) + given, more) if asked.return_token_ids else None
            choice = choice_of("x" * more, "length" if last else None, ids)
            if asked.return_token_ids and not given:
                choice["prompt_token_ids"] = prompt
            given += more
            out += event(encode(body_of(asked, request, [choice])))
            if last:
                if (asked.stream_options or {}).get("include_usage"):
                    out += event(encode(body_of(asked, request, [], usage_of(len(prompt), given))))
                out += event(b"[DONE]") + b"0\r\n\r\n"
            writer.write(out)
            await writer.drain()
            out = b""
