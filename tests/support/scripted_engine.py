"""An engine that does what a test says: streams with delays, dies, stalls, refuses, and remembers what it was asked.

    engine = await ScriptedEngine("d0").start()
    engine.plays.append(Play(chunks=3, die_after=1))     the next request; ``engine.default`` for all others
    engine.seen[-1].body / .headers / .aborted / .finished
    ScriptedEngine("d0", replay=Replay(load()))          answers as the real engine did that was recorded
    engine.choose = plan                                 a function of what was asked chooses the play

Speaks HTTP/1.1 with keep-alive, answers /v1/completions and /v1/chat/completions as vLLM does, and GET /health.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from replay import Replay, Unknown

BACKLOG = 2048
"""Of a listening socket: uvicorn's. With asyncio's 100 some of hundreds of connections at once begin seconds later."""


@dataclass
class Play:
    """How one request is answered."""

    chunks: int = 3
    """Tokens of the answer."""
    delay: float = 0.0
    """Seconds between chunks."""
    before: float = 0.0
    """Seconds before the head."""
    status: int = 200
    body: bytes | None = None
    """Instead of the usual body."""
    hold: asyncio.Event | None = None
    """Wait for it before anything else."""
    hold_after: tuple[int, asyncio.Event] | None = None
    """Wait for it after so many chunks."""
    die_at: str = ""
    """``request``: close the connection on the request; ``head``: after the head of a stream."""
    die_after: int | None = None
    """Close the connection after so many chunks, in the middle of a chunk."""
    close_after: int | None = None
    """Close the connection after so many chunks, between two of them."""
    down_after: int | None = None
    """Die as a whole after so many chunks: every connection breaks, new ones are refused."""
    silent_after: int | None = None
    """Say nothing more after so many chunks, with the socket open; new connections are refused."""
    cut_after: int | None = None
    """End the HTTP body properly after so many chunks, without [DONE]."""
    error_after: int | None = None
    """Send an error event, then [DONE], after so many chunks."""
    error_code: int = 500
    abort_after: int | None = None
    """Give finish reason ``abort`` after so many chunks, then [DONE]."""
    split: int = 0
    """Send the bytes of the stream in pieces of this size."""
    garbage: bytes = b""
    """Send this instead of an answer, and close."""
    text: Callable[[int], str] = field(default=lambda i: f"t{i} ")


@dataclass
class Seen:
    """One request that came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float
    aborted: bool = False
    finished: bool = False
    killed: bool = False
    """The engine died on it."""
    gone_at: float = 0.0
    connection: int = 0


class ScriptedEngine:
    """One engine on a free port of 127.0.0.1."""

    def __init__(self, name: str, replay: Replay | None = None) -> None:
        """``replay``: answer recorded requests, and continuations of them, as the real engine did; others with a 400."""
        self.name = name
        self.replay = replay
        self.cached: int | None = None
        """Of prompts that it prefills, as it tells; None: it does not."""
        self.choose: Callable[[Seen], Play | None] = lambda _: None
        """The play of a request; None: the next one in line."""
        self.port = 0
        self.plays: deque[Play] = deque()
        self.default = Play()
        self.refused: list[Seen] = []
        """Requests for -1 tokens."""
        self.refusal = 400
        """What those are answered with,"""
        self.deaf = False
        """or whether they are not."""
        self.seen: list[Seen] = []
        self.canaries: list[Seen] = []
        """Requests of the router's own; they get the default, and nothing of a replay."""
        self.unknown: list[str] = []
        """Requests for which there is nothing to replay."""
        self.health = 200
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket | None = None) -> Self:
        """Listen, on ``listener`` where one is given; again at the same port after ``stop``."""
        if listener is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26, backlog=BACKLOG)
        else:
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=1 << 26, backlog=BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def aborts(self) -> int:
        """Requests whose client went before the answer was complete."""
        return sum(seen.aborted for seen in self.seen)

    @property
    def open(self) -> int:
        """Requests that are neither answered nor aborted."""
        return sum(not (seen.aborted or seen.finished or seen.killed) for seen in self.seen)

    @property
    def connected(self) -> int:
        """Connections that are open now."""
        return len(self._writers)

    def refuse(self) -> None:
        """Accept no new connection; what is open stays."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def stop(self) -> None:
        """Die: every connection breaks."""
        self.refuse()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        number = self.connections
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._one(reader, writer, number):
                    pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            code = self.health if path == "/health" else 404
            writer.write(f"HTTP/1.1 {code} X\r\ncontent-length: 0\r\n\r\n".encode())
            return headers.get("connection") != "close"
        loop = asyncio.get_running_loop()
        seen = Seen(path, headers, json.loads(raw), loop.time(), connection=number)
        if seen.body.get("max_tokens") == -1:  # as vLLM does before anything else
            self.refused.append(seen)
            if not self.deaf:
                await self._fault(self.refusal, "max_tokens must be at least 1, got -1.", writer)
            return True
        canary = headers.get("x-request-id", "").startswith("xpyd-canary-")
        (self.canaries if canary else self.seen).append(seen)
        play = self.default if canary else self.choose(seen) or (self.plays.popleft() if self.plays else self.default)
        answering = asyncio.ensure_future(self._answer(seen, play, writer))
        watching = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            seen.killed = True
            raise
        else:
            seen.finished = answering.done() and answering.exception() is None
            seen.aborted, seen.gone_at = not seen.finished, loop.time()
            return seen.finished and answering.result()
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _answer(self, seen: Seen, play: Play, writer: asyncio.StreamWriter) -> bool:
        if play.hold is not None:
            await play.hold.wait()
        if play.garbage:
            writer.write(play.garbage)
            await writer.drain()
            return False
        if play.die_at == "request":
            return False
        if play.before:
            await asyncio.sleep(play.before)
        if play.status != 200 or play.body is not None:
            await self._fault(play.status, f"{self.name} says {play.status}", writer, play.body)
            return True
        try:
            return await self._generate(seen, play, writer)
        except Unknown as error:
            self.unknown.append(str(error))
            await self._fault(400, str(error), writer)
            return True

    async def _fault(self, status: int, words: str, writer: asyncio.StreamWriter, body: bytes | None = None) -> None:
        if body is None:
            body = json.dumps({"error": {"message": words, "type": "X", "param": None, "code": status}}).encode()
        writer.write(self._head(status, "application/json", f"content-length: {len(body)}") + body)
        await writer.drain()

    async def _generate(self, seen: Seen, play: Play, writer: asyncio.StreamWriter) -> bool:
        if seen.body.get("stream"):
            return await self._stream(seen, play, writer)
        if play.delay:
            await asyncio.sleep(play.delay * play.chunks)
        if play.die_after is not None:
            return False
        body = self._whole(seen, play)
        writer.write(self._head(200, "application/json", f"content-length: {len(body)}") + body)
        await writer.drain()
        return True

    def _whole(self, seen: Seen, play: Play) -> bytes:
        if self.replay is not None and play.abort_after is None and seen.body.get("max_tokens") != 1:
            return self.replay.whole(seen.path, seen.body, seen.headers.get("x-request-id", ""))
        tokens = min(play.chunks, seen.body.get("max_tokens") or play.chunks)
        text = "".join(play.text(i) for i in range(tokens))
        return self._json(seen, text, "abort" if play.abort_after is not None else "stop", whole=True)

    def _events(self, seen: Seen, play: Play) -> list[bytes]:
        if self.replay is not None and seen not in self.canaries:
            return self.replay.stream(seen.path, seen.body, seen.headers.get("x-request-id", ""))
        return [self._json(seen, play.text(i), "stop" if i == play.chunks - 1 else None) for i in range(play.chunks)]

    async def _stream(self, seen: Seen, play: Play, writer: asyncio.StreamWriter) -> bool:
        async def send(data: bytes) -> None:
            if not play.split:
                writer.write(data)
                await writer.drain()
                return
            for at in range(0, len(data), play.split):
                writer.write(data[at:at + play.split])
                await writer.drain()
                await asyncio.sleep(0)

        async def event(raw: bytes) -> None:
            data = b"data: " + raw + b"\n\n"
            await send(b"%x\r\n%b\r\n" % (len(data), data))

        events = self._events(seen, play)
        await send(self._head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked"))
        if play.die_at == "head":
            return False
        for i, raw in enumerate([*events, b"[DONE]"]):
            if play.hold_after is not None and play.hold_after[0] == i:
                await play.hold_after[1].wait()
            if play.die_after == i:
                writer.write(b"ff\r\ndata: {\"half")
                await writer.drain()
                return False
            if play.close_after == i:
                return False
            if play.down_after == i:
                self.refuse()
                for other in list(self._writers):
                    other.transport.abort()
                return False
            if play.silent_after == i:
                self.refuse()
                await asyncio.Event().wait()
            if play.cut_after == i:
                await send(b"0\r\n\r\n")
                return True
            if play.error_after == i:
                await event(json.dumps({"error": {"message": "engine core died", "type": "InternalServerError",
                                                  "param": None, "code": play.error_code}}).encode())
                await event(b"[DONE]")
                break
            if play.abort_after == i:
                await event(self._json(seen, "held", "abort"))
                await event(b"[DONE]")
                break
            await event(raw)
            if play.delay:
                await asyncio.sleep(play.delay)
        await send(b"0\r\n\r\n")
        return True

    def _head(self, status: int, kind: str, framing: str) -> bytes:
        return (f"HTTP/1.1 {status} X\r\ndate: now\r\nserver: uvicorn\r\ncontent-type: {kind}\r\nx-engine: {self.name}\r\n"
                f"{framing}\r\n\r\n").encode()

    def _json(self, seen: Seen, text: str, reason: str | None, *, whole: bool = False) -> bytes:
        chat = seen.path.endswith("/chat/completions")
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        if chat:
            choice["message" if whole else "delta"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = ("chat.completion" if whole else "chat.completion.chunk") if chat else "text_completion"
        name = f"{'chatcmpl' if chat else 'cmpl'}-{seen.headers.get('x-request-id', '')}"
        answer = {"id": name, "object": kind, "created": 1, "model": seen.body.get("model") or "tiny", "choices": [choice]}
        if whole:
            answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            if self.cached is not None and seen.body.get("kv_transfer_params", {}).get("role") == "prefill":
                answer["kv_transfer_params"] = {"cached_tokens": self.cached}
        return json.dumps(answer, separators=(",", ":")).encode()


def wait_for_kv(*engines: ScriptedEngine) -> asyncio.Event:
    """Decode engines that answer no leg whose prefill does not answer, as real ones; told is when one has such a leg."""
    has = asyncio.Event()

    def choose(seen: Seen) -> Play | None:
        if "role" not in seen.body.get("kv_transfer_params", {}):
            return None
        has.set()
        return Play(hold=asyncio.Event())

    for engine in engines:
        engine.choose = choose
    return has


def attempts(engine: ScriptedEngine) -> list[int | None]:
    """Of the legs that came to it, in order; None where one came without."""
    return [seen.body.get("kv_transfer_params", {}).get("attempt") for seen in engine.seen]
