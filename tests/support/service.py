"""A real service of the local backend: the `xpyd` command as a user runs it, real engines, a temporary home.

    with Service(tmp_path) as service:
        service.up(prefill=1, decode=1)
        service.status()["instances"]
        service.processes()                 every process by what it is: "router", "t-e0/agent", "t-e0/core" …
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from engines import BASE_ARGS, BASE_ENV, MODEL_NAME, Engine, HttpError, held
from fleets import serving
from make_model import ensure_model
from processes import free_port, home_begins, home_ends, shared_memory
from releases import Release

from xpyd_operator.local import agents, procs, remains
from xpyd_operator.local.paths import ServiceFolder
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName

NAME = "t"
FORKS = Path(__file__).parent / "fork_on_cpu"
XPYD = Path(sys.executable).with_name("xpyd")


class Service:
    """One service; ``with`` takes it down at the end, whatever happened."""

    def __init__(self, folder: Path, plugins: Sequence[Path] = ()) -> None:
        """``plugins``: folders that have plugins of vLLM."""
        self.folder = folder
        self.home = folder / "home"
        self.file = folder / "service.yaml"
        self.port, self.members, self.admin = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.spec: dict[str, Any] = {}
        """Further sections of the document, from the next ``write`` on."""
        self.engine_env: dict[str, str] = {}
        """Further variables of the engines, likewise; other ones make a new revision."""
        self.before: tuple[str, ...] = ()
        """What the command is started by, as ``prlimit`` with its arguments."""
        self._environment = {**os.environ, "XPYD_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(
            filter(None, (str(FORKS), *map(str, plugins), os.environ.get("PYTHONPATH"))))}
        self._shared: set[str] = set()
        """Files under /dev/shm that its processes had, whenever it was looked."""
        home_begins(self.home)

    def __enter__(self) -> Self:
        assert not Engine.refused, Engine.refused
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.xpyd("down", NAME, "--now")
        home_ends(self.home)

    def runs(self, release: Release, *folders: Path, **variables: str) -> None:
        """The command, and whatever is started from then on, is of this release; ``folders`` have plugins of vLLM."""
        path = os.pathsep.join((str(FORKS), *map(str, folders)))
        self._environment = release.environment(XPYD_HOME=str(self.home), PYTHONPATH=path, **variables)

    def write(self, prefill: int, decode: int) -> None:
        """The document with these counts."""
        env = {**BASE_ENV, **self.engine_env}
        ports = {"http": self.port, "members": self.members, "admin": self.admin}
        self.file.write_text(yaml.safe_dump({
            "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": NAME},
            "spec": {
                "model": {"source": str(ensure_model()), "servedName": MODEL_NAME},
                "engine": {"args": list(BASE_ARGS), "env": [{"name": k, "value": v} for k, v in env.items()]},
                "prefill": {"replicas": prefill}, "decode": {"replicas": decode},
                "router": {"ports": ports, "policy": "least_loaded"},
                **self.spec,
            },
        }))

    def xpyd(self, *arguments: str, check: bool = False, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        done = subprocess.run([*self.before, XPYD, *arguments], env=self._environment, check=False, text=True,
                              timeout=timeout_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert not check or done.returncode == 0, f"xpyd {' '.join(arguments)}: {done.returncode}\n{done.stdout}"
        return done

    def up(self, prefill: int, decode: int) -> str:
        """Bring the service to these counts and wait until it is there; what the command said."""
        self.write(prefill, decode)
        return self.xpyd("up", "-f", str(self.file), "--detach", "--timeout", "560", check=True).stdout

    @contextlib.contextmanager
    def changing(self, prefill: int, decode: int) -> Iterator[subprocess.Popen[str]]:
        """`xpyd up` in the middle of its work; it is ended with the block."""
        self.write(prefill, decode)
        command = [*self.before, XPYD, "up", "-f", str(self.file), "--detach", "--timeout", "560"]
        with subprocess.Popen(command, env=self._environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) as process:
            try:
                yield process
            finally:
                process.kill()

    def status(self) -> dict[str, Any]:
        """`xpyd status -o json`."""
        done = self.xpyd("status", NAME, "-o", "json")
        assert done.returncode in {0, 1}, done.stdout  # 1: not as wanted
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def ready(self) -> str:
        """What is ready, e.g. ``1P3D``; empty while the service as a whole is not (the router learns the roster, say)."""
        status = self.status()["status"]
        ready = next(one for one in status["conditions"] if one["type"] == "Ready")["status"]
        return str(status["ready"]) if ready == "True" else ""

    def processes(self) -> dict[str, int]:
        """Process ids by name: router, supervisor, and for each instance agent, engine (HTTP server) and core."""
        self._shared |= shared_memory(self._pids())
        supervisor = int(self.status()["supervisor"])
        found = {"supervisor": supervisor} if supervisor > 0 else {}  # kill(2) takes other numbers for many processes
        for file in self.home.glob(f"{NAME}/**/*.pid"):
            try:
                pid = int(json.loads(file.read_text())["pid"])
            except FileNotFoundError:  # who it was has ended since
                continue
            name = file.stem if file.parent.name == "router" else f"{file.parent.name}/{file.stem}"
            if Path(f"/proc/{pid}").exists():
                found[name] = pid
                if file.stem == "engine":
                    session = [stat.pid for stat in procs.all_processes() if stat.session == pid]
                    cores = [child for child in session if "EngineCore" in _command(child)]
                    found |= {f"{file.parent.name}/core": core for core in cores}
        return found

    def left(self) -> list[str]:
        """Commands of processes that still belong to the service."""
        return [_command(pid) for pid in self._pids()]

    def left_shared(self) -> list[str]:
        """Shared memory that was the service's, and is still there."""
        return [path for path in self._shared if Path(path).exists()]

    def _pids(self) -> list[int]:
        return remains.pids(ServiceFolder(NAME, self.home))

    def idle(self) -> dict[str, float]:
        """What engines still hold, by instance and series; empty when nothing runs, waits, moves or is in use.

        Of one that does not answer nobody knows: it may end, or start.
        """
        busy = {}
        for instance in self.status()["instances"]:
            try:
                left = held(f"http://{instance['address']}")
            except (OSError, HttpError):
                left = {"has no answer": 1.0}
            busy |= {f"{instance['name']} {name}": value for name, value in left.items()}
        return busy


def wait(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Poll until it holds."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not {what} within {deadline_s:g} s"
        time.sleep(0.5)


def wait_life(folder: ServiceFolder, port: int, instance: str, deadline_s: float, before: str = "") -> str:
    """The incarnation of another life than the one before, once the router with this admin port would send it requests.

    One look at a full machine may miss an answer.
    """
    found = [before]

    def look() -> bool:
        fleet = asyncio.run(agents.fleet("127.0.0.1", port, keys.read(folder.key)))
        found.append(serving(fleet).get(InstanceName(instance), "") if fleet is not None else "")
        return found[-1] not in {"", before}

    wait(look, deadline_s, f"another life of {instance}, as the router knows it")
    return found[-1]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""

