"""A service of `xpyd up` with instances of two members, and what tests ask of its groups: router's view, processes, lives.

    with groups(folder, "decode", {"data": 2}) as one:               decode is a group of two ranks, prefill one engine
        (group,) = one.fleet("decode")
        one.engine(group.instance, 1)                                processes of the second member's engine

With ``bridge`` members are in networks of their own (``members_apart``).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dp_engines import PLUGIN
from engines import BASE_ARGS, BASE_ENV, MODEL_NAME, metric
from make_model import ensure_model, ensure_moe
from members_apart import HOST, Bridge
from service import NAME, Service

from xpyd_operator.local import agents, procs
from xpyd_operator.local.paths import member_folder, run_folder
from xpyd_operator.local.procs import Stat
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import FleetInstance
from xpyd_sidecar.contract.group import ROUND

UP_S = 600
ANSWER_S = 120.0


class GroupService(Service):
    """See the module."""

    def __init__(self, folder: Path, bridge: Bridge | None = None) -> None:
        super().__init__(folder, plugins=(PLUGIN,))
        self._bridge = bridge
        self.host = HOST if bridge is not None else "127.0.0.1"
        self.url = f"http://{self.host}:{self.port}"

    def xpyd(self, *arguments: str, check: bool = False, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        if self._bridge is not None and arguments[0] == "up":
            arguments = (*arguments, "--host", self.host, "--python", self._bridge.python)
        return super().xpyd(*arguments, check=check, timeout_s=timeout_s)

    def up(self, prefill: int, decode: int) -> str:
        """See ``Service``; five engines' worth of processes start at once."""
        self.write(prefill, decode)
        command = ("up", "-f", str(self.file), "--detach", "--timeout", str(UP_S))
        return self.xpyd(*command, check=True, timeout_s=UP_S + 30).stdout

    def fleet(self, role: str) -> list[FleetInstance]:
        """Instances of a role, as the router knows them; on a busy machine it may have to be asked again."""
        key, end = keys.read(self.home / NAME / "key"), time.monotonic() + ANSWER_S
        while (found := asyncio.run(agents.fleet(self.host, self.admin, key))) is None:
            assert time.monotonic() < end, "the router does not answer"
        return [each for each in found.instances if each.role == role]

    def launcher(self, instance: str, index: int) -> int:
        """Process of a member's launcher, which leads a session."""
        name = f"engine-{index}" if index else "engine"
        return int(json.loads((self.home / NAME / "instances" / instance / f"{name}.pid").read_text())["pid"])

    def server(self, instance: str, index: int) -> int:
        """Process that a member's launcher has started: the engine's server, or what runs its workers."""
        (found,) = [each.pid for each in self.engine(instance, index) if each.parent == self.launcher(instance, index)]
        return found

    def engine(self, instance: str, index: int) -> list[Stat]:
        """All processes of a member's engine."""
        launcher = self.launcher(instance, index)
        return [each for each in procs.all_processes() if each.session == launcher != each.pid and not each.dead]

    def life(self, instance: str) -> str:
        """What the leader's launcher is told to run; empty: nothing."""
        settings = json.loads((self.home / NAME / "settings.json").read_text())
        folder = member_folder(run_folder(settings["run_dir"], NAME, instance), 0)
        return str(json.loads((folder / ROUND).read_text())["life"])

    def log(self, instance: str, index: int) -> str:
        """What a member's engines have said."""
        path = self.home / NAME / "instances" / instance / (f"engine-{index}.log" if index else "engine.log")
        return path.read_text("utf-8", errors="replace")


@contextmanager
def groups(folder: Path, role: str, parallelism: dict[str, int], *, replicas: int = 1,
           bridge: Bridge | None = None) -> Iterator[GroupService]:
    """One service whose ``role`` has groups of two members, the other one a single engine; ready."""
    model = ensure_moe() if parallelism.get("data", 1) > 1 else ensure_model()
    with GroupService(folder, bridge) as one:
        # With tensor ranks vLLM for CPUs compiles at the first request of each life.
        env = {**BASE_ENV, "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"}
        one.spec = {
            "model": {"source": str(model), "servedName": MODEL_NAME},
            "engine": {"args": [*BASE_ARGS, "--num-gpu-blocks-override", "64"], "startupTimeout": "20m",
                       "env": [{"name": name, "value": value} for name, value in env.items()]},
            "prefill": {"replicas": 1}, "decode": {"replicas": 1},
        }
        one.spec[role] = {"replicas": replicas, "parallelism": {**parallelism, "pods": 2}}
        one.up(one.spec["prefill"]["replicas"], one.spec["decode"]["replicas"])
        yield one


def counted(instance: FleetInstance, name: str, **labels: str) -> list[float]:
    """A series of each server of an instance."""
    return [metric(f"http://{door}", name, **labels) for door in dict.fromkeys(instance.http)]


def stream(url: str, prompt: list[int], tokens: int, into: list[int]) -> None:
    """Token ids of a stream, as they come."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                assert "error" not in event, event
                into += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
