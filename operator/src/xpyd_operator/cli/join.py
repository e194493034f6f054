"""``xpyd join``: add an engine of this host to a service that runs on another one, by hand."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path
from random import SystemRandom
from typing import Any

from xpyd_operator.api.base import API_VERSION
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.cli.documents import warn
from xpyd_operator.cli.follow import print_answer
from xpyd_operator.cli.interpreter import add_python, check_python
from xpyd_operator.errors import LocalError
from xpyd_operator.local import agents, gpus, lock, ports, store
from xpyd_operator.local.instance import LocalInstance
from xpyd_operator.local.logs import Follower
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.progress import Progress, advance
from xpyd_operator.local.store import InstanceRecord
from xpyd_operator.plan import backoff, names
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.judge import judge
from xpyd_operator.render.process import EngineBinding, ProcessPlace, agent_config, engine_process
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import NAME, HostPort, InstanceName, Role, State, split_host_port

NAME_LIMIT = 63
"""An instance's name is a DNS label."""
POLL_S = 0.5


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "join",
        help="add an engine of this host to a service on another one",
        description="Start an engine and its agent in the foreground and add them to a service whose router runs elsewhere "
        "(`xpyd up --host ADDRESS` there). The key file is that service's `key`, copied here. Ctrl-C drains the engine and "
        "stops it; a second Ctrl-C stops at once. Arguments after -- go to the engine.",
        epilog="Exit codes: 0 ended in good order, 2 an argument or the host is not right.",
    )
    parser.add_argument("--service", required=True, metavar="NAME", help="name of the service")
    parser.add_argument(
        "--router", required=True, action="append", metavar="HOST:30001", help="a router's membership address; repeatable"
    )
    parser.add_argument("--role", required=True, choices=[str(role) for role in Role], help="what the engine does")
    parser.add_argument("--key-file", required=True, metavar="FILE", help="the service's key")
    parser.add_argument("--model", required=True, metavar="PATH_OR_ID", help="a folder or a hub id, as the service has it")
    parser.add_argument("--served-name", metavar="NAME", help="model name of the service (default as in DisaggService)")
    parser.add_argument("--host", metavar="ADDRESS", help="address of this host (default: the one that reaches the router)")
    parser.add_argument("--name", metavar="NAME", help="name of the instance (default: service and host name)")
    add_python(parser)
    parser.add_argument("engine_args", nargs="*", metavar="-- ARG", help="arguments of the vLLM server")


def run(args: argparse.Namespace) -> int:
    """0: ended in good order."""
    routers = tuple(_router(text) for text in args.router)
    service = _service(args)
    key_file = _key_file(args.key_file)
    host = args.host or _own_address(*split_host_port(routers[0]))
    ports.check_address(host)
    name = _name(args.name, service.name)
    folder = ServiceFolder(".joined")
    folder.make()
    settings = store.settings_for(folder, host, args.python)
    check_python(settings.python)
    instance = LocalInstance(folder, settings, name)
    instance.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.hold_lock(folder.path / f"{name}.lock"):
        place = ProcessPlace(settings.python, key_file, str(instance.run_dir), settings.host)
        _write(instance, service, place, Role(args.role), routers)
        asyncio.run(_serve(instance, service))
    (folder.path / f"{name}.lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another joined engine still uses it
        Path(settings.run_dir).rmdir()
    return 0


def _router(text: str) -> HostPort:
    try:
        split_host_port(text)
    except ValueError as error:
        raise LocalError(f"--router: {error}") from None
    return HostPort(text)


def _service(args: argparse.Namespace) -> DisaggService:
    """The document that this engine would come from, so that the same rules hold.

    Raises:
        SpecError: with every refusal.
    """
    path = Path(args.model)
    source = str(path.resolve()) if path.is_dir() else args.model
    model = {"source": source} | ({"servedName": args.served_name} if args.served_name else {})
    document = {
        "apiVersion": API_VERSION,
        "kind": "DisaggService",
        "metadata": {"name": args.service},
        "spec": {"model": model, "engine": {"args": args.engine_args}},
    }
    judgement = judge(document, Target.LOCAL, gpus=gpus.count())
    warn(judgement.warnings)
    return judgement.accepted_service()


def _key_file(text: str) -> str:
    path = Path(text).absolute()
    try:
        keys.read(path)
    except (OSError, ValueError) as error:
        raise LocalError(f"--key-file: {error}") from None
    return str(path)


def _own_address(host: str, port: int) -> str:
    """The address of this host from which the router is reached (connecting a UDP socket sends nothing)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LocalError(f"--router {host}: {error.strerror or error}") from None


def _name(given: str | None, service: str) -> InstanceName:
    name = given or f"{service}-{re.sub('[^a-z0-9-]+', '-', socket.gethostname().lower())}-{os.getpid()}"
    if not NAME.fullmatch(name) or len(name) > NAME_LIMIT:
        raise LocalError(f"--name {name}: write at most {NAME_LIMIT} lower-case letters, digits and '-'")
    if names.ordinal_of(service, name) is not None:  # type: ignore[arg-type]
        raise LocalError(f"--name {name}: names like {service}-e0 belong to `xpyd up`; take another one")
    return InstanceName(name)


def _write(
    instance: LocalInstance, service: DisaggService, place: ProcessPlace, role: Role, routers: tuple[HostPort, ...]
) -> None:
    binding = EngineBinding(instance.name, role, gpus.assign(service.spec.role(role), gpus.count(), []))
    port = ports.choose(place.host, (), SystemRandom())
    process = engine_process(service, place, binding)
    record = InstanceRecord(instance.name, 0, role, Revision(""), process, port, binding.devices)
    instance.write(record, [agent_config(service, place, binding, port, routers)])


async def _serve(instance: LocalInstance, service: DisaggService) -> None:
    """Keep engine and agent running until a signal, then drain and stop them."""
    asked = asyncio.Event()
    at_once = asyncio.Event()

    def on_signal() -> None:
        (at_once if asked.is_set() else asked).set()

    running = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        running.add_signal_handler(number, on_signal)
    try:
        print_answer(f"{instance.name}: starting; log: {instance.engine.log}")
        await instance.start_engine((), SystemRandom())
        await instance.start_agent()
        await _watch(instance, asked)
        print_answer(f"{instance.name}: draining; Ctrl-C again stops at once")
        await _drain(instance, service.spec.drain.timeout_s, at_once)
    finally:
        await instance.remove(now=at_once.is_set())
    print_answer(f"{instance.name}: ended")


async def _watch(instance: LocalInstance, asked: asyncio.Event) -> None:
    follower, progress, said = Follower(instance.engine.log, from_end=True), Progress(), ""
    while not asked.is_set():
        now = time.time()
        for unit in instance.units:
            ends = unit.note_end(now)
            if ends is not None:
                print_answer(f"{instance.name}: {unit.name} ended: {ends.exit} ({ends.crashes} in a row); see {unit.log}")
            seen = unit.observe(now)
            if not seen.alive and now >= backoff.due(seen.crashes, seen.ended, now):
                await (instance.start_engine((), SystemRandom()) if unit is instance.engine else instance.start_agent())
        progress = advance(progress, follower.read())
        status = await agents.agent_status(instance.run_dir)
        state = str(status.state) if status is not None else ""
        if state == State.STARTING:
            state = f"{state}: {progress.phase}"
        if state and state != said:
            said = state
            print_answer(f"{instance.name}: {state}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), POLL_S)


async def _drain(instance: LocalInstance, timeout_s: float, at_once: asyncio.Event) -> None:
    end = time.monotonic() + timeout_s
    try:
        await agents.drain(instance.run_dir)
    except LocalError as error:
        print_answer(f"{instance.name}: {error}; stopping without a drain")
        return
    while time.monotonic() < end and not at_once.is_set():
        status = await agents.agent_status(instance.run_dir)
        if status is None or status.drained:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(at_once.wait(), POLL_S)
    print_answer(f"{instance.name}: stopping without waiting any longer")
