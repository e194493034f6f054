"""Random scripts of events leave nothing open, give a client one answer at most, and go the same way whether a request is
the first of its profile or not. Transports keep what they are given; time stands still unless the script moves it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.contract.membership import Heartbeat
from xpyd_sidecar.router.api.faults import FailureReason
from xpyd_sidecar.router.endpoints.application import Paths
from xpyd_sidecar.router.endpoints.probes import Probes
from xpyd_sidecar.router.fleet.member import InstanceLeaves, InstanceLost
from xpyd_sidecar.router.http import connection, heads
from xpyd_sidecar.router.http.server import RequestBounds, Server
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.upstream import call as engine_connection

IDS = b"[11,12,13]"
SCRIPTS = 300
STEPS = 14


class Clock:
    """The running loop with a time of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = 1000.0

    def time(self) -> float:
        """The script's time."""
        return self.now

    def call_at(self, when: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """On the real loop, as far away as it is here."""
        return self._loop.call_later(when - self.now, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Paper:
    """A transport that keeps what it is given, and what was done to it."""

    def __init__(self) -> None:
        self.out = b""
        self.done: list[str] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.out += data

    def get_extra_info(self, name: str) -> None:
        """There is no socket."""

    def set_write_buffer_limits(self, high: int) -> None:
        """Nothing is bounded."""

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def is_closing(self) -> bool:
        """Whether somebody closed it."""
        return self.closed

    def can_write_eof(self) -> bool:
        """As TCP."""
        return True

    def _note(self, what: str) -> None:
        self.done.append(what)
        self.closed = self.closed or what in {"close", "abort"}

    def abort(self) -> None:
        """Noted."""
        self._note("abort")

    def close(self) -> None:
        """Noted."""
        self._note("close")

    def write_eof(self) -> None:
        """Noted."""
        self._note("eof")

    def pause_reading(self) -> None:
        """Noted."""
        self._note("pause")

    def resume_reading(self) -> None:
        """Noted."""
        self._note("resume")


class Keys:
    """No client key is asked for."""

    keys = ()


class World:
    """A router between papers."""

    def __init__(self, script: Script) -> None:
        router = RouterConfig(host="127.0.0.1", port=0, members_port=0, admin_port=0, model="tiny",
                              failover=script.failover,  # type: ignore[arg-type]
                              policy="round_robin", access_log=False)
        self.context = context = RequestContext(SidecarConfig(
            service=ServiceName("s"), instance=InstanceName("r"), key_file="", run_dir="", router=router))
        context.via = b"1.1 xpyd-router"
        self.clock = context.loop = context.pool.loop = context.line._loop = Clock()  # type: ignore[assignment]
        context.hold._loop = context.cancel_notices._loop = self.clock  # type: ignore[assignment]
        paths = Paths(context, Keys(), Probes(context))  # type: ignore[arg-type]
        self.server = Server(paths, RequestBounds(1 << 16, 1 << 20, 30.0), connect=connection.ClientConnection)
        self.server.loop, self.server.date = self.clock, b"now"  # type: ignore[assignment]
        self.engines: dict[engine_connection.EngineConnection, tuple[str, Paper]] = {}
        self.legs: list[tuple[engine_connection.EngineConnection, bytes]] = []
        """Those that were sent, in order."""
        self.doubted: list[InstanceName] = []
        """Those of whom a probe was asked for."""
        for name in ("p1", "p2", "d1", "d2"):
            self.join(name)
        self.client, self.paper = connection.ClientConnection(self.server), Paper()
        self.client.connection_made(self.paper)  # type: ignore[arg-type]

    def join(self, name: str) -> None:
        """An instance, and connections to it."""
        address = HostPort(f"127.0.0.1:{ord(name[0]) + int(name[1])}")
        self.context.watch.on_message(Heartbeat(
            v=1, service=ServiceName("s"), instance=InstanceName(name), seq=1,
            role=Role.PREFILL if name[0] == "p" else Role.DECODE, epoch=1, state=State.READY, agent=AgentId("a"),
            incarnation=Incarnation("i"), http=(address,), control=(address,), model="tiny", max_model_len=4096,
            fingerprint=Fingerprint("f" * 32), interval_s=3.0))
        for _ in range(8):
            made, paper = engine_connection.EngineConnection(self.context.pool, address), Paper()
            made.connection_made(paper)  # type: ignore[arg-type]
            self.engines[made] = name, paper
            self.context.pool.release(made, address)

    def look(self) -> None:
        """Find the legs that were sent since."""
        found = [(made, name, paper.out) for made, (name, paper) in self.engines.items() if paper.out]
        for made, _, out in sorted(found, key=lambda each: (b'"max_tokens":1,' not in each[2], each[1])):
            self.legs.append((made, out))
            self.engines[made][1].out = b""

    def ask(self, body: bytes) -> None:
        """The client's next request."""
        self.client.data_received(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: mine\r\n"
                                  b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def told(self) -> dict[str, object]:
        """Everything that can be seen, without times."""
        context = self.context
        records = [(r.request_id, r.transfer, r.api, r.stream, r.outcome, r.status, r.detail, r.first_at == r.first_at,
                    r.tokens, r.prompt_tokens, r.prompt_size, r.skips, r.attempt, r.retries, r.bytes, r.continued,
                    [(one.role, one.instance, one.attempt, one.first_at == one.first_at, one.ended == one.ended, one.result)
                     for one in r.legs]) for r in context.observer.recent]
        return {"client": self.paper.out, "client paper": [what for what in self.paper.done if what != "resume"],
                "legs": [(self.engines[made][0], out) for made, out in self.legs], "records": records,
                "engines": [(name, [what for what in paper.done if what != "resume"])
                            for name, paper in self.engines.values()],
                "open": len(context.servings), "in flight": [(m.name, m.in_flight) for m in context.roster.members()],
                "states": [(m.name, m.state) for m in context.roster.members()],
                "idle": {name: len(idle) for name, idle in context.pool._idle.items() if idle},
                "doubted": self.doubted, "farewells": len(context.cancel_notices),
                "in all": context.observer.metrics.in_flight}


PREFILL_ANSWERS = (*["ok"] * 12, "500", "400", "abort", "close", "chunked", "odd", "more")
DECODE_ANSWERS = (*["ok"] * 12, "500", "400", "whole", "error event", "abort", "no done", "odd chunk", "close", "later odd",
                  "empty deltas", "comments", "comments", "no done behind comments")


class Script(msgspec.Struct):
    """What happens. A size of 0: up to the end of the next event."""

    failover: str
    stream: bool
    steps: list[tuple[str, int]]
    prefill: str
    decode: str


def script_of(seed: int) -> Script:
    """A random one, most of whose requests end well."""
    draw = random.Random(seed)
    names = ["prefill"] * 6 + ["decode"] * 8
    rare = ["prefill lost", "decode lost", "client gone", "pause", "resume", "instance lost", "leaving", "later", "drain",
            "drain", "wait"]
    often = draw.choice((0.0, 0.02, 0.12))
    steps = [(draw.choice(rare if draw.random() < often else names), draw.choice((0, 0, 0, 20, 60, 150, 400, 4000, 4000)))
             for _ in range(STEPS)]
    if draw.random() < 0.8:
        steps[:0] = [("drain", 0)] * (draw.random() < 0.1) + [("prefill", draw.choice((100, 4000, 4000)))] * 2
    return Script(draw.choice(("continue", "continue", "error")), draw.random() < 0.95, steps,
                  draw.choice(PREFILL_ANSWERS), draw.choice(DECODE_ANSWERS))


def prefilled(kind: str) -> bytes:
    """Prefill's answer."""
    reason = b"abort" if kind == "abort" else b"length"
    body = b'{"id":"p","choices":[{"index":0,"message":{"content":" t"},"finish_reason":"%b"}]}' % reason
    status = {"500": b"500 Bad", "400": b"400 Bad"}.get(kind, b"200 OK")
    close = b"connection: close\r\n" if kind == "close" else b""
    if kind == "odd":
        return b"HTTP/9 what\r\n\r\n"
    if kind == "chunked":
        return b"HTTP/1.1 %b\r\ntransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % (status, chunk_of(body))
    more = b"more" if kind == "more" else b""
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b%b" % (status, close, len(body), body, more)


def decoded(kind: str, ids_asked: bool, number: int) -> bytes:
    """Decode's answer."""
    if kind in {"500", "400", "whole"}:
        status, body = {"whole": b"200 OK"}.get(kind, kind.encode() + b" Bad"), b'{"object":"x"}'
        return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
    close = b"connection: close\r\n" if kind == "close" else b""
    head = b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" % close
    shape = (b'data: {"id":"chatcmpl-%d","object":"chat.completion.chunk","created":5,"model":"tiny",' % number
             + b'"choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b')
    out = [chunk_of(shape % (b'"role":"assistant","content":""', b"null")
                    + b'}],"prompt_token_ids":%b}\n\n' % (IDS if ids_asked else b"null"))]
    for at in range(1, 6):
        reason = b'"length","stop_reason":null' if at == 5 else b"null"
        if kind == "abort" and at == 3:
            reason = b'"abort"'
        text = b"" if kind == "empty deltas" and at == 2 else b'"content":" t%d"' % at
        token = b"[%d]" % at if ids_asked else b"null"
        out.append(chunk_of(shape % (text, reason) + b',"token_ids":%b}]}\n\n' % token))
    if kind == "error event":
        out[3] = chunk_of(b'data: {"error":{"message":"gone","type":"x","param":null,"code":500}}\n\n')
    if kind == "odd chunk":
        out[0] = b"zz\r\n" + out[0]
    if kind == "later odd":
        out[4] = b"zz\r\n" + out[4]
    if kind == "comments":
        out[3:3] = [chunk_of(b": keep-alive\n\n")]
    if kind.endswith("comments"):
        out[:0] = [chunk_of(b": keep-alive\n\n")] * 2
    if kind == "no done behind comments":
        out[2:] = []
    if not kind.startswith("no done"):
        out.append(chunk_of(b"data: [DONE]\n\n"))
    return head + b"".join(out) + b"0\r\n\r\n"


class Play:
    """One script in one world."""

    def __init__(self, world: World, script: Script) -> None:
        self.world = world
        self.script = script
        self.answers: dict[int, bytes] = {}
        """What each leg has still to say."""

    async def settled(self) -> None:
        """Let go on what goes on at once."""
        for _ in range(3):
            await asyncio.sleep(0)
        self.world.look()

    def _open(self, role: str) -> int | None:
        for number, (made, request) in enumerate(self.world.legs):
            paper = self.world.engines[made][1]
            prefill = b'"max_tokens":1,' in request
            if (role == "prefill") != prefill or paper.closed or self.answers.get(number) == b"":
                continue
            if number not in self.answers:
                kind = self.script.prefill if prefill else self.script.decode
                first = number < 2
                asked = b'"return_token_ids":true' in request
                self.answers[number] = (prefilled(kind if first else "ok") if prefill
                                        else decoded(kind if first else "ok", asked, 0 if first else 1))
            return number
        return None

    async def step(self, what: str, size: int) -> None:
        """One step, if it is possible now."""
        world = self.world
        if what in {"prefill", "decode"}:
            number = self._open(what)
            if number is not None:
                made, answer = world.legs[number][0], self.answers[number]
                size = size or max(answer.find(b"\n\n\r\n") + 4, 4)
                self.answers[number] = answer[size:]
                made.data_received(answer[:size])
        elif what in {"prefill lost", "decode lost"}:
            number = self._open(what.split(maxsplit=1)[0])
            if number is not None:
                made = world.legs[number][0]
                self.answers[number] = b""
                world.engines[made][1].closed = True
                made.connection_lost(None)
        elif what == "client gone":
            if not world.paper.closed:
                world.paper.closed = True
                world.client.connection_lost(None)
        elif what == "pause":
            if not world.paper.closed:
                world.client.pause_writing()
        elif what == "resume":
            if not world.paper.closed:
                world.client.resume_writing()
        elif what in {"instance lost", "leaving"}:
            who = InstanceName(("p1", "d1", "d2", "p2")[size % 4]), Incarnation("i")
            if what == "instance lost":
                world.context.servings.on_lost(InstanceLost(*who, FailureReason("it was so")))
            else:
                world.context.servings.on_leaving(InstanceLeaves(*who))
        elif what in {"later", "wait"}:
            world.clock.now += 11.0 if what == "later" else 1.0
            now = world.clock.now
            for serving in list(world.context.servings):
                serving.sweep(now, 0.0)
        elif what == "drain":
            world.server.drain()
        await self.settled()

    async def run(self, *, known: bool) -> dict[str, object]:
        """All of it. ``known``: other requests of its profile came before."""
        script, world = self.script, self.world
        body = msgspec.json.encode({"model": "tiny", "messages": [{"role": "user", "content": "hello there"}],
                                    "max_tokens": 5, "temperature": 0, "stream": script.stream})
        for _ in range(2 * known):
            world.context.profiles.parse("chat", body)
        world.ask(body)
        await self.settled()
        for what, size in script.steps:
            await self.step(what, size)
        seen = world.told()
        world.context.abort("the end")
        await self.settled()
        final = world.told()
        await world.context.close()
        assert final["open"] == 0
        assert all(not count for _, count in final["in flight"])  # type: ignore[attr-defined]
        assert not world.context.pool.calls
        assert not any(made._call for made in world.engines)
        assert world.paper.out.count(b"HTTP/1.1 ") <= 1, "one answer at most"
        return {"seen": seen, "final": final}


async def outcome(script: Script, monkeypatch: pytest.MonkeyPatch, *, known: bool) -> tuple[dict[str, object], World]:
    """A script in a fresh world."""
    numbers = iter(range(10_000))
    monkeypatch.setattr(heads, "fresh", lambda: f"{next(numbers):032x}")
    monkeypatch.setattr(secrets, "randbits", lambda _: 7)
    world = World(script)
    monkeypatch.setattr(world.context.watch, "suspect", lambda target, _: world.doubted.append(target.instance))
    monkeypatch.setattr(world.context.watch, "request_probe", lambda target: world.doubted.append(target.instance))
    return await Play(world, script).run(known=known), world


async def test_scripts_leave_nothing_open_and_go_the_same_way_with_a_profile_that_is_known(
        monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCRIPTS):
        script = script_of(seed)
        first, _ = await outcome(script, monkeypatch, known=False)
        later, world = await outcome(script, monkeypatch, known=True)
        assert later == first, f"seed {seed}: {script}"
        seen["whole"] += world.paper.out.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        seen["failed"] += b"HTTP/1.1 5" in world.paper.out or b'data: {"error"' in world.paper.out
        seen["again"] += len(world.legs) > 2
    assert seen["whole"] > SCRIPTS // 3, seen
    assert min(seen["failed"], seen["again"]) > SCRIPTS // 10, seen


async def test_the_write_that_ends_an_answer_may_fill_the_clients_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio says so from within the write."""
    script = Script("continue", True, [], "ok", "ok")
    world = World(script)
    play = Play(world, script)
    world.ask(msgspec.json.encode({"model": "tiny", "messages": [{"role": "user", "content": "hello there"}],
                                   "max_tokens": 5, "temperature": 0, "stream": True}))
    await play.settled()
    await play.step("prefill", 4000)
    write = world.paper.write

    def filled(data: bytes) -> None:
        write(data)
        if data.endswith(b"0\r\n\r\n"):
            world.client.pause_writing()

    monkeypatch.setattr(world.paper, "write", filled)
    await play.step("decode", 4000)
    await play.settled()
    world.client.resume_writing()
    await play.settled()
    world.context.observer.settle()
    assert world.paper.out.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not world.context.servings
    assert [record.outcome for record in world.context.observer.recent] == ["ok"]
    await world.context.close()
