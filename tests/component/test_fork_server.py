"""Engines that are forked: they are what their command would have started, and end as it would.

That they answer alike is shown by ``test_service_under_load``, which compares engines that `xpyd up` has started by their
command with a forked one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
from engines import MODEL_NAME, Engine, get
from fork_server import MODULE, ForkServer
from processes import ProcessFailed

EXTRA = ("--num-gpu-blocks-override", "34")


@pytest.mark.engines
def test_a_fork_has_its_own_command_environment_session_and_log(tmp_path: Path) -> None:
    with Engine("e0", tmp_path, args=EXTRA, env={"XPYD_TEST_OWN": "1"}) as engine:
        engine.wait_ready()
        pid = engine.group.pid
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert command.startswith(f"{sys.executable} -m {MODULE} --model ")
        assert command.endswith(" ".join(EXTRA))
        assert os.getsid(pid) == pid
        names = {Path(f"/proc/{each}/cmdline").read_bytes().partition(b"\0")[0] for each in engine.group.pids()}
        assert {b"VLLM::EngineCore", b"VLLM::Worker"} <= names
        assert MODEL_NAME in get(f"{engine.url}/v1/models")
        assert engine.record() is not None, "the connector has read its folder and key from this environment"
        assert "Application startup complete" in engine.log.read_text()
        assert engine.stop(120.0) == 0
        assert engine.group.pids() == []


def test_what_vllm_changes_in_this_process_does_not_reach_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    engine = Engine("e0", tmp_path)
    assert "LD_PRELOAD" not in engine.env
    assert ForkServer.shared().can(engine.command, engine.env)


@pytest.mark.engines
def test_a_fork_that_cannot_start_ends_as_its_command_does_with_its_words(tmp_path: Path) -> None:
    engine = Engine("e0", tmp_path, connector=False, args=("--no-such-option",))
    with engine, pytest.raises(ProcessFailed) as failed:
        engine.wait_ready()
    assert "ended with 2 before it was healthy" in str(failed.value)
    assert "unrecognized arguments: --no-such-option" in str(failed.value)


@pytest.mark.engines
def test_a_killed_fork_says_by_which_signal(tmp_path: Path) -> None:
    with Engine("e0", tmp_path, connector=False) as engine:
        assert engine.alive()
        engine.kill()
        assert engine.group.returncode() == -9
        assert not engine.alive()


@pytest.mark.engines
def test_a_port_is_closed_once_its_server_is_killed_though_the_core_lives(tmp_path: Path) -> None:
    with Engine("e0", tmp_path, args=EXTRA) as engine:
        engine.wait_ready()
        core = next(each for each in engine.group.pids()
                    if Path(f"/proc/{each}/cmdline").read_bytes().startswith(b"VLLM::EngineCore"))
        os.kill(core, signal.SIGSTOP)
        engine.group.kill_process(engine.group.pid)
        assert engine.group.wait(120.0) == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", engine.port), 5.0)
        assert core in engine.group.pids()


@pytest.mark.engines
@pytest.mark.parametrize(("command", "env"), [
    ((sys.executable, "-c", "pass"), {}),
    ((sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"), {}),
    (("python3", "-m", MODULE), {}),
    ((sys.executable, "-m", MODULE), {"OMP_NUM_THREADS": "7"}),
])
def test_what_the_server_has_not_imported_so_is_started_by_its_command(tmp_path: Path, command: tuple[str, ...],
                                                                       env: dict[str, str]) -> None:
    server = ForkServer.shared()
    with Engine("e0", tmp_path, connector=False) as engine:
        assert server.can(engine.command, engine.env)
        assert not server.can(command, {**engine.env, **env})


def test_the_server_ends_with_the_process_that_made_it() -> None:
    program = "import socket, sys; from fork_server import serve; serve(socket.socket(fileno=int(sys.argv[1])))"
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen([sys.executable, "-c", program, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                                  env={**os.environ, "PYTHONPATH": str(Path(fork_server.__file__).parent)})
    assert server.poll() is None
    ours.close()  # as the system does for a process that was killed
    assert server.wait(120.0) == 0
