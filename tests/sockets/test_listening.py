"""Listening on all addresses of a machine, with IPv6 and without."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from xpyd_sidecar import listening
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.process import curve
from xpyd_sidecar.process.accepting import bind
from xpyd_sidecar.router.fleet import heartbeat_listener

KEY = ServiceKey(bytes(32))
real = socket.socket


class WithoutIPv6(socket.socket):
    """What sockets are like where the kernel was started without IPv6."""

    def __init__(self, family: int = -1, *args: Any, **named: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *args, **named)


@pytest.fixture(params=["as it is", "without IPv6"])
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Loopback addresses by which the machine is reached."""
    if request.param == "without IPv6":
        monkeypatch.setattr(socket, "socket", WithoutIPv6)
        return ("127.0.0.1",)
    return ("127.0.0.1", "::1") if Path("/proc/net/if_inet6").exists() else ("127.0.0.1",)


def reached(host: str, port: int) -> bool:
    with real(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        client.settimeout(5)
        return client.connect_ex((host, port)) == 0


async def test_everywhere_is_one_socket_for_both_families(hosts: tuple[str, ...]) -> None:
    (made,) = await bind("::", 0)
    try:
        assert all(reached(host, made.getsockname()[1]) for host in hosts)
    finally:
        made.close()


async def test_any_other_address_is_that_one_alone() -> None:
    (made,) = await bind("127.0.0.1", 0)
    try:
        assert (made.getsockname()[0], listening.bound("127.0.0.1")) == ("127.0.0.1", "127.0.0.1")
        assert listening.bound("::1") == "::1"
    finally:
        made.close()


async def test_heartbeats_come_by_both_families(hosts: tuple[str, ...]) -> None:
    context, heard = zmq.Context(), asyncio.Queue[str]()
    listener = heartbeat_listener.HeartbeatListener("s", lambda _: 0, heard.put_nowait)
    try:
        port = listener.listen("::", 0, KEY)
        for host in hosts:
            sends = context.socket(zmq.DEALER)
            sends.ipv6 = True
            sends.linger = 0
            curve.connect(sends, KEY, "membership")
            sends.connect(f"tcp://{join_host_port(host, port)}")
            sends.send(b"no heartbeat")
            try:
                assert await asyncio.wait_for(heard.get(), 30.0) == "undecodable", host
            finally:
                sends.close()
    finally:
        listener.close()
        context.term()


def test_a_server_is_told_what_the_machine_has(hosts: tuple[str, ...]) -> None:
    *command, host = listening.command("json.tool", ["--indent", "2"])
    assert command == [sys.executable, "-m", "json.tool", "--indent", "2", "--host"]
    with real(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:  # as vLLM makes its own
        server.bind((host, 0))
        server.listen()
        assert all(reached(each, server.getsockname()[1]) for each in hosts)


def test_it_becomes_the_server(tmp_path: Path) -> None:
    (tmp_path / "serves.py").write_text("import os, sys\nprint(os.getpid(), sys.argv[1:])\n")
    argv = [sys.executable, "-m", "xpyd_sidecar.listening", "serves", "--port", "8000"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said.strip() in {f"{process.pid} ['--port', '8000', '--host', '{host}']" for host in ("::", "0.0.0.0")}


@pytest.mark.parametrize(("has", "taken"), [
    ("entrypoints/launchers/api_server/entry.py", "vllm.entrypoints.launchers.api_server.entry"),
    ("entrypoints/openai/api_server.py", "vllm.entrypoints.openai.api_server"),
    (None, "vllm.entrypoints.launchers.api_server.entry")])
def test_a_server_of_an_older_package_is_found_by_its_older_name(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str | None, taken: str) -> None:
    if has is not None:
        (tmp_path / "vllm" / has).parent.mkdir(parents=True)
        (tmp_path / "vllm" / has).write_text("")
        (tmp_path / "vllm/__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert listening.installed_name("vllm.entrypoints.launchers.api_server.entry") == taken
    assert listening.installed_name("json.tool") == "json.tool"


def test_it_wants_a_module() -> None:
    argv = [sys.executable, "-m", "xpyd_sidecar.listening"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: python -m xpyd_sidecar.listening MODULE ARGUMENT …\n")
