"""What runs on one host: the processes of an instance and of the router, with every address bound.

Pure: paths and ports come as arguments.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Bucket, Claim, Folder, Hub, Image, RelativePath
from xpyd_operator.errors import UnsupportedField
from xpyd_operator.plan.desired import Revision, revision_of
from xpyd_operator.render.engine import CPU_ENV, engine_env
from xpyd_operator.render.layout import digest, layout
from xpyd_operator.render.sections import agent_section, router_section
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role, ServiceName, join_host_port
from xpyd_sidecar.contract.launch import GroupConfig, SidecarConfig

LAUNCHER: Final = "xpyd_sidecar.member"
"""The process of a member, where there are several."""


class Process(msgspec.Struct, frozen=True):
    """One process: arguments, and what is added to the environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


class ProcessPlace(msgspec.Struct, frozen=True):
    """Where the processes of one instance, or the router, run. Paths are absolute."""

    python: str
    key_file: str
    run_dir: str
    """Short, since sockets lie in it: the agent's, and those among vLLM's processes."""
    host: str
    """Address at which the others of the service reach this host, and on which the engine listens."""


class EngineBinding(msgspec.Struct, frozen=True):
    """What one instance has beside its place."""

    instance: InstanceName
    role: Role
    devices: tuple[int, ...] = ()
    """GPUs by index; empty: none, the engine runs on CPUs."""
    index: int = 0
    """Of the member, where the instance has several."""
    meeting: HostPort = HostPort("")
    """Where the leader's agent listens for the others; empty where there is one member."""


def model_of(service: DisaggService) -> str:
    """The model as a local engine sees it. A path beside the document is absolute by now: whoever read it knew its folder.

    Raises:
        UnsupportedField: the source lies on a volume of a cluster.
    """
    match service.spec.model.origin:
        case Hub(id=name):
            return name
        case Folder(path=path) | RelativePath(path=path):
            return path
        case Bucket(url=url):
            return url
        case Claim() | Image():
            reason = "a volume of a cluster is not there on a single host; write a hub id or a path"
            raise UnsupportedField("spec.model.source", reason)


def engine_process(service: DisaggService, place: ProcessPlace, binding: EngineBinding) -> Process:
    """The vLLM server of one member, without its port: that is chosen when it is started (``port_args``). Where there are
    several, the process is the member's launcher, which starts it.

    Raises:
        UnsupportedField: as ``model_of``.
    """
    member = layout(service, binding.role, binding.instance, model_of(service))[binding.index]
    argv = (place.python, "-m", member.module, *member.args, *(("--host", place.host) if member.serves else ()))
    if member.size > 1:
        grace = str(math.ceil(service.spec.drain.timeout_s))
        argv = (place.python, "-m", LAUNCHER, "--grace-s", grace, "--", *argv)
    env = {"VLLM_NO_USAGE_STATS": "1", launch.ENV_API_KEY: ""}  # one of whoever calls xpyd would be asked of the router
    if not service.spec.asks_hub:
        env["HF_HUB_OFFLINE"] = "1"
    if binding.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, binding.devices))
    else:
        env |= CPU_ENV
    env |= engine_env(service)
    env |= connector_env(place, binding.instance)
    env |= member.env
    if member.size > 1:
        env["VLLM_HOST_IP"] = _loopback(place.host)
    return Process(argv, env)


def _loopback(host: str) -> str:
    """For what engines of several members say to each other: vLLM does not ask who comes, and all of them are here."""
    return "::1" if ":" in host else "127.0.0.1"


def port_args(process: Process, port: int) -> tuple[str, ...]:
    """Where its server listens; nothing where it has none."""
    return ("--port", str(port)) if "--host" in process.argv else ()


def connector_env(place: ProcessPlace, instance: InstanceName) -> dict[str, str]:
    """What the connector reads, and a folder of its own for every temporary file and socket of the engine."""
    return {
        launch.ENV_RUN_DIR: place.run_dir,
        launch.ENV_KEY_FILE: place.key_file,
        launch.ENV_INSTANCE: instance,
        launch.ENV_HOST: place.host,
        "TMPDIR": place.run_dir,
        "VLLM_RPC_BASE_PATH": place.run_dir,
        "VLLM_HOST_IP": place.host,
    }


def agent_config(
    service: DisaggService, place: ProcessPlace, binding: EngineBinding, port: int, routers: tuple[HostPort, ...]
) -> SidecarConfig:
    """The agent beside the engine that listens on ``port``; ``routers`` are membership addresses, which only the leader of
    several members speaks to.
    """
    engine, led = join_host_port(place.host, port), binding.index > 0
    agent = agent_section(service, binding.role, engine, (place.host, port), () if led else routers)
    if binding.meeting:
        members = layout(service, binding.role, binding.instance, model_of(service))
        leader = binding.meeting if led else HostPort("")
        group = GroupConfig(binding.index, len(members), digest(members), leader, _loopback(place.host))
        agent = msgspec.structs.replace(agent, group=group, listen=None if led else binding.meeting)
    return SidecarConfig(
        service=ServiceName(service.name),
        instance=binding.instance,
        key_file=place.key_file,
        run_dir=place.run_dir,
        agent=agent,
    )


def router_config(service: DisaggService, place: ProcessPlace, listen: str) -> SidecarConfig:
    """The router of a host; ``listen`` is the address on which clients and agents reach it."""
    return SidecarConfig(
        service=ServiceName(service.name),
        instance=InstanceName(f"{service.name}-router"),
        key_file=place.key_file,
        run_dir=place.run_dir,
        router=router_section(service, listen),
    )


def sidecar_process(python: str, config_file: str) -> Process:
    """Router or agent, as its configuration says."""
    return Process((python, "-m", "xpyd_sidecar", "--config", config_file), {})


def sidecar_revision(config: SidecarConfig) -> Revision:
    """Changes with every setting of a router or agent."""
    return revision_of(msgspec.to_builtins(config))

