"""A running service is upgraded under load, from the release before to this one, and to one that speaks another KV wire.

Where the release before speaks another wire than this one, that is one upgrade; else an artificial next release follows.
The operator goes first, then the engines by a rollout. No request fails, no answer differs from a plain engine's, at each
moment a prefill and a decode serve that can pair, and none of two releases that would refuse each other is ever paired.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import releases
from corpus import Case, mixed, tokens_of
from engines import Engine
from releases import ROOT, Release
from service import NAME, Service, wait
from traffic import References, Steady, plain_answers
from upgrades import Lasting, Watch

from xpyd_operator.local import agents
from xpyd_sidecar.contract import keys

pytestmark = pytest.mark.engines
THIS = Release("this", ROOT)
CASES = mixed(40, seed=11)
LONG = Case("long", tokens_of("lasts", 60), 1900)
SLOW_STEPS = Path(__file__).parents[1] / "support/slow_steps"
STEP_S = "0.04"
"""The long stream lasts 76 s."""
START_S = 240.0


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    with Engine("plain", tmp_path_factory.mktemp("plain"), connector=False) as engine:
        engine.wait_ready()
        return asyncio.run(plain_answers(engine.url, (*CASES, LONG)))


@pytest.fixture(scope="module")
def old() -> Release:
    try:
        return releases.before()
    except releases.Missing as error:
        pytest.skip(str(error))


def of_release(service: Service, release: Release) -> list[str]:
    """Names of the engines and agents whose code is of a release."""
    found = []
    for name, pid in service.processes().items():
        if name.endswith(("/engine", "/agent")):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):  # it has ended since
                continue
            if any(each.startswith(b"PYTHONPATH=") and release.path_for_python.encode() in each for each in environment):
                found.append(name)
    return sorted(found)


def kill_supervisor(service: Service) -> None:
    """kill -9, as when a package is replaced under it; what it looked after serves on."""
    os.kill(service.processes()["supervisor"], signal.SIGKILL)


def rolled(service: Service, release: Release, round_: str, *, killed: bool) -> None:
    """The supervisor of ``release`` takes over, and every engine is replaced; ``killed``: it dies in the middle."""
    began = time.monotonic()
    service.runs(release, SLOW_STEPS, SLOW_STEP_S=STEP_S)
    service.engine_env["ROUND"] = round_
    if killed:
        with service.changing(1, 1):
            wait(lambda: len(service.status()["instances"]) > 2, 240, "an instance of the new revision is made")
            kill_supervisor(service)
    service.up(1, 1)
    there = of_release(service, release)
    assert len(there) == 4, (there, service.processes())
    print(f"to {release.name} in {time.monotonic() - began:.0f} s")


async def test_a_service_is_upgraded_under_load_and_none_are_paired_of_two_kv_wires(
        references: References, old: Release, tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        service.spec = {"drain": {"timeout": "6s"}, "rollout": {"switchWindow": "0s"}}
        service.runs(old, SLOW_STEPS, SLOW_STEP_S=STEP_S)
        await asyncio.to_thread(service.up, 1, 1)
        key = keys.read(service.home / NAME / "key")
        async with (Watch(lambda: agents.fleet("127.0.0.1", service.admin, key), {"prefill": 1, "decode": 1}) as watch,
                    Lasting(service.url, LONG, references[LONG]) as stream,
                    Steady(service.url, CASES, references) as steady):
            assert len(await asyncio.to_thread(of_release, service, old)) == 4
            await steady.wait_total(4)

            await asyncio.to_thread(kill_supervisor, service)
            await asyncio.to_thread(rolled, service, THIS, "2", killed=True)
            await steady.wait_total(steady.report.total + 4)
            if len(set(watch.prints.values())) == 1:  # one wire: the next release has another
                await asyncio.to_thread(kill_supervisor, service)
                await asyncio.to_thread(rolled, service, releases.following("wire"), "3", killed=False)
                await steady.wait_total(steady.report.total + 4)
            await asyncio.to_thread(wait, lambda: len(watch.handed) == 2, 240, "hand-overs of both, each among its own")
            stream.check()
        steady.report.check()
        print(f"{watch.seen} looks, {watch.handed}; {stream.ended} long streams ended")
        watch.check()
        assert len(set(watch.prints.values())) == 2, "one of them speaks another wire, and its fingerprint says so"
        wait(lambda: not service.idle(), 120, "idle")
