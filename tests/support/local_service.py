"""A service of the local backend in a temporary home, with stand-ins for its processes, driven through the xpyd command."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import free_port, home_begins, home_ends
from stand_in import make_stand_in

from xpyd_operator.cli import main
from xpyd_operator.local import lock, remains, shm
from xpyd_operator.local.paths import ServiceFolder


def wait(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    """Poll until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


class LocalService:
    """One service; ``write`` its document, ``xpyd`` commands on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "tiny") -> None:
        self.name = name
        self.file = folder / "service.yaml"
        self.python = make_stand_in(folder)
        self.port = free_port()
        self.members, self.admin = free_port(), free_port()
        monkeypatch.setenv("XPYD_HOME", str(folder / "home"))
        self.home = folder / "home"
        home_begins(self.home)
        self.folder = ServiceFolder(name)
        (folder / "model").mkdir()
        self.document: dict[str, Any] = {
            "apiVersion": "xpyd.dev/v1beta1",
            "kind": "DisaggService",
            "metadata": {"name": name},
            "spec": {
                "model": {"source": str(folder / "model")},
                "router": {"ports": {"http": self.port, "members": self.members, "admin": self.admin}},
                "drain": {"timeout": "20s"},
                "prefill": {"replicas": 1},
                "decode": {"replicas": 1},
            },
        }

    def write(self, prefill: int = 1, decode: int = 1, env: dict[str, str] | None = None, **spec: Any) -> None:
        self.document["spec"] |= {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}, **spec}
        if env is not None:
            self.document["spec"]["engine"] = {"env": [{"name": key, "value": value} for key, value in env.items()]}
        self.file.write_text(yaml.safe_dump(self.document))

    def up(self, *arguments: str) -> int:
        return main.main(["up", "-f", str(self.file), "--timeout", "200", "--python", self.python, *arguments])

    def foreground(self, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """``xpyd up`` as a process of its own; its output is piped, or goes to a descriptor."""
        command = [sys.executable, "-m", "xpyd_operator.cli.main", "up", "-f", str(self.file), "--python", self.python]
        return subprocess.Popen([*command, *arguments], stdout=output, stderr=subprocess.STDOUT, text=True)

    def status(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        capsys.readouterr()
        main.main(["status", self.name, "-o", "json"])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    def wait_status(self, capsys: pytest.CaptureFixture[str], holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first status of which something holds. Each is one look, and on a full machine some answers come too late."""
        found: dict[str, Any] = {}

        def look() -> bool:
            found.update(self.status(capsys))
            return bool(holds(found))

        wait(look)
        return found

    def pid(self, *parts: str) -> int:
        """Process id of a unit: ``"router", "router"`` or ``"instances", NAME, "engine"``; 0 while it is started."""
        path = self.folder.path.joinpath(*parts[:-1], f"{parts[-1]}.pid")
        try:
            return int(json.loads(path.read_text())["pid"])
        except FileNotFoundError:
            return 0

    def kill_supervisor(self) -> None:
        """Until nobody holds its lock: the kernel takes a moment to take down who is killed."""
        supervisor = lock.holder(self.folder.lock)
        assert supervisor > 0, "kill(2) takes other numbers for many processes"
        os.kill(supervisor, signal.SIGKILL)
        wait(lambda: lock.holder(self.folder.lock) == 0)

    def pids(self) -> list[int]:
        return remains.pids(self.folder)

    def clean(self) -> None:
        """Whatever a failed test left."""
        if self.folder.path.exists():
            supervisor = lock.holder(self.folder.lock)
            if supervisor > 0 and supervisor != os.getpid():
                os.kill(supervisor, signal.SIGKILL)
            asyncio.run(remains.end(self.folder))
            for listed in self.folder.instances.glob("*/shm"):
                shm.clean(listed)
            if self.folder.settings.exists():
                shutil.rmtree(json.loads(self.folder.settings.read_text())["run_dir"], ignore_errors=True)
        home_ends(self.home)
