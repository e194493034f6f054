"""``python -m xpyd_sidecar --config FILE``: runs the router, the agent or both in one process; ``--version`` says which
version this is, and whether its compiled parts are in use.

The configuration is JSON of ``contract.launch.SidecarConfig``. SIGTERM and SIGINT end the process in order; so does a
router or an agent that fails.

Exit code: 0 ended by a signal; 1 the router or the agent failed; 2 the configuration or the key is wrong, or a port is
taken (one line on stderr names the field).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import uvloop

from xpyd_sidecar import __version__
from xpyd_sidecar import config as configuration
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.errors import ConfigError, SidecarError
from xpyd_sidecar.process import logs
from xpyd_sidecar.process.beside import Draining

logger = logging.getLogger("xpyd_sidecar")

HALVES = {"router": ("xpyd_sidecar.router.app", "run_router"), "agent": ("xpyd_sidecar.agent.app", "run_agent")}
"""Where each half is; imported only where it runs, so that an agent alone stays small."""

Half = Callable[[SidecarConfig, keys.ServiceKey, asyncio.Event, Draining], Awaitable[None]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: those of the process); returns its exit code.

    Raises:
        SystemExit: an argument is wrong.
    """
    parser = argparse.ArgumentParser(prog="xpyd_sidecar", description="Run the router and/or the agent of xpyd.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="JSON of SidecarConfig; - reads standard input")
    source.add_argument("--config-json", metavar="TEXT", help="the same, given directly")
    source.add_argument("--version", action="store_true", help="say the version, and whether compiled parts are in use")
    args = parser.parse_args(argv)
    if args.version:
        parts = importlib.import_module("xpyd_sidecar.process.parts")  # loads half of the router
        print(f"xpyd-sidecar {__version__} ({parts.describe()})")
        return 0
    where = "--config-json" if args.config is None else f"--config {args.config}"
    try:
        config = configuration.decode(args.config_json if args.config is None else _read(args.config))
        key = _key(config)
    except ConfigError as error:
        sys.stderr.write(f"xpyd_sidecar: {where}: {error}\n")
        return 2
    logs.configure(config.log_level, config.log_format, service=config.service, instance=config.instance)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(config, key))
    except KeyboardInterrupt:
        return 0


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None


def _key(config: SidecarConfig) -> keys.ServiceKey:
    try:
        return keys.read(Path(config.key_file))
    except OSError as error:
        raise ConfigError(f"{config.key_file} cannot be read: {error.strerror} - at `$.key_file`") from None
    except ValueError as error:
        raise ConfigError(f"{error} - at `$.key_file`") from None


async def _run(config: SidecarConfig, key: keys.ServiceKey) -> int:
    """Run the router, the agent or both until a signal comes or one of them ends; returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    draining = Draining()
    names = [name for name in HALVES if getattr(config, name) is not None]
    tasks = {asyncio.ensure_future(_half(name)(config, key, stop, draining)): name for name in names}
    code = 0
    while tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            code = max(code, _outcome(tasks.pop(task), task, stop))
        stop.set()
    return code


def _half(name: str) -> Half:
    module, function = HALVES[name]
    half: Half = getattr(importlib.import_module(module), function)
    return half


def _outcome(name: str, task: asyncio.Future[None], stop: asyncio.Event) -> int:
    """The exit code for a router or agent (``name``) whose task has ended; logs why it failed."""
    error = task.exception()
    if error is None:
        if stop.is_set():
            return 0
        logger.error("the %s ended without being asked to", name)
        return 1
    if isinstance(error, ConfigError):
        logger.error("%s: %s", name, error)
        return 2
    if isinstance(error, SidecarError):
        logger.error("%s: %s", name, error)
    else:
        logger.error("the %s failed", name, exc_info=error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
