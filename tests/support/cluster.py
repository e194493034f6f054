"""xPyD from real processes without the operator: a router, and an agent beside each real engine.

    with Cluster(tmp_path, prefill=1, decode=1) as cluster:
        cluster.wait_ready()
        complete(cluster.url, [5, 6, 7])
        cluster.prefill[0].engine.metric("xpyd_kv_pushed_tokens_total")

Every sidecar is ``python -m xpyd_sidecar`` with a configuration file, as in production. ``with`` starts everything at once
and waits for nothing. All logs lie in ``folder``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
from engines import READY_DEADLINE_S, Engine, HttpError, get, held
from fleets import serving
from processes import Group, ProcessFailed, free_port

from xpyd_sidecar.agent.ask import ask
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role, ServiceName, split_host_port
from xpyd_sidecar.contract.launch import AgentConfig, KvOptions, RouterConfig, SidecarConfig
from xpyd_sidecar.contract.timeline import HEADER, PATH, Traces

SERVICE = ServiceName("test")
HEARTBEAT_S = 1.0
"""Who is not heard for some of them is gone, and a full machine keeps an agent waiting for seconds."""
RESOLVE_S = 0.5
DRAIN_S = 240.0
"""What a drain may take: a long answer, on a full machine."""
PATIENT = KvOptions(claim_s=60.0, keep_ttl_s=180.0)
"""For engines that must let go of what somebody takes back: of what nobody claims they do so much later, on a full machine,
too; and of what nobody lets go of, later again."""


def start_sidecar(folder: Path, name: str, config: SidecarConfig) -> Group:
    """``python -m xpyd_sidecar`` with ``config``, its file and log in ``folder``."""
    file = folder / f"{name}.json"
    file.write_bytes(msgspec.json.encode(config))
    return Group([sys.executable, "-m", "xpyd_sidecar", "--config", str(file)], log=folder / f"{name}.log", name=name)


class Instance:
    """An engine and the agent that speaks for it."""

    def __init__(self, cluster: Cluster, ordinal: int, role: Role, *, data_parallel: int = 1, **engine: Any) -> None:
        self.name = InstanceName(f"{SERVICE}-e{ordinal}")
        self.role = role
        self._folder = cluster.folder
        self.engine = Engine(self.name, cluster.folder, key_file=cluster.key_file, **engine)
        address = HostPort(self.engine.address)
        host, port = split_host_port(address)
        agent = AgentConfig(role=role, engine=address, advertise_host=host, advertise_port=port,
                            routers=(cluster.members_address, cluster.other_address), heartbeat_s=HEARTBEAT_S,
                            resolve_s=RESOLVE_S, drain_timeout_s=DRAIN_S, data_parallel=data_parallel)
        self._config = SidecarConfig(service=SERVICE, instance=self.name, key_file=str(cluster.key_file),
                                     run_dir=str(self.engine.run_dir), agent=agent, log_format="text")
        self.agent: Group | None = None

    def start(self) -> Self:
        """Start both; waits for nothing."""
        self.engine.start()
        return self.start_agent()

    def start_agent(self) -> Self:
        """Start the agent (again)."""
        self.agent = start_sidecar(self._folder, f"{self.name}-agent", self._config)
        return self

    def undrain(self) -> bool:
        """Take a drain back; False where the agent does not answer."""
        try:
            return ask(self.engine.run_dir, "POST", "/undrain")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        """kill -9 of both."""
        if self.agent is not None:
            self.agent.kill()
        self.engine.kill()


class Cluster:
    """A router and its instances."""

    def __init__(self, folder: Path, prefill: int = 1, decode: int = 1, *, router: dict[str, Any] | None = None,
                 engine_args: Sequence[str] = (), options: KvOptions | None = None,
                 on_load_failure: Literal["recompute", "fail"] = "recompute", model: Path | None = None) -> None:
        """``router``: fields of RouterConfig that differ from its defaults (and from the quick beats of tests)."""
        self.folder = folder
        self.key_file = folder / "key"
        keys.write(self.key_file, keys.mint())
        self.port, self.admin_port = free_port(), free_port()
        self.members_address, self.other_address = (HostPort(f"127.0.0.1:{free_port()}") for _ in range(2))
        self.url = f"http://127.0.0.1:{self.port}"
        settings = {"host": "127.0.0.1", "port": self.port, "admin_port": self.admin_port,
                    "members_port": int(self.members_address.rpartition(":")[2]),
                    "heartbeat_s": HEARTBEAT_S, "resolve_s": RESOLVE_S, "drain_timeout_s": 10.0, **(router or {})}
        self._router_config = self._router("router", settings)
        self._engine: dict[str, Any] = {"args": engine_args, "options": options, "on_load_failure": on_load_failure,
                                        "model": model}
        self.router: Group | None = None
        self.instances: list[Instance] = []
        self._next = 0
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for _ in range(count):
                self.add(role)

    @property
    def prefill(self) -> list[Instance]:
        """Instances that prefill."""
        return [one for one in self.instances if one.role is Role.PREFILL]

    @property
    def decode(self) -> list[Instance]:
        """Instances that decode."""
        return [one for one in self.instances if one.role is Role.DECODE]

    def add(self, role: Role, **other: Any) -> Instance:
        """One more instance, not started. ``other``: what differs from the other instances' engines."""
        instance = Instance(self, self._next, role, **{**self._engine, **other})
        self._next += 1
        self.instances.append(instance)
        return instance

    def start(self) -> Self:
        """Start everything; waits for nothing."""
        self.start_router()
        for instance in self.instances:
            instance.start()
        return self

    def start_router(self) -> None:
        """Start the router (again)."""
        (self.folder / "router").mkdir(exist_ok=True)
        self.router = start_sidecar(self.folder, "router", self._router_config)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def _router(self, name: str, settings: dict[str, Any]) -> SidecarConfig:
        return SidecarConfig(service=SERVICE, instance=InstanceName(name), key_file=str(self.key_file), log_format="text",
                             run_dir=str(self.folder / name), router=RouterConfig(**({"policy": "round_robin"} | settings)))

    @contextmanager
    def other_router(self, **settings: Any) -> Iterator[tuple[Group, int]]:
        """One more router before the same instances; its process and port. It is there, but perhaps not ready yet."""
        port, config = free_port(), self._router_config.router
        assert config is not None
        (self.folder / "other").mkdir(exist_ok=True)
        router = start_sidecar(self.folder, "other", self._router("other", {
            **msgspec.structs.asdict(config), "port": port, "members_port": int(self.other_address.rpartition(":")[2]),
            "admin_port": free_port(), **settings}))
        try:
            yield router, port
        finally:
            router.kill()

    def fleet(self) -> Fleet:
        """What the router knows."""
        token = keys.admin_token(keys.read(self.key_file))
        answer = get(f"http://127.0.0.1:{self.admin_port}/fleet", 60, {"Authorization": f"Bearer {token}"})
        return msgspec.json.decode(answer, type=Fleet)

    def traces(self, question: str) -> Traces:
        """Timelines, as ``GET /trace`` tells them."""
        token = keys.admin_token(keys.read(self.key_file))
        url = f"http://127.0.0.1:{self.admin_port}{PATH}"
        answer = get(url, 60, {"Authorization": f"Bearer {token}", HEADER: question})
        return msgspec.json.decode(answer, type=Traces)

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> Self:
        """Wait until the router is ready, has heard every instance say so, and would send requests to each."""
        for instance in self.instances:
            instance.engine.wait_ready(deadline_s)
        names = {one.name for one in self.instances}
        self.wait_fleet(lambda fleet: fleet.settled and names == serving(fleet).keys(), 120.0, "ready with all instances")
        return self

    def wait_fleet(self, condition: Callable[[Fleet], bool], deadline_s: float, what: str) -> None:
        """Wait until the router's view fulfils ``condition``. Raises ProcessFailed with what it last said, and the logs."""
        last = ["no answer"]

        def look() -> bool:
            try:
                fleet = self.fleet()
            except (OSError, HttpError) as error:
                last[0] = str(error)
                return False
            last[0] = msgspec.json.encode(fleet).decode()
            return condition(fleet)

        assert self.router is not None
        try:
            self.router.wait_until(look, deadline_s, what, poll_s=0.1)
        except ProcessFailed as error:
            agents = "\n".join(f"{one.name}: {one.agent.tail(10)}" for one in self.instances if one.agent is not None)
            raise ProcessFailed(f"{error}\nfleet: {last[0]}\n{agents}") from None

    @property
    def plain_url(self) -> str:
        """An engine asked directly, without kv_transfer_params, answers as a plain one."""
        return self.prefill[0].engine.url

    def repair(self) -> Self:
        """Start again what does not run, take drains back, and wait until all is ready."""
        if self.router is None or self.router.returncode() is not None:
            self.start_router()
        for instance in self.instances:
            if not instance.engine.alive():
                instance.engine.restart()
            if instance.agent is None or instance.agent.returncode() is not None:
                instance.start_agent()
        for instance in self.instances:
            assert instance.agent is not None
            instance.agent.wait_until(instance.undrain, 120.0, "answering on its socket")
        return self.wait_ready()

    def wait_idle(self, deadline_s: float = 120.0) -> None:
        """Wait until no engine has a request, a block in use or a transfer open. Raises ProcessFailed with what is left."""
        for instance in self.instances:
            if instance.engine.alive():
                left: dict[str, float] = {}

                def empty(engine: Engine = instance.engine, left: dict[str, float] = left) -> bool:
                    left.clear()
                    left.update(held(engine.url))
                    return not left

                try:
                    instance.engine.group.wait_until(empty, deadline_s, "idle", poll_s=0.1)
                except ProcessFailed as error:
                    raise ProcessFailed(f"{instance.name} still has {left}\n{error}") from None

    def kill(self) -> None:
        """kill -9 of everything."""
        for instance in self.instances:
            instance.kill()
        if self.router is not None:
            self.router.kill()
