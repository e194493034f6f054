"""`xpyd up` with real engines under verified load: counts change, every process is killed in turn, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from corpus import mixed
from engines import Engine
from service import NAME, Service, wait, wait_life
from traffic import References, Steady, plain_answers, send

from xpyd_operator.local.paths import ServiceFolder

pytestmark = pytest.mark.engines
CASES = mixed(60, seed=3)
SWITCHES = ((2, 2), (1, 3), (2, 2), (3, 1), (2, 2))
"""Each from the one before, beginning at 1P3D."""
VICTIMS = ("router", "decode/agent", "prefill/engine", "decode/core")
"""Each kind of process once; which role an engine has makes no difference to who restarts it."""
if os.environ.get("VICTIMS") == "all":
    VICTIMS = ("router", *(f"{role}/{kind}" for role in ("prefill", "decode") for kind in ("agent", "engine", "core")))
SLOW_S = 240.0
"""An engine start beside others that serve, on two cores."""


def _engines(service: Service) -> dict[str, int]:
    """Process ids of engines and agents by name."""
    return {name: pid for name, pid in service.processes().items() if name.endswith(("/engine", "/agent"))}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    with Engine("plain", tmp_path_factory.mktemp("plain"), connector=False) as engine:
        engine.wait_ready()
        return asyncio.run(plain_answers(engine.url, CASES))


@pytest.fixture(scope="module")
def service(references: References, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service")) as one:
        one.up(1, 1)
        yield one


@pytest.mark.smoke
async def test_counts_change_under_load_without_a_failed_request(service: Service, references: References) -> None:
    """Up, five switches of roles, down and up again; every answer equals the plain engine's.

    A switch starts and ends no engine; an engine that is not wanted drains, and its streams end or move.
    """
    async with Steady(service.url, CASES, references) as steady:
        for number, (prefill, decode) in enumerate(((1, 3), *SWITCHES, (1, 2), (1, 1), (2, 1))):
            before, engines = steady.report.total, _engines(service)
            began = time.monotonic()
            await asyncio.to_thread(service.up, prefill, decode)
            took_s = time.monotonic() - began
            wanted = f"{prefill}P{decode}D"  # one look at a full machine may miss an answer
            await asyncio.to_thread(wait, lambda wanted=wanted: service.ready() == wanted, 120, f"{wanted} as a look says")
            if 1 <= number <= len(SWITCHES):
                assert _engines(service) == engines, "the same engines run"
                print(f"{prefill}P{decode}D by a switch after {took_s:.1f} s")
            await steady.wait_total(before + 1)  # the load goes on meanwhile
    steady.report.check()
    wait(lambda: not service.idle(), 120, "idle")


@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_killed_process_costs_no_wrong_answer_and_comes_back_by_itself(
        service: Service, references: References, victim: str) -> None:
    """kill -9 under load at 2P1D. Requests that the victim held may fail; none may be wrong, and nothing may leak."""
    await asyncio.to_thread(service.up, 2, 1)
    wait(lambda: [one["state"] for one in service.status()["instances"]] == ["ready"] * 3, 240, "three serve, none ends")
    processes = service.processes()
    role, _, kind = victim.partition("/")
    instance = next((one["name"] for one in service.status()["instances"] if one["role"] == role), "")
    name = f"{instance}/{kind}" if instance else role
    old = processes[name]
    where = ServiceFolder(NAME, service.home), service.admin, instance, SLOW_S
    life = await asyncio.to_thread(wait_life, *where) if kind in {"engine", "core"} else ""
    async with Steady(service.url, CASES, references) as steady:
        await asyncio.sleep(2)
        os.kill(old, signal.SIGKILL)
        await asyncio.to_thread(wait, lambda: service.processes().get(name, old) != old, 240, "restarted")
        if life:  # before its agent has looked, it is said to serve as ever
            await asyncio.to_thread(wait_life, *where, life)
        await asyncio.to_thread(wait, lambda: service.ready() == "2P1D", SLOW_S, "2P1D again")
    print(f"{name}: {steady.report.total} requests, {len(steady.report.failed)} failed")
    assert not steady.report.wrong, steady.report.wrong[:3]
    wait(lambda: not service.idle(), 120, "idle")
    after = await send(service.url, CASES, references, at_once=8)
    after.check()
    wait(lambda: not service.idle(), 120, "idle")


def test_engines_serve_on_when_xpyd_is_killed_and_down_leaves_nothing(service: Service, references: References) -> None:
    service.up(2, 1)
    processes = service.processes()
    os.kill(processes["supervisor"], signal.SIGKILL)
    asyncio.run(send(service.url, CASES, references, at_once=8)).check()
    wait(lambda: service.status()["status"]["ready"] == "2P1D", 120, "2P1D, although nobody looks after it")
    status = service.status()
    victim = next(one["name"] for one in status["instances"] if one["role"] == "prefill")
    os.kill(processes[f"{victim}/engine"], signal.SIGKILL)  # nobody restarts it; its core lives on as an orphan
    assert service.xpyd("down", NAME).returncode == 0
    assert service.left() == []
    assert service.left_shared() == []
    assert service.xpyd("down", NAME).returncode == 0
