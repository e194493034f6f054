"""Engines as older connectors make them: a heartbeat over plain ZMQ, and KV that is found by request id.

    wire = Wire()                                    what P sends and D takes, by request id
    engine = await OlderEngine("P", wire).start(router.guests_port, interval_s=0.1)

P stores under the request id, for the address of D that it reads in it, and answers one token. D reads P's address in the
id and waits until P's KV is there, for ever if it never comes. Without addresses in the id both fail, as those do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

ID = re.compile(r"___prefill_addr_(.+?)___decode_addr_(.+)_([0-9a-f]{32})")


class Wire:
    """The link between the engines."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], str] = {}
        """(request id, address of D) → prompt."""
        self.came = asyncio.Condition()

    async def put(self, request: str, decode: str, prompt: str) -> None:
        async with self.came:
            self.stored[request, decode] = prompt
            self.came.notify_all()

    async def wait(self, request: str, decode: str) -> str:
        async with self.came:
            await self.came.wait_for(lambda: (request, decode) in self.stored)
            return self.stored.pop((request, decode))


class OlderEngine:
    """One engine; ``fields`` go over its heartbeat."""

    def __init__(self, kind: str, wire: Wire, *, zmq_address: str = "", params: bool = False, **fields: Any) -> None:
        self.kind = kind
        self.wire = wire
        self.zmq_address = zmq_address
        self.params = params
        self.fields = fields
        self.port = 0
        self.seen: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.hold: asyncio.Event | None = None
        """Prefill waits for it before it answers."""
        self.status = 200
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None
        self._identity = ""
        """Each engine's own: of two peers with one identity, a ROUTER hears only one."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, guests_port: int, interval_s: float = 0.1) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._identity = f"127.0.0.1:{self.port + 10000}"
        self.zmq_address = self.zmq_address or self._identity
        self._context = zmq.asyncio.Context()
        self._tasks.append(asyncio.ensure_future(self._beat(guests_port, interval_s)))
        return self

    def silence(self) -> None:
        """No heartbeat any more; the HTTP side lives."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.silence()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _beat(self, port: int, interval_s: float) -> None:
        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.connect(f"tcp://127.0.0.1:{port}")
        while True:
            await socket.send(msgspec.msgpack.encode({
                "type": self.kind, "http_address": self.address, "zmq_address": self.zmq_address, **self.fields}))
            await asyncio.sleep(interval_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in
                           (line.partition(":") for line in head[1:] if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                status, answer = (200, {}) if head[0].startswith("GET") else await self._answer(headers, json.loads(raw))
                body = json.dumps(answer).encode()
                if self.kind == "D" and status == 200 and raw and json.loads(raw).get("stream"):
                    events = [b"data: " + body + b"\n\n", b"data: [DONE]\n\n"]
                    writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                                 + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events) + b"0\r\n\r\n")
                    continue
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                             f"content-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.transport.abort()

    async def _answer(self, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        request = headers["x-request-id"]
        self.seen.append(body)
        self.ids.append(request)
        found = ID.fullmatch(request)
        if found is None:
            return 500, {"error": {"message": "no address in the request id"}}
        if self.status != 200:
            return self.status, {"error": {"message": "told to fail"}}
        prefill, decode, _ = found.groups()
        params = body.get("kv_transfer_params", {})
        answer = {"id": f"cmpl-{request}", "model": "m", "object": "text_completion"}
        if self.kind == "P":
            assert prefill == self.zmq_address
            if self.hold is not None:
                await self.hold.wait()
            await self.wire.put(request, decode, body["prompt"])
            given = {"kv_transfer_params": {"remote_block_ids": [1, 2], "remote_engine_id": self.zmq_address,
                                            "transfer_id": params["transfer_id"]}} if self.params else {}
            return 200, answer | given | {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
        assert decode == self.zmq_address
        prompt = await self.wire.wait(request, decode)
        return 200, answer | {"choices": [{"index": 0, "text": f"{prompt} answered", "finish_reason": "stop"}]}
