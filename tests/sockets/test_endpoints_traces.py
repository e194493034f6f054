"""GET /trace: who may ask, what engines are asked, and what an engine that is silent or older costs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from router_fleet import KEY, Answer, RouterFleet, fleet, read_answer

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import Attempt, HostPort, InstanceName, TransferId
from xpyd_sidecar.contract.timeline import HEADER, Notes, TracedAnswer, TraceQuery, Traces
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.messages import Control, Reject
from xpyd_sidecar.process import curve
from xpyd_sidecar.router.endpoints.traces import ask

LOOPS = ("uvloop",)
TOKEN = {"Authorization": f"Bearer {keys.admin_token(KEY)}"}
AHEAD_S = 1234.5


class Control_:
    """A control socket: a real one to talk to, scripted in what it says."""

    def __init__(self, name: str, kind: str = "tells") -> None:
        self.name, self.kind = name, kind
        self.asked: list[tuple[TransferId, ...]] = []
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        curve.serve(self._socket, KEY, "control")
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = HostPort(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def answer(self, asked: TraceQuery) -> Control:
        if self.kind == "refuses":
            return Reject(Outcome.PROTOCOL, "control message: Invalid value 'trace'")
        now = time.monotonic() + AHEAD_S
        notes = tuple(Notes(one, self.name == "p0", Attempt(1), 30, "ok", {"arrived": now - 0.001})
                      for one in asked.transfers)
        return TracedAnswer(InstanceName(self.name), now, 0.0, notes)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                peer, _, body = self._socket.recv_multipart()
                asked = messages.unpack(body)
                assert isinstance(asked, TraceQuery)
                self.asked.append(asked.transfers)
                if self.kind != "silent":
                    self._socket.send_multipart([peer, *messages.pack(self.answer(asked))])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@contextmanager
def engines(**kinds: str) -> Iterator[dict[str, Control_]]:
    made = {name: Control_(name, kind) for name, kind in kinds.items()}
    try:
        yield made
    finally:
        for one in made.values():
            one.close()


async def trace(f: RouterFleet, asked: str = "", headers: dict[str, str] | None = None) -> Answer:
    return await f.ask("/trace", headers=TOKEN | ({HEADER: asked} if asked else {}) if headers is None else headers)


def known(f: RouterFleet, controls: dict[str, Control_]) -> None:
    for engine in (*f.p, *f.d):
        f.beat(engine, control=(controls[engine.name].address,))


async def test_a_request_is_told_with_what_its_engines_have_noted() -> None:
    with engines(p0="tells", d0="tells", d1="tells") as controls:
        async with fleet(1, 2) as f:
            known(f, controls)
            assert (await f.complete(stream=True)).status == 200
            await f.wait(lambda: bool(f.context.observer.recent), "a request that is over")
            found = msgspec.json.decode((await trace(f)).body, type=Traces)
            [line] = found.found
            rows = {event.row for event in line.events}
            went = next(name for name in ("d0", "d1") if name in rows)
            assert rows == {"router", "p0", went}
            assert (found.remembered, found.silent) == (1, {})
            assert {clock.instance for clock in found.clocks} == {"p0", went}
            # The engines' clocks are 20 minutes ahead; on the router's their marks lie next to its own, but for what the
            # clock of tests, which it compares, has not counted so far (``fair_clock``).
            assert all(abs(event.at) < AHEAD_S / 2 for event in line.events)
            assert controls[went].asked[-1] == (line.transfer,)
            assert not controls[({"d0", "d1"} - {went}).pop()].asked
            for word in (line.request, line.transfer):
                [other] = msgspec.json.decode((await trace(f, f"id {word}")).body, type=Traces).found
                assert other.transfer == line.transfer


async def test_silent_engines_and_those_that_refuse_are_named_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.endpoints.traces.ANSWER_S", 5.0)
    with engines(p0="silent", d0="refuses") as controls:
        async with fleet(1, 1) as f:
            known(f, controls)
            await f.complete(stream=True)
            await f.wait(lambda: bool(f.context.observer.recent), "a request that is over")
            one, two = await asyncio.gather(trace(f), trace(f))
            assert sorted((one.status, two.status)) == [200, 503], "one question at a time"
            found = msgspec.json.decode((one if one.status == 200 else two).body, type=Traces)
            assert found.silent["p0"].startswith("no answer within")
            assert found.silent["d0"].startswith("it answers with Reject")
            assert {event.row for event in found.found[0].events} == {"router"}


async def test_a_transfer_of_another_router_is_asked_of_all_engines() -> None:
    with engines(p0="tells", d0="tells") as controls:
        async with fleet(1, 1) as f:
            known(f, controls)
            [line] = msgspec.json.decode((await trace(f, f"id {'c' * 32}")).body, type=Traces).found
            assert (line.request, line.transfer) == ("", "c" * 32)
            assert {event.row for event in line.events} == {"p0", "d0"}


@pytest.mark.parametrize("asked", ["last 0", "last", "last x", "last 33", "slowest -1", "id", "first 3", "last ²",
                                   "last 000000001" + "0" * 5000])
async def test_wrong_questions_are_answered_with_what_would_be_right(asked: str) -> None:
    async with fleet(1, 1) as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.router.admin_port)
        writer.write(f"GET /trace HTTP/1.1\r\nHost: r\r\nAuthorization: {TOKEN['Authorization']}\r\n"
                     f"{HEADER}: {asked}\r\n\r\n".encode())
        answer = await read_answer(reader)
        writer.transport.abort()
        assert (answer.status, answer.json["error"]["code"]) == (400, "bad_trace")
        assert "last N, slowest N" in answer.json["error"]["message"]


async def test_only_who_has_the_admin_token_is_answered() -> None:
    async with fleet(1, 1) as f:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert (await trace(f, headers=headers)).status == 401
        assert (await trace(f, "id unknown")).status == 404
        answer = await trace(f)
        assert (answer.status, answer.json["found"]) == (200, [])


def test_an_address_that_nobody_listens_at_costs_the_deadline_and_no_more() -> None:
    began = time.monotonic()
    heard, silent = ask(KEY, {HostPort("127.0.0.1:1"): InstanceName("x")}, (TransferId("a" * 32),), 0.2)
    assert not heard
    assert list(silent) == ["x"]
    assert time.monotonic() - began < 20
