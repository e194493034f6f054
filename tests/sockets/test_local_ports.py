from __future__ import annotations

import os
import socket
from random import Random

import pytest
from processes import free_port

from xpyd_operator.errors import LocalError
from xpyd_operator.local import ports

HOST = "127.0.0.1"


def test_a_listening_port_is_not_free_and_its_holder_is_named() -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        assert not ports.is_free(HOST, port)
        assert f"(pid {os.getpid()})" in ports.who_listens(port)
        with pytest.raises(LocalError, match=rf"spec\.x: port {port} of 127\.0\.0\.1 is in use by .*\(pid {os.getpid()}\)"):
            ports.require_free(HOST, port, "spec.x")
    assert ports.is_free(HOST, port)
    assert ports.who_listens(port) == ""
    ports.require_free(HOST, port, "spec.x")


def test_engines_get_ports_below_the_ephemeral_range_and_none_twice() -> None:
    random = Random(1)
    chosen: list[int] = []
    for _ in range(20):
        chosen.append(ports.choose(HOST, chosen, random))
    assert len(set(chosen)) == 20
    assert all(ports.FIRST <= port <= ports.LAST for port in chosen)


def test_no_port_left_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "LAST", ports.FIRST + 3)
    with pytest.raises(LocalError, match="no port from 20000 to 20003"):
        ports.choose(HOST, range(20000, 20004), Random(0))


def test_an_address_of_another_host_is_refused() -> None:
    ports.check_address(HOST)
    ports.check_address("0.0.0.0")
    with pytest.raises(LocalError, match=r"--host 192\.0\.2\.9"):
        ports.check_address("192.0.2.9")
    with pytest.raises(LocalError, match="--host no such host"):
        ports.check_address("no such host")


def test_free_port_of_the_helpers_is_free() -> None:
    assert ports.is_free(HOST, free_port())
