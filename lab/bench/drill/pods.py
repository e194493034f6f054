"""What runs in the pods of a drill: a real router as a process of its own, and engines that work as the simulation says.

Each pod has a loopback address (``node_agent``); a router listens there alone, as in a network of its own. Engines' agents
find the routers by the pods, which stand for the name of the members' Service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import zmq
from kube_routers import FLAG
from model_engine import BEAT_S, Handed, ModelEngine
from node_agent import ROLE, Life, NodeAgent, Script
from processes import Group, ProcessFailed

from xpyd_operator.simulation.engine import EngineModel
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import HostPort, Role

START_S = 120.0
LOOK_S = 0.05
DRAIN_S = 3 * BEAT_S
"""A pod that ends goes on so long at least: until routers have heard of it."""


class RouterInPod:
    """``python -m xpyd_sidecar`` with the configuration that its pod carries."""

    def __init__(self, life: Life, folder: Path) -> None:
        self._life = life
        self._folder = folder / life.name
        self.group: Group | None = None

    async def start(self) -> None:
        """Until it answers. Raises ProcessFailed: it has ended, or is not there in time."""
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = config_of(self._life)
        assert self._life.keys is not None
        key_file = self._folder / "key"
        keys.write(key_file, self._life.keys.key)
        config |= {"instance": self._life.name, "key_file": str(key_file), "run_dir": str(self._folder)}
        config["log_level"] = "warning"
        config["router"] |= {"host": self._life.ip, "listen_on_s": 0.0, "access_log": False}
        file = self._folder / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        group = self.group = Group([sys.executable, "-m", "xpyd_sidecar", "--config", str(file)], log=self._folder / "log",
                                   env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, name="router")
        url = f"http://{self._life.ip}:{config['router']['admin_port']}/health"

        def answers() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
            return False

        group.wait_until(answers, START_S, "the router answers")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        group, self.group = self.group, None
        if group is not None:
            await asyncio.to_thread(group.stop)


class EngineInPod:
    """Serves while its pod is ready; dies when it crashes; beats from start to end."""

    def __init__(self, life: Life, pods: Pods) -> None:
        self._life, self._pods = life, pods
        served = str(config_of(life)["agent"]["model"])
        assert life.keys is not None
        self.engine = ModelEngine(life.name, Role(life.labels[ROLE]), life.ip, pods.model, pods.handed,
                                  service=life.service, served=served, key=life.keys.key)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Its agent begins; the engine comes with its pod."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """The pod is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.engine.farewell()
        await self.engine.die()

    async def _run(self) -> None:
        beat_at = 0.0
        while True:
            ready = self._life.facts.stage == "ready"
            if ready != self.engine.serves:
                await (self.engine.begin() if ready else self.engine.die())
                beat_at = 0.0
            if time.monotonic() >= beat_at and self._life.facts.stage != "crashed":
                self.engine.tell(self._pods.context, self._pods.members(self._life.service), draining=self._life.ending)
                beat_at = time.monotonic() + BEAT_S
            await asyncio.sleep(LOOK_S)


class Pods:
    """Puts both into the pods of an agent."""

    def __init__(self, agent: NodeAgent, model: EngineModel, folder: Path) -> None:
        self.model = model
        self.handed = Handed()
        self.context: zmq.Context[Any] = zmq.Context()
        self._agent, self._folder = agent, folder
        agent.serves = self._serves
        agent.drained = self._drained
        agent.script = self._script

    def routers(self) -> list[RouterInPod]:
        """Those that run."""
        return [life.router for life in self._agent.lives.values() if isinstance(life.router, RouterInPod)]

    def clients(self) -> list[str]:
        """Where clients reach them."""
        return [f"http://{life.ip}:{config_of(life)['router']['port']}/v1" for life in self._agent.lives.values()
                if isinstance(life.router, RouterInPod)]

    def members(self, service: str) -> list[HostPort]:
        """Where agents reach them."""
        return [HostPort(f"{life.ip}:{config_of(life)['router']['members_port']}") for life in self._agent.lives.values()
                if isinstance(life.router, RouterInPod) and life.service == service and life.router_since is not None]

    def engines(self, role: Role) -> list[str]:
        """Names of the pods whose engines serve."""
        return [life.name for life in self._agent.lives.values() if isinstance(life.router, EngineInPod)
                and life.router.engine.role is role and life.router.engine.serves and not life.ending]

    async def crash(self, name: str) -> None:
        """The engine of a pod ends at once, and starts again as one that starts cold."""
        server = self._agent.lives[name].router
        assert isinstance(server, EngineInPod)
        await server.engine.die()
        self._agent.crash(name)

    def _serves(self, life: Life) -> RouterInPod | EngineInPod:
        return EngineInPod(life, self) if life.engine else RouterInPod(life, self._folder)

    def _drained(self, life: Life) -> bool:
        return not isinstance(life.router, EngineInPod) or not life.router.engine.requests

    def _script(self, pod: dict[str, Any]) -> Script:
        engine = bool((pod["metadata"].get("labels") or {}).get(ROLE))
        return Script(start_s=self.model.cold_start if engine else 0.1, drain_s=DRAIN_S if engine else 0.2, restart_s=0.5)


def config_of(life: Life) -> dict[str, Any]:
    """Of the sidecar of a pod, which the pod carries. Raises ProcessFailed: it has none."""
    for container in (*life.pod["spec"].get("initContainers", ()), *life.pod["spec"]["containers"]):
        command = [*container.get("command", ()), *container.get("args", ())]
        if FLAG in command:
            return dict(msgspec.json.decode(command[command.index(FLAG) + 1]))
    raise ProcessFailed(f"pod {life.name} has no sidecar")
