"""The agent's unix socket, its client and the whole agent against small fakes of engine and router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_fakes import KEY, FakeEngine, FakeRouter, config_of
from processes import free_port

from xpyd_sidecar.agent import app as app_module
from xpyd_sidecar.agent import ask as ask_module
from xpyd_sidecar.agent import control
from xpyd_sidecar.agent import remote as remote_module
from xpyd_sidecar.agent.app import Agent
from xpyd_sidecar.contract import adapters, assignment, duty, keys, signing
from xpyd_sidecar.contract.adapters import Adapter, AdapterReport, AdapterState
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.duty import EngineRole
from xpyd_sidecar.contract.ids import HostPort, Role, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import AGENT_SOCKET, SidecarConfig
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process.beside import Draining


class Speaks:
    """Takes every role."""

    def assign(self, told: Assignment) -> None:
        """Taken."""

    def status(self) -> dict[str, Any]:
        """Nothing to say."""
        return {}


class Running:
    """An agent that runs, with its engine and router."""

    def __init__(self, engine: FakeEngine, router: FakeRouter, run_dir: Path, **fields: object) -> None:
        self.engine = engine
        self.router = router
        self.run_dir = run_dir
        self.config: SidecarConfig = config_of(run_dir, engine.address, (router.address,), heartbeat_s=0.3,
                                               **fields)
        self.stop = asyncio.Event()
        self.heard: list[bool] = []
        draining = Draining()
        draining.listen(self.heard.append)
        self.task = asyncio.ensure_future(Agent(self.config, KEY, draining=draining).run(self.stop))

    async def ask(self, method: str, path: str, timeout_s: float = 10.0) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(ask_module.ask, self.run_dir, method, path, timeout_s)

    async def wait_status(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status that fulfils ``condition``: the agent looks around in its own time."""
        async with asyncio.timeout(30):
            while not condition(body := (await self.ask("GET", "/status"))[1]):  # noqa: ASYNC110 (what is waited for comes from the agent)
                await asyncio.sleep(0.02)
        return body

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(30):
            await self.task


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(app_module, "FAST_S", 0.05)
    monkeypatch.setattr(app_module, "LOOK_S", 0.1)
    async with FakeEngine(tmp_path) as engine:
        engine.write_record()
        router = FakeRouter()
        running = Running(engine, router, tmp_path, drain_timeout_s=30.0)
        await router.wait_beat(lambda beat: beat.state is State.READY)
        yield running
        running.engine.running = 0
        await running.end()
        await router.close()


async def test_status_says_everything(running: Running) -> None:
    assert (await running.ask("GET", "/status"))[0] == 200
    body = await running.wait_status(lambda body: body["routers"][0]["name"] == "r0")
    assert (body["state"], body["role"], body["epoch"], body["drained"]) == ("ready", "decode", 1, False)
    assert (body["incarnation"], body["problem"], body["waits_for"]) == ("a" * 32, "", "")
    assert body["load"] == {"running": 0, "waiting": 0, "kv_usage": 0.0, "transfers": 0, "drafts": None, "intake": None,
                            "prompts": None, "adapters": []}
    [router] = body["routers"]
    assert (router["address"], router["name"], router["refused"]) == (running.router.address, "r0", "")
    assert 0 <= router["ack_age_s"] < 30


async def test_drain_with_wait_answers_once_the_work_is_done(running: Running) -> None:
    running.engine.running = 1
    answer = asyncio.ensure_future(running.ask("POST", "/drain?wait=1"))
    beat = await running.router.wait_beat(lambda beat: beat.state is State.DRAINING)
    assert not beat.drained
    await running.wait_status(lambda body: body["waits_for"] == "1 running, 0 waiting, 0 KV transfers")
    await asyncio.sleep(0.3)
    assert not answer.done()
    running.engine.running = 0
    assert await answer == (200, {"drained": True, "reason": "nothing runs, waits or moves"})
    await running.router.wait_beat(lambda beat: beat.drained)
    assert (await running.ask("POST", "/drain?wait=1"))[1]["drained"]


async def test_drain_waits_for_what_a_router_has_in_flight(running: Running) -> None:
    running.router.in_flight = 3
    answer = asyncio.ensure_future(running.ask("POST", "/drain?wait=1"))
    await running.router.wait_beat(lambda beat: beat.state is State.DRAINING)
    await running.wait_status(lambda body: body["waits_for"] == "router r0 has 3 requests in flight")
    assert not answer.done()
    running.router.in_flight = 0
    assert (await answer)[1]["drained"]


async def test_drain_without_wait_answers_at_once(running: Running) -> None:
    running.engine.receives_open = 1
    status, body = await running.ask("POST", "/drain")
    assert (status, body["state"], body["drained"]) == (202, "draining", False)


async def test_a_drain_that_does_not_end_says_what_it_waits_for(running: Running) -> None:
    running.engine.waiting = 2
    await running.ask("POST", "/drain")
    await running.wait_status(lambda body: body["waits_for"] == "0 running, 2 waiting, 0 KV transfers")
    status, body = await running.ask("POST", "/drain?wait=1&timeout_s=0.1")
    assert (status, body) == (200, {"drained": False, "reason": "deadline passed: 0 running, 2 waiting, 0 KV transfers"})


async def test_undrain_answers_those_who_wait(running: Running) -> None:
    running.engine.running = 1
    answer = asyncio.ensure_future(running.ask("POST", "/drain?wait=1"))
    await running.router.wait_beat(lambda beat: beat.state is State.DRAINING)
    status, body = await running.ask("POST", "/undrain")
    assert (status, body["state"]) == (200, "ready")
    assert await answer == (200, {"drained": False, "reason": "the drain was taken back"})
    await running.router.wait_beat(lambda beat: beat.state is State.READY)


async def test_a_client_that_hangs_up_leaves_the_drain_on(running: Running) -> None:
    running.engine.running = 1
    _, client = await asyncio.open_unix_connection(running.run_dir / AGENT_SOCKET)
    client.write(b"POST /drain?wait=1 HTTP/1.1\r\nhost: agent\r\ncontent-length: 0\r\n\r\n")
    await running.wait_status(lambda body: body["state"] == "draining")
    client.close()
    await client.wait_closed()
    await running.router.wait_beat()
    assert (await running.ask("GET", "/status"))[1]["state"] == "draining"


def test_the_command_does_not_wait_for_ever_for_an_agent_that_says_nothing(tmp_path: Path) -> None:
    with control.listen(tmp_path) as sock:
        sock.listen()
        with pytest.raises(OSError, match="timed out"):
            ask_module.ask(tmp_path, "POST", "/drain?wait=1", 0.2)


@pytest.mark.parametrize(("method", "path", "status", "words"), [
    ("GET", "/nothing", 404, "Not Found"),
    ("GET", "/drain", 405, "Not Allowed"),
    ("POST", "/drain?wait=yes", 400, "wait: 0 or 1, not 'yes'"),
    ("POST", "/drain?wait=1&timeout_s=soon", 400, "timeout_s: seconds above 0, not 'soon'"),
    ("POST", "/drain?wait=1&timeout_s=-1", 400, "not '-1'"),
    ("POST", "/drain?wait=1&timeout_s=nan", 400, "not 'nan'"),
])
async def test_a_wrong_request_is_answered_with_what_is_wrong(running: Running, method: str, path: str, status: int,
                                                              words: str) -> None:
    got, body = await running.ask(method, path)
    assert got == status
    assert words in body["error"]
    assert (await running.ask("GET", "/status"))[1]["state"] == "ready"


async def test_a_dead_engine_is_told_and_its_return_too(running: Running) -> None:
    await running.engine.stop()
    beat = await running.router.wait_beat(lambda beat: beat.state is State.STARTING)
    assert beat.incarnation == "a" * 32
    running.engine.write_record("b" * 32)
    await running.engine.start()
    beat = await running.router.wait_beat(lambda beat: beat.state is State.READY)
    assert beat.incarnation == "b" * 32


async def test_beats_go_on_while_the_engine_hangs(running: Running) -> None:
    running.engine.health_delay_s = 60.0
    seen = len(running.router.beats)
    async with asyncio.timeout(30):
        while len(running.router.beats) - seen < 3:  # noqa: ASYNC110 (what is waited for comes from the agent)
            await asyncio.sleep(0.05)


async def test_goodbye_at_the_end_and_no_socket_left(running: Running) -> None:
    await running.end()
    assert [bye.instance for bye in running.router.goodbyes] == ["test-e0"]
    assert not (running.run_dir / AGENT_SOCKET).exists()


async def test_an_engine_that_is_late_is_an_error_and_the_beats_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(app_module, "FAST_S", 0.02)
    router = FakeRouter()
    running = Running(FakeEngine(tmp_path), router, tmp_path, startup_timeout_s=0.1)
    async with asyncio.timeout(30):
        while not any(one.levelno == logging.ERROR for one in caplog.records):  # noqa: ASYNC110 (the agent's own time)
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    late = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(late) == 1
    assert "the engine is not ready after 0.1 s: GET /health" in late[0].getMessage()
    assert (await router.wait_beat()).state is State.STARTING
    await running.end()
    await router.close()


async def test_a_second_agent_in_the_same_folder_is_refused(running: Running) -> None:
    with pytest.raises(ConfigError, match=r"another agent answers at .*agent\.sock - at `\$\.run_dir`"):
        await Agent(running.config, KEY).run(asyncio.Event())
    assert (await running.ask("GET", "/status"))[0] == 200


async def test_a_socket_left_by_a_killed_agent_is_replaced(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / AGENT_SOCKET))
    dead.close()
    with control.listen(tmp_path) as sock:
        assert sock.getsockname() == str(tmp_path / AGENT_SOCKET)
    assert (tmp_path / AGENT_SOCKET).stat().st_mode & 0o777 == 0o600


async def test_a_run_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot listen at .*run/agent\.sock: Not a directory - at `\$\.run_dir`"):
        control.listen(tmp_path / "file" / "run")


async def test_a_long_run_folder_works(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    router = FakeRouter()
    running = Running(FakeEngine(folder), router, folder)
    await router.wait_beat()
    assert (await running.ask("GET", "/status"))[0] == 200
    await running.end()
    assert not (folder / AGENT_SOCKET).exists()
    await router.close()


async def test_the_command_prints_status_and_drains(running: Running, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPYD_RUN_DIR", str(running.run_dir))
    assert await asyncio.to_thread(ask_module.main, ["status", "--run-dir", str(running.run_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "ready"
    running.engine.running = 1
    assert await asyncio.to_thread(ask_module.main, ["drain", "--run-dir", str(running.run_dir), "--timeout", "0.1"]) == 1
    assert "not drained: deadline passed" in capsys.readouterr().err
    running.engine.running = 0
    assert await asyncio.to_thread(ask_module.main, ["drain", "--run-dir", str(running.run_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["drained"]


def test_the_command_says_that_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_module.main(["drain", "--run-dir", str(tmp_path)]) == 2
    assert f"no agent in {tmp_path}: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["stop"], ["drain", "--timeout", "0"], ["drain"]])
def test_wrong_usage_of_the_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XPYD_RUN_DIR", raising=False)
    with pytest.raises(SystemExit) as end:
        ask_module.main(arguments)
    assert end.value.code == 2


async def test_the_router_beside_hears_of_a_drain_and_of_its_end(running: Running) -> None:
    assert running.heard == [False]
    await running.ask("POST", "/drain")
    await running.ask("POST", "/undrain")
    assert running.heard == [False, True, False]


async def post(running: Running, path: str, body: object) -> tuple[int, dict[str, Any]]:
    """With a body, over the unix socket."""
    connector = aiohttp.UnixConnector(str(running.run_dir / AGENT_SOCKET))
    async with (aiohttp.ClientSession("http://agent", connector=connector) as session,
                session.post(path, json=body) as answer):
        return answer.status, await answer.json()


async def test_a_role_is_taken_at_once_and_kept_for_the_next_agent(running: Running) -> None:
    status, body = await post(running, "/role", {"role": "prefill", "epoch": 2, "since": "a field of tomorrow"})
    assert (status, body["role"], body["epoch"], body["state"]) == (200, "prefill", 2, "ready")
    beat = await running.router.wait_beat(lambda beat: beat.role is Role.PREFILL)
    assert (beat.epoch, beat.state, beat.incarnation) == (2, State.READY, "a" * 32)
    assert assignment.read(running.run_dir / assignment.KEPT) == Assignment(Role.PREFILL, 2)
    assert duty.read(running.run_dir) == EngineRole(Role.PREFILL, 2)
    assert (await post(running, "/role", {"role": "prefill", "epoch": 2}))[0] == 200, "told again"
    seen = len(running.router.beats)
    await running.end()
    again = Running(running.engine, running.router, running.run_dir)
    try:
        first = await running.router.wait_beat()
        assert all((beat.role, beat.epoch) == (Role.PREFILL, 2) for beat in (*running.router.beats[seen:], first))
    finally:
        await again.end()


@pytest.mark.parametrize(("body", "status", "words"), [
    ({"role": "prefill", "epoch": 1}, 409, "epoch 1 as prefill: the instance is decode of epoch 1"),
    ({"role": "router", "epoch": 2}, 400, "Invalid enum value 'router' - at `$.role`"),
    ({"role": "prefill"}, 400, "missing required field `epoch`"),
    ({"role": "prefill", "epoch": 0}, 400, "`$.epoch`"),
    ([], 400, "Expected `object`"),
])
async def test_a_role_that_cannot_be_taken_is_refused_with_its_reason(running: Running, body: object, status: int,
                                                                      words: str) -> None:
    code, answer = await post(running, "/role", body)
    assert code == status
    assert words in answer["error"]
    assert (await running.ask("GET", "/status"))[1]["role"] == "decode"


async def test_a_role_that_cannot_be_kept_is_not_taken(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(assignment, "keep", full)
    code, answer = await post(running, "/role", {"role": "prefill", "epoch": 2})
    assert (code, answer["error"]) == (500, "the role cannot be kept: no space left on device")
    assert (await running.ask("GET", "/status"))[1]["epoch"] == 1


async def test_a_file_tells_the_role_and_the_higher_epoch_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(app_module, "ROLE_S", 0.02)
    shown = tmp_path / "assignment"
    shown.write_text("")
    async with FakeEngine(tmp_path) as engine:
        engine.write_record()
        router = FakeRouter()
        running = Running(engine, router, tmp_path, assignment_file=str(shown))
        try:
            await router.wait_beat(lambda beat: (beat.role, beat.epoch) == (Role.DECODE, 1))
            shown.write_text(assignment.encode(Assignment(Role.PREFILL, 3)))
            await router.wait_beat(lambda beat: (beat.role, beat.epoch) == (Role.PREFILL, 3))
            shown.write_text("half a te")
            await running.wait_status(lambda _: "the role stays as it is" in caplog.text)
            assert (await post(running, "/role", {"role": "decode", "epoch": 4}))[0] == 200
            shown.write_text(assignment.encode(Assignment(Role.PREFILL, 3)))
            await asyncio.sleep(0.1)
            body = (await running.ask("GET", "/status"))[1]
            assert (body["role"], body["epoch"]) == ("decode", 4), "what the volume shows is late"
        finally:
            await running.end()
            await router.close()


def signed(body: bytes, method: str = "POST", path: str = "/role", *, instance: str = "test-e0",
           key: ServiceKey = KEY) -> dict[str, str]:
    call = signing.SignedCall(method, path, instance, body)
    return {signing.HEADER: signing.sign(keys.derive(key, "agent call"), call), "Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def reachable(run_dir: Path) -> AsyncIterator[tuple[Running, HostPort, aiohttp.ClientSession]]:
    """An agent that takes signed calls, once a router has heard that it is ready; where; and a client."""
    address = HostPort(f"127.0.0.1:{free_port()}")
    async with FakeEngine(run_dir) as engine, aiohttp.ClientSession() as session:
        engine.write_record()
        router = FakeRouter()
        running = Running(engine, router, run_dir, listen=address)
        try:
            await router.wait_beat(lambda beat: beat.state is State.READY)
            yield running, address, session
        finally:
            await running.end()
            await router.close()


async def test_over_the_network_a_role_needs_a_signed_call(tmp_path: Path) -> None:
    async with reachable(tmp_path) as (running, address, session):
        url, body = f"http://{address}/role", b'{"role": "prefill", "epoch": 2}'
        for token in ("", f"Bearer {keys.admin_token(KEY)}", "Bearer \u00e9"):
            async with session.post(url, data=body, headers={"Authorization": token}) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"] == "a signed call of the operator is needed"
        other = ServiceKey(bytes(32))
        for wrong in (signed(b"{}"), signed(body, key=other), signed(body, instance="d1"), signed(body, "POST", "/x")):
            async with session.post(url, data=body, headers=wrong) as answer:
                assert (answer.status, "signature is wrong" in (await answer.json())["error"]) == (401, True)
        async with session.get(f"http://{address}/status", headers=signed(b"", "GET", "/status")) as answer:
            assert answer.status == 404, "nothing else is served here"
        async with session.post(url, data=b"x" * 5000, headers=signed(b"x" * 5000)) as answer:
            assert answer.status == 413
        assert (await running.ask("GET", "/status"))[1]["epoch"] == 1
        right = signed(body)
        async with session.post(url, data=body, headers=right) as answer:
            assert answer.status == 200
        await running.router.wait_beat(lambda beat: beat.role is Role.PREFILL)
        async with session.post(url, data=body, headers=right) as answer:
            assert (answer.status, (await answer.json())["error"]) == (401, "the call was taken already")
    async with aiohttp.ClientSession() as other:
        with pytest.raises(aiohttp.ClientConnectorError):
            await other.post(url, data=body)


async def test_an_address_that_is_taken_ends_the_agent_with_its_field(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = HostPort(f"127.0.0.1:{taken.getsockname()[1]}")
        agent = Agent(config_of(tmp_path, listen=address), KEY)
        with pytest.raises(ConfigError, match=r"at `\$.agent.listen`"):
            await agent.run(asyncio.Event())


SQL = adapters.order_of((Adapter("sql", "/adapters/sql"),))


async def test_an_order_of_adapters_is_kept_and_beats_tell_how_far_it_is(running: Running) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(running.run_dir / AGENT_SOCKET))) as session:
        async with session.post("http://agent/adapters", data=b'{"adapters": [{"name": "sql"}]}') as answer:
            assert (answer.status, "source" in (await answer.json())["error"]) == (400, True)
        async with session.post("http://agent/adapters", data=adapters.encode(SQL)) as answer:
            assert (answer.status, await answer.json()) == (202, {"order": SQL.digest})
    assert adapters.read_order(running.run_dir) == SQL
    await running.router.wait_beat(lambda beat: beat.adapters == AdapterReport(SQL.digest, waiting=1))
    adapters.write_state(running.run_dir, AdapterState(SQL.digest, ("sql",), slots=4, recent=("sql",)))
    beat = await running.router.wait_beat(lambda beat: beat.adapters == AdapterReport(SQL.digest, slots=4))
    assert beat.also == ("sql",)
    await running.router.wait_beat(lambda beat: beat.load.adapters == ("sql",))


async def test_an_agent_that_begins_anew_knows_the_order_of_before(tmp_path: Path) -> None:
    adapters.write_order(tmp_path, SQL)
    adapters.write_state(tmp_path, AdapterState("of before", ("law",)))
    async with FakeEngine(tmp_path) as engine:
        engine.write_record()
        router = FakeRouter()
        running = Running(engine, router, tmp_path)
        try:
            beat = await router.wait_beat(lambda beat: beat.state is State.READY)
            assert (beat.adapters, beat.also) == (AdapterReport(SQL.digest, waiting=1), ("law",))
        finally:
            await running.end()
            await router.close()


async def test_over_the_network_an_order_needs_a_signed_call_and_may_be_large(tmp_path: Path) -> None:
    large = adapters.order_of(tuple(Adapter(f"adapter-{index}", "/" + "x" * 400) for index in range(adapters.MOST)))
    body = adapters.encode(large)
    async with reachable(tmp_path) as (_, address, session):
        url = f"http://{address}{adapters.PATH}"
        for headers in ({}, signed(body), signed(body, path=adapters.PATH, key=ServiceKey(bytes(32)))):
            async with session.post(url, data=body, headers=headers) as answer:
                assert answer.status == 401
        assert adapters.read_order(tmp_path) is None
        async with session.post(url, data=body, headers=signed(body, path=adapters.PATH)) as answer:
            assert answer.status == 202
        assert adapters.read_order(tmp_path) == large
        too_much = b"x" * (adapters.MOST_BYTES + 1)
        async with session.post(url, data=too_much, headers=signed(too_much, path=adapters.PATH)) as answer:
            assert answer.status == 413


async def test_bodies_that_do_not_come_keep_no_order_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "LARGE_S", 0.5)
    body = adapters.encode(SQL)
    async with reachable(tmp_path) as (_, address, session):
        halves = []
        for _ in range(2 * remote_module.LARGE):
            halves.append((await asyncio.open_connection(*address.rsplit(":", 1)))[1])
            head = f"POST {adapters.PATH} HTTP/1.1\r\nHost: x\r\n{signing.HEADER}: v1\r\nContent-Length: 100000\r\n\r\n"
            halves[-1].write(head.encode())
        async with session.post(f"http://{address}{adapters.PATH}", data=body,
                                headers=signed(body, path=adapters.PATH)) as answer:
            assert answer.status == 202
        for half in halves:
            half.close()
