"""What ``xpyd up`` refuses before it starts anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_service import LocalService


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalService]:
    one = LocalService(tmp_path, monkeypatch)
    yield one
    one.clean()


def test_a_taken_router_port_is_named_before_anything_starts(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.write()
    with socket.socket() as other:
        other.bind(("127.0.0.1", service.port))
        other.listen()
        assert service.up("--detach") == 2
    said = capsys.readouterr().err
    assert f"spec.router.ports.http: port {service.port} of 127.0.0.1 is in use" in said
    assert f"(pid {os.getpid()})" in said
    assert service.pids() == []


def test_what_is_wrong_is_said_before_anything_starts(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    service.write(kv={"transport": "nccl"})
    assert service.up() == 2
    assert "spec.kv.transport: nccl" in capsys.readouterr().err
    service.document["spec"]["kv"] = {}
    service.write(model={"source": "/no/such/folder"})
    assert service.up() == 2
    assert "spec.model.source: there is no folder /no/such/folder" in capsys.readouterr().err
    service.write(model={"source": "./model"})
    assert service.up("--host", "192.0.2.77") == 2
    assert "--host 192.0.2.77: this host cannot listen there" in capsys.readouterr().err
    assert service.pids() == []
