"""What keeps tests in their tiers: pure ones open no socket and start no process, engines start for tests that say so."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Engine
from pure_tests import pure
from service import Service


def listen() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        pass


def mailbox() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind("")


async def server() -> None:
    (await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)).close()


def fork() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(("act", "words"), [
    (listen, "binds a socket"),
    (mailbox, "binds a socket"),
    (lambda: asyncio.run(server()), "binds a socket"),
    (lambda: subprocess.run([sys.executable, "-V"], check=True), "starts a process"),
    (fork, "forks"),
])
def test_a_pure_test_that_is_not_pure_fails(act: Callable[[], object], words: str) -> None:
    with pure("tests/unit/test_a.py::test_b"), pytest.raises(pytest.fail.Exception) as failed:
        act()
    assert str(failed.value) == f"tests/unit/test_a.py::test_b {words}, so its file belongs to tests/sockets"
    act()  # afterwards anybody may


def test_a_loop_that_wakes_itself_and_pairs_of_sockets_are_pure() -> None:
    async def woken() -> bytes:
        one, other = socket.socketpair()
        with one, other:
            await asyncio.to_thread(one.send, b"a")
            return other.recv(1)

    with pure("a test"):
        assert asyncio.run(woken()) == b"a"


def test_no_engine_starts_where_none_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "refused", "mark it")
    for start in (Engine("e0", tmp_path, model=tmp_path).start, Service(tmp_path).__enter__):
        with pytest.raises(AssertionError, match="mark it"):
            start()
