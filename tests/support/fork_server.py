"""vLLM servers that are forked from one process which has imported vLLM already: five seconds instead of thirty.

A server started by its command imports vLLM three times, in its API server, its engine core and its worker: 20 of the 26
processor seconds that its start takes. Here one process imports everything once, has no thread and no device, and forks for
each start. The fork takes the command's arguments, environment and log, leads a session of its own, and its engine core and
workers are forked from it in turn (``fork_on_cpu``). What runs is vLLM's own code behind the same command line.

    starts = ForkServer.shared()
    if starts.can(command, env):                    python -m vllm.entrypoints.launchers.api_server.entry …
        process = starts.start(command, env, log)   → Forked: .pid .poll() .wait(timeout) .send_signal(number)

The process ends when the one that made it does. Messages between them are JSON lines over a socket pair:

    → {"command": [...], "env": {...}, "log": path}      ← {"pid": n}
                                                         ← {"pid": n, "status": n}      later, as waitpid(2) gives it
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MODULE = "vllm.entrypoints.launchers.api_server.entry"
IMPORT_S = 400.0
FORK_S = 120.0
POLL_S = 0.02
AT_IMPORT = ("OMP_NUM_THREADS", "VLLM_TARGET_DEVICE", "LD_PRELOAD", "VLLM_PLUGINS")
"""Read while vLLM or torch is imported: who wants other values than the server has is started by its command."""


class Forked:
    """A process that the server has forked, with the part of ``subprocess.Popen`` that groups use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        self._server.hear()
        status = self._server.ended.get(self.pid)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises ``subprocess.TimeoutExpired``."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(MODULE, timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it alone; nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The process with everything imported. Started by the first engine, and once per test run."""

    _shared: ForkServer | None = None

    @classmethod
    def shared(cls) -> ForkServer:
        """The one of this interpreter."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        """Exit statuses by process id."""
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._rest = b""

    def can(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a command may be forked: vLLM's server, by this Python, with what was read at import as it was."""
        have = self._environment or env
        return list(command[:3]) == [sys.executable, "-m", MODULE] and all(env.get(k) == have.get(k) for k in AT_IMPORT)

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """Fork one. Raises OSError where the server has died, TimeoutError where it does not answer."""
        if self._process is None:
            self._begin(env, log)
        self._socket.sendall(json.dumps({"command": list(command), "env": dict(env), "log": str(log)}).encode() + b"\n")
        end = time.monotonic() + IMPORT_S + FORK_S
        while not self._started:
            self.hear(max(0.0, end - time.monotonic()))
            if time.monotonic() > end:
                raise TimeoutError(f"no fork of {MODULE} within {IMPORT_S + FORK_S:g} s")
        pid = self._started.pop()
        self.ended.pop(pid, None)
        return Forked(self, pid)

    def hear(self, wait_s: float = 0.0) -> None:
        """Take in what the server has said."""
        while select.select([self._socket], [], [], wait_s)[0]:
            got = self._socket.recv(1 << 16)
            if not got:
                raise OSError(f"the fork server has ended; see {self._log}")
            *lines, self._rest = (self._rest + got).split(b"\n")
            for said in map(json.loads, lines):
                if "status" in said:
                    self.ended[said["pid"]] = said["status"]
                else:
                    self._started.append(said["pid"])
            wait_s = 0.0

    def _begin(self, env: Mapping[str, str], log: Path) -> None:
        self._environment = dict(env)
        self._started: list[int] = []
        self._log = log.with_name("fork-server.log")
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], env=dict(env), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=(theirs.fileno(),), start_new_session=True)


def import_all() -> None:
    """Everything that the three kinds of process of a server import."""
    import setproctitle

    setproctitle.getproctitle()  # which finds the place of titles while the environment is as it was at the start
    __import__("vllm.entrypoints.launchers.api_server.entry")
    sys.path.insert(0, str(Path(__file__).parent / "fork_on_cpu"))
    __import__("fork_on_cpu").plugin()


def become(asked: dict[str, Any]) -> NoReturn:
    """In the fork: be what the command says."""
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    before = _folders(os.environ)
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[:] = _folders(os.environ) + [entry for entry in sys.path if entry not in before]
    random.seed()
    tempfile.tempdir = None  # the server's own
    command: list[str] = asked["command"]
    sys.argv = command[2:]
    try:
        import setproctitle

        setproctitle.setproctitle(" ".join(command))
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (as the interpreter does with what nobody catches)
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def serve(connection: socket.socket) -> None:
    """Fork for each request and tell of each end, until the other side closes."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    rest = b""
    while True:
        readable, _, _ = select.select([connection, woken], [], [])
        if woken in readable:
            woken.recv(1 << 12)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                connection.sendall(json.dumps({"pid": pid, "status": status}).encode() + b"\n")
        if connection in readable:
            got = connection.recv(1 << 16)
            if not got:
                return
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                leads, led = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    os.close(leads)
                    os.close(led)
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for one in (connection, woken, wake):
                        one.close()
                    become(json.loads(line))
                os.close(led)
                os.read(leads, 1)  # ends when the fork leads its session: who kills that sooner would kill nobody
                os.close(leads)
                connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as other_side:
        import_all()
        gc.collect()
        gc.freeze()  # so that a fork's collector touches, and copies, none of this
        serve(other_side)
