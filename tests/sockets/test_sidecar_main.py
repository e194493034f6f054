"""``python -m xpyd_sidecar``: exit codes, the line on stderr, signals, failing halves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_fakes import FakeEngine, config_of
from engines import answers, get
from processes import Group, free_port

from xpyd_sidecar import __main__ as entry
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import HostPort, State
from xpyd_sidecar.contract.launch import AGENT_SOCKET, RouterConfig, SidecarConfig
from xpyd_sidecar.process.beside import Draining


@pytest.fixture
def config(tmp_path: Path) -> SidecarConfig:
    """An agent for an engine that is not there."""
    keys.write(tmp_path / "key", keys.mint())
    return msgspec.structs.replace(config_of(tmp_path / "run"), key_file=str(tmp_path / "key"))


def run(config: SidecarConfig) -> int:
    return entry.main(["--config-json", msgspec.json.encode(config).decode()])


@pytest.mark.parametrize(("text", "words"), [
    ("{", "--config-json: not JSON"),
    ('{"service": "a", "x": 1}', "--config-json: Object"),
    ("{}", "missing required field `service`"),
])
def test_a_wrong_configuration_is_one_line_and_exit_code_2(text: str, words: str,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--config-json", text]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("xpyd_sidecar: ")
    assert err.count("\n") == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--config", str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "words"), [
    (None, "cannot be read: No such file or directory - at `$.key_file`"),
    ("abc", "a service key is 64 hex digits - at `$.key_file`"),
])
def test_a_wrong_key_file_is_named(config: SidecarConfig, content: str | None, words: str,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    Path(config.key_file).unlink()
    if content is not None:
        Path(config.key_file).write_text(content)
    assert run(config) == 2
    assert words in capsys.readouterr().err


def test_a_key_that_somebody_else_put_there_is_not_taken(config: SidecarConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """The Secret was deleted and made again with another content: the file is named for the key that it must hold."""
    right = keys.of_service(b"m" * 32, 1, "uid")
    named = Path(config.key_file).with_name(keys.file_name(right))
    named.write_text("ab" * 32)
    assert run(msgspec.structs.replace(config, key_file=str(named))) == 2
    said = capsys.readouterr().err
    assert f"than the service's ({keys.digest(right)[:8]})" in said
    assert "delete it and the pod, and both are made anew - at `$.key_file`" in said
    named.write_text(right.hex())
    assert keys.read(named) == right


def test_no_arguments_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as end:
        entry.main([])
    assert end.value.code == 2


def test_an_agent_ends_with_0_at_sigterm(config: SidecarConfig, tmp_path: Path) -> None:
    """The whole process, configuration from standard input."""
    process = subprocess.Popen([sys.executable, "-m", "xpyd_sidecar", "--config", "-"], stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    process.stdin = None
    end = time.monotonic() + 60
    while not (tmp_path / "run" / AGENT_SOCKET).exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in err.splitlines()]
    assert {line["instance"] for line in lines} == {"test-e0"}
    assert [line["message"] for line in lines if line["logger"].endswith("app")] == ["agent started", "agent ended"]
    assert not (tmp_path / "run" / AGENT_SOCKET).exists()


@pytest.mark.parametrize("field", ["port", "members_port", "admin_port"])
def test_a_taken_port_is_named_with_its_field(config: SidecarConfig, field: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = {"port": free_port(), "members_port": free_port(), "admin_port": free_port(), field: taken}
        router = RouterConfig(host="127.0.0.1", **ports)
        assert run(msgspec.structs.replace(config, router=router, agent=None)) == 2
    err = capfd.readouterr().err
    assert f"router.{field}" in err
    assert f"127.0.0.1:{taken}" in err


def failing(error: BaseException | None) -> Any:
    async def half(config: SidecarConfig, key: keys.ServiceKey, stop: asyncio.Event, draining: Draining) -> None:
        if error is not None:
            raise error

    return half


@pytest.mark.parametrize(("error", "words"), [
    (RuntimeError("boom"), "RuntimeError: boom"),
    (None, "the agent ended without being asked to"),
])
def test_a_half_that_fails_ends_the_process_with_1(config: SidecarConfig, error: BaseException | None, words: str,
                                                   monkeypatch: pytest.MonkeyPatch,
                                                   capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(entry, "_half", lambda name: failing(error))
    assert run(config) == 1
    assert words in capfd.readouterr().err


def test_the_halves_share_the_wish_to_drain(config: SidecarConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []

    async def agent(config: SidecarConfig, key: keys.ServiceKey, stop: asyncio.Event, draining: Draining) -> None:
        draining.announce(True)
        draining.announce(False)

    async def router(config: SidecarConfig, key: keys.ServiceKey, stop: asyncio.Event, draining: Draining) -> None:
        draining.listen(heard.append)
        await stop.wait()

    halves = {"router": router, "agent": agent}
    monkeypatch.setattr(entry, "_half", halves.__getitem__)
    both = msgspec.structs.replace(config, router=RouterConfig())
    assert asyncio.run(entry._run(both, keys.mint())) == 1, "the agent ended without being asked"
    assert heard == [False, True, False]


def test_a_half_that_fails_stops_the_other_in_order(config: SidecarConfig, monkeypatch: pytest.MonkeyPatch,
                                                    capfd: pytest.CaptureFixture[str]) -> None:
    ended = []

    async def orderly(config: SidecarConfig, key: keys.ServiceKey, stop: asyncio.Event, draining: Draining) -> None:
        await stop.wait()
        ended.append("agent")

    monkeypatch.setattr(entry, "_half", lambda name: orderly if name == "agent" else failing(OSError("no disk")))
    assert run(msgspec.structs.replace(config, router=RouterConfig())) == 1
    assert ended == ["agent"]
    assert "the router failed" in capfd.readouterr().err


def test_only_the_configured_half_is_imported(config: SidecarConfig) -> None:
    """An agent alone stays small: no router in its process, and never vLLM or torch."""
    program = ("import sys; from xpyd_sidecar import __main__ as m; m._half('agent')\n"
               "print([n for n in sys.modules if n.startswith(('xpyd_sidecar.router', 'vllm', 'torch'))])")
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100,
                         env={**os.environ})
    assert out.stdout.strip() == "[]"


async def test_router_and_agent_in_one_process_find_each_other(config: SidecarConfig, tmp_path: Path) -> None:
    """The sidecar of an engine pod: both halves, one event loop, one signal."""
    (tmp_path / "run").mkdir()
    async with FakeEngine(tmp_path / "run") as engine:
        engine.write_record()
        port, members, admin = free_port(), free_port(), free_port()
        assert config.agent is not None
        agent = msgspec.structs.replace(config.agent, engine=HostPort(engine.address), heartbeat_s=0.2, resolve_s=0.2,
                                        routers=(HostPort(f"127.0.0.1:{members}"),))
        router = RouterConfig(host="127.0.0.1", port=port, members_port=members, admin_port=admin, heartbeat_s=0.2,
                              resolve_s=0.2)
        both = msgspec.structs.replace(config, agent=agent, router=router)
        group = Group([sys.executable, "-m", "xpyd_sidecar", "--config-json", msgspec.json.encode(both).decode()],
                      log=tmp_path / "log", name="sidecar")
        try:
            await asyncio.to_thread(group.wait_until, lambda: answers(f"http://127.0.0.1:{port}/ready"), 60, "ready")
            token = keys.admin_token(keys.read(Path(config.key_file)))
            text = await asyncio.to_thread(get, f"http://127.0.0.1:{admin}/fleet", 30, {"Authorization": f"Bearer {token}"})
            [instance] = msgspec.json.decode(text, type=Fleet).instances
            assert (instance.instance, instance.state, instance.http) == ("test-e0", State.READY, ("10.0.0.7:8000",))
            assert await asyncio.to_thread(group.stop, 60) == 0, group.tail()
            said = [json.loads(line) for line in group.tail().splitlines()]
            assert {one["level"] for one in said if one["message"] != "this process stood still"} == {"info"}
        finally:
            group.kill()
