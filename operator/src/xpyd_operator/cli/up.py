"""``xpyd up``: run a service as processes of this host, or change the one that runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from xpyd_operator.api.durations import seconds
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Folder
from xpyd_operator.cli.documents import load_service
from xpyd_operator.cli.follow import Show, WaitFailed, print_answer, wait_for
from xpyd_operator.cli.interpreter import add_python, check_python
from xpyd_operator.cli.supervise import Supervisor
from xpyd_operator.errors import LocalError
from xpyd_operator.local import gpus, lock, ports, store
from xpyd_operator.local.paths import ServiceFolder, make_private
from xpyd_operator.local.router import LocalRouter
from xpyd_operator.local.store import Settings, StopRequest
from xpyd_operator.local.view import Snapshot, Viewer

SUPERVISOR_S = 60.0
"""For the supervisor to start: an interpreter and its imports, on a host that may be busy loading models."""
SETTLING_S = 1.2
"""A changed document counts as carried out when nothing has been going on for so long."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "up",
        help="run a service as processes of this host, or change the one that runs",
        description="Run a service as processes of this host, in the foreground (Ctrl-C, SIGTERM or SIGHUP drains and "
        "stops it; a second one stops at once). If it runs already, hand it the changed document and wait until it is as "
        "that says.",
        epilog="Exit codes: 0 ready (or ended in good order), 1 not ready in time or in a crash loop, 2 the document or "
        "the host is not right.",
    )
    parser.add_argument("-f", "--file", required=True, metavar="FILE", help="a DisaggService; - is standard input")
    parser.add_argument("-d", "--detach", action="store_true", help="return once it is ready; it goes on in the background")
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help="address of this host for clients and, unless 0.0.0.0 or ::, for engines joined from other hosts "
        "(default 127.0.0.1)",
    )
    add_python(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="deadline (default: spec.engine.startupTimeout)")


def run(args: argparse.Namespace) -> int:
    """See the epilog."""
    service = load_service(args.file, Target.LOCAL, gpus=gpus.count())
    _check_model(service)
    if args.timeout is not None and not args.timeout > 0:
        raise LocalError(f"--timeout {args.timeout:g}: write seconds above 0")
    timeout_s = args.timeout if args.timeout is not None else seconds(service.spec.engine.startup_timeout)
    folder = ServiceFolder(service.name)
    folder.make()
    running = lock.holder(folder.lock)
    settings = _settings(folder, args.host, args.python, running=bool(running))
    check_python(settings.python)
    _check_ports(folder, service, settings)
    store.service_key(folder)
    make_private(Path(settings.run_dir))
    store.save(folder.settings, settings)
    if running:
        if folder.stop.exists():
            raise LocalError(f"{service.name} is being stopped; wait for `xpyd down` to end")
        store.save_desired(folder, service)
        return asyncio.run(_change(folder, timeout_s))
    folder.stop.unlink(missing_ok=True)
    store.save_desired(folder, service)
    if args.detach:
        return _detach(folder, timeout_s)
    return asyncio.run(_foreground(folder, timeout_s))


def _check_model(service: DisaggService) -> None:
    origin = service.spec.model.origin
    if isinstance(origin, Folder) and not Path(origin.path).is_dir():
        raise LocalError(f"spec.model.source: there is no folder {origin.path}")


def _settings(folder: ServiceFolder, host: str | None, python: str | None, *, running: bool) -> Settings:
    before = store.load(folder.settings, Settings)
    if running and before is not None:
        if host is not None and host != before.listen:
            raise LocalError(f"--host {host}: {folder.service} runs at {before.listen}; `xpyd down` first")
        if python is not None and python != before.python:
            raise LocalError(f"--python {python}: {folder.service} runs with {before.python}; `xpyd down` first")
        return before
    listen = host or (before.listen if before is not None else "127.0.0.1")
    ports.check_address(listen)
    fresh = store.settings_for(folder, listen, python)
    if before is None:
        return fresh
    if before.host != fresh.host and any(folder.instances.iterdir()):
        raise LocalError(f"--host {host}: engines run at {before.host}; `xpyd down` first")
    return msgspec.structs.replace(fresh, run_dir=before.run_dir)


def _check_ports(folder: ServiceFolder, service: DisaggService, settings: Settings) -> None:
    """The router's ports must be free, unless our own router has them."""
    router = LocalRouter(folder, settings)
    config = router.config() if router.unit.alive() else None
    ours: set[int | None] = set()
    if config is not None and config.router is not None:
        ours = {config.router.port, config.router.members_port, router.admin_port()}
    wanted = service.spec.router.ports
    for name, port in (("http", wanted.http), ("members", wanted.members), ("admin", wanted.admin_or_default)):
        if port not in ours:
            ports.require_free(settings.listen, port, f"spec.router.ports.{name}")


async def _change(folder: ServiceFolder, timeout_s: float) -> int:
    """Wait until what runs is as the document says."""
    try:
        with Show() as show:
            snapshot = await wait_for(Viewer(folder), show, _Still(), timeout_s, what="as the document says")
    except WaitFailed as error:
        return _failed(folder, error)
    _announce(snapshot, print_answer)
    return 0


def _detach(folder: ServiceFolder, timeout_s: float) -> int:
    command = [sys.executable, "-m", "xpyd_operator.cli.supervise", folder.service]
    with open(folder.log, "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
        )
    end = time.monotonic() + SUPERVISOR_S
    while not lock.holder(folder.lock):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise LocalError(f"the supervisor did not start; see {folder.log}")
        time.sleep(0.05)
    return asyncio.run(_change(folder, timeout_s))


async def _foreground(folder: ServiceFolder, timeout_s: float) -> int:
    logging.basicConfig(
        filename=folder.log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    with Show() as show:

        def on_signal(request: StopRequest) -> None:
            show.print_line("stopping at once" if request.now else "draining and stopping; Ctrl-C again stops at once")

        supervisor = Supervisor(folder, on_signal)
        work = asyncio.create_task(supervisor.run())
        watch = asyncio.create_task(_watch(folder, show, timeout_s))
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            failure = watch.exception() if watch.done() and not watch.cancelled() else None
            if failure is not None and not work.done():
                show.print_line(f"xpyd: {failure}")
                supervisor.ask_end()
            await work
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
    if isinstance(failure, WaitFailed):
        return 1
    if failure is not None:
        raise failure
    show.answer(f"{folder.service} has ended")
    return 0


async def _watch(folder: ServiceFolder, show: Show, timeout_s: float) -> None:
    """Say when it is ready; afterwards show what changes, until cancelled.

    Raises:
        WaitFailed: it does not get ready.
    """
    viewer = Viewer(folder)
    await asyncio.sleep(0.2)
    snapshot = await wait_for(viewer, show, lambda seen: seen.ready or seen.stopping, timeout_s, what="ready")
    if snapshot.ready:
        _announce(snapshot, show.answer)
    while True:
        with contextlib.suppress(LocalError):
            show.update(await viewer.take_snapshot(time.time()))
        await asyncio.sleep(1.0)


class _Still:
    """Settled, and that for a while: the supervisor has seen the document by then."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, snapshot: Snapshot) -> bool:
        now = time.monotonic()
        if not snapshot.settled:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= SETTLING_S


def _announce(snapshot: Snapshot, say: Callable[[str], None]) -> None:
    say(f"{snapshot.service} is ready: {snapshot.status.ready}, model {snapshot.model}")
    say(f"{snapshot.url}/v1")


def _failed(folder: ServiceFolder, error: WaitFailed) -> int:
    sys.stderr.write(f"xpyd: {error}\nxpyd: it goes on trying; `xpyd down {folder.service}` ends it\n")
    return 1
