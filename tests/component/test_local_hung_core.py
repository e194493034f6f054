"""`xpyd up` with real engines: the core of one is stopped under load, its server goes on answering ``/health``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from corpus import mixed
from service import NAME, Service, wait, wait_life
from traffic import Steady, plain_answers

from xpyd_operator.local import store
from xpyd_operator.local.hangs import END_S
from xpyd_operator.local.paths import ServiceFolder, run_folder
from xpyd_sidecar.contract import core_steps

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]
CASES = mixed(24, seed=5)
"""Enough for each of two decode engines to have done more steps than those that compile."""
SLOW_S = 240.0
"""An engine start beside others that serve, on two cores, and how late anybody is on a full machine."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service")) as one:
        one.up(1, 2)
        yield one


async def test_an_engine_whose_core_stands_still_is_restarted_and_its_streams_go_on_elsewhere(service: Service) -> None:
    references = await plain_answers(service.url, CASES)
    victim = next(one["name"] for one in service.status()["instances"] if one["role"] == "decode")
    processes = service.processes()
    core = processes[f"{victim}/core"]
    folder = ServiceFolder(NAME, service.home)
    where = folder, service.admin, victim, SLOW_S
    life = await asyncio.to_thread(wait_life, *where)
    async with Steady(service.url, CASES, references) as steady:
        await steady.wait_total(8)
        settings = store.load(folder.settings, store.Settings)
        assert settings is not None
        told = core_steps.read(run_folder(settings.run_dir, NAME, victim), 0)
        assert told is not None
        patience_s = told.steps.patience_s  # by its longest step, which on a full machine may have compiled for minutes
        began = time.perf_counter()  # the service's clock goes on while this process stands still
        os.kill(core, signal.SIGSTOP)
        try:
            await asyncio.to_thread(wait, lambda: service.processes().get(f"{victim}/core", core) != core,
                                    patience_s + END_S + SLOW_S, "restarted")
            took_s = time.perf_counter() - began
            await asyncio.to_thread(wait_life, *where, life)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(core, signal.SIGCONT)
    print(f"restarted after {took_s:.0f} s, with a patience of {patience_s:.0f} s; {steady.report.total} requests, "
          f"{len(steady.report.failed)} failed")
    assert took_s > END_S, "it was given its time"
    steady.report.check()
    after = service.processes()
    assert {name: pid for name, pid in after.items() if not name.startswith(f"{victim}/")} == {
        name: pid for name, pid in processes.items() if not name.startswith(f"{victim}/")}, "nobody else was restarted"
    said = folder.log.read_text()
    assert f"the engine of {victim} stands still: its core has requests and has not stepped for" in said
    assert f"{core} (T)" in said, "a process that is stopped is named as such"
    assert "most recent call first" in (folder.instance(victim) / "engine.log").read_text(), "the stacks of its server"
    wait(lambda: not service.idle(), 120, "idle")
