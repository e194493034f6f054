"""``xpyd down``: drain and stop a service, and leave nothing behind."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
import time
from typing import Any

from xpyd_operator.cli.choose import add_name, choose
from xpyd_operator.cli.follow import Show, print_answer
from xpyd_operator.cli.supervise import Supervisor
from xpyd_operator.errors import LocalError, NotFound, XpydError
from xpyd_operator.local import lock, procs, remains, store
from xpyd_operator.local.paths import ServiceFolder, matching, services
from xpyd_operator.local.store import StopRequest
from xpyd_operator.local.view import Viewer

AT_ONCE_S = 90.0
"""How long a supervisor may take to kill everything, before it is killed itself and its work done here."""
MARGIN_S = 90.0
"""On top of the drain timeout."""
POLL_S = 0.5


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "down",
        help="drain and stop a service of this host",
        epilog="Exit codes: 0 nothing of it runs any more (or nothing ran), 2 something could not be ended.",
    )
    add_name(parser)
    parser.add_argument("--now", action="store_true", help="do not drain: kill at once")
    parser.add_argument("--purge", action="store_true", help="remove document, key and logs too")


def run(args: argparse.Namespace) -> int:
    """0: nothing runs any more."""
    try:
        folder = choose(args.name)
    except NotFound:
        if args.name is None and len(services()) > 1:
            raise
        if args.name is not None and remains.pids(lost := ServiceFolder(args.name)):
            asyncio.run(remains.end(lost))
            print_answer(f"{args.name} has ended; its folder was gone, so temporary files may be left")
            return 0
        print_answer(f"nothing of {args.name} runs" if args.name else "nothing runs")
        return 0
    ran = asyncio.run(_down(folder, now=args.now))
    left = remains.pids(folder)
    if left:
        raise LocalError(f"processes {', '.join(map(str, left))} are left")
    if args.purge:
        shutil.rmtree(folder.path, ignore_errors=True)
    print_answer(f"{folder.service} has ended" if ran else f"nothing of {folder.service} runs")
    return 0


async def _down(folder: ServiceFolder, *, now: bool) -> bool:
    """End it; whether anything ran."""
    supervisor = lock.holder(folder.lock)
    if not supervisor and not remains.pids(folder) and not matching(folder.instances, "*"):
        folder.stop.unlink(missing_ok=True)
        return False
    before = store.load(folder.stop, StopRequest)
    store.save(folder.stop, StopRequest(now=now or (before is not None and before.now)))
    with Show() as show:
        if supervisor and await _wait_supervisor(folder, show, AT_ONCE_S if now else _drain_s(folder) + MARGIN_S):
            return True
        holder = lock.holder(folder.lock)
        if holder > 0:
            identity = procs.identify(holder)
            show.print_line(f"the supervisor (pid {holder}) does not end; killing it")
            if identity is not None:
                procs.send(identity.pid, identity.start, signal.SIGKILL)
            store.save(folder.stop, StopRequest(now=True))
            await asyncio.sleep(POLL_S)
        await _end_here(folder, show)
    return True


def _drain_s(folder: ServiceFolder) -> float:
    try:
        return store.load_desired(folder).spec.drain.timeout_s
    except XpydError:
        return 0.0


async def _wait_supervisor(folder: ServiceFolder, show: Show, timeout_s: float) -> bool:
    """Whether the supervisor has ended the service, and itself, in time."""
    end = time.monotonic() + timeout_s
    while lock.holder(folder.lock):
        if time.monotonic() >= end:
            return False
        try:
            show.update(await Viewer(folder).take_snapshot(time.time()))
        except XpydError as error:
            logging.getLogger(__name__).debug("no view: %s", error)
        await asyncio.sleep(POLL_S)
    return not folder.stop.exists()


async def _end_here(folder: ServiceFolder, show: Show) -> None:
    """Without a supervisor: the same loop in this process; with damaged files, by the marks of processes alone."""
    logging.basicConfig(filename=folder.log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        store.load_desired(folder)
        supervisor = Supervisor(folder)
    except XpydError as error:
        show.print_line(f"{error}; ending every process of the service")
        await remains.end(folder)
        shutil.rmtree(folder.instances, ignore_errors=True)
        folder.stop.unlink(missing_ok=True)
        return
    work = asyncio.create_task(supervisor.run())
    viewer = Viewer(folder)
    while not work.done():
        show.update(await viewer.take_snapshot(time.time()))
        await asyncio.wait([work], timeout=POLL_S)
    work.result()
