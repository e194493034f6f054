"""Asking the agents and the router of this host, each answer within a deadline."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec

from xpyd_operator.errors import LocalError
from xpyd_sidecar.contract import adapters, assignment
from xpyd_sidecar.contract.adapters import AdapterOrder
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role, State, join_host_port
from xpyd_sidecar.contract.keys import ServiceKey, admin_token
from xpyd_sidecar.contract.launch import AGENT_SOCKET
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.process.whole_answer import read_whole

TIMEOUT_S = 2.0
ANSWER_MAX = 16 << 20


class AgentStatus(msgspec.Struct, frozen=True):
    """``GET /status`` of an agent, as far as it is needed here."""

    state: State
    role: Role
    epoch: int = 1
    drained: bool = False
    waits_for: str = ""
    """Why it is not drained yet."""
    load: Load = Load()
    problem: str = ""
    """What is wrong with the engine, or what it is waiting for."""
    hangs: str = ""
    """Why the engine is to be ended; empty: it lives, as far as its agent knows."""


async def agent_status(run_dir: Path) -> AgentStatus | None:
    """What an agent says; None where none answers."""
    raw = await _ask(run_dir, "GET", "/status")
    try:
        return msgspec.json.decode(raw, type=AgentStatus) if raw is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def drain(run_dir: Path) -> None:
    """Ask an agent to drain; does not wait for the end of it.

    Raises:
        LocalError: no agent answers.
    """
    await _tell(run_dir, "/drain")


async def undrain(run_dir: Path) -> None:
    """Take a drain back.

    Raises:
        LocalError: no agent answers.
    """
    await _tell(run_dir, "/undrain")


async def assign(run_dir: Path, told: Assignment) -> None:
    """Tell an agent its role.

    Raises:
        LocalError: no agent answers, or it knows of a later one.
    """
    await _tell(run_dir, assignment.PATH, assignment.encode(told).encode())


async def order_adapters(run_dir: Path, order: AdapterOrder) -> None:
    """Tell an agent which adapters its engine is to have.

    Raises:
        LocalError: no agent answers, or it cannot keep the order.
    """
    await _tell(run_dir, adapters.PATH, adapters.encode(order))


async def fleet(host: str, port: int, key: ServiceKey) -> Fleet | None:
    """What the router knows; None where none answers, or it is another service's."""
    url = f"http://{join_host_port(host, port)}/fleet"
    headers = {"Authorization": f"Bearer {admin_token(key)}"}
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as answer:
            if answer.status != 200:
                return None
            return msgspec.json.decode(await read_whole(answer.content, ANSWER_MAX), type=Fleet)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _tell(run_dir: Path, path: str, body: bytes | None = None) -> None:
    if await _ask(run_dir, "POST", path, body) is None:
        raise LocalError(f"no agent answers at {run_dir / AGENT_SOCKET}, or it refuses {path}")


async def _ask(run_dir: Path, method: str, path: str, body: bytes | None = None) -> bytes | None:
    socket = run_dir / AGENT_SOCKET
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.UnixConnector(str(socket))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, f"http://agent{path}", data=body) as answer,
        ):
            return await read_whole(answer.content, ANSWER_MAX) if answer.status < 300 else None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
