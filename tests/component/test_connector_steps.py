"""How far the core has got is in a file for its agent: a turn for each beginning and each end of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from connector_sides import Engine, making

from xpyd_sidecar.contract import core_steps
from xpyd_sidecar.engine.scheduler.step_times import FIRST_S


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    with making(lambda name, **options: Engine(name, tmp_path, **options)) as build:
        yield build


def told(engine: Engine, turns: int) -> core_steps.WrittenSteps:
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        found = core_steps.read(engine.folder, 0)
        if found is not None and found.steps.turns >= turns:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{turns} turns are not told")


def test_each_step_of_the_scheduler_is_two_turns(make: Callable[..., Engine]) -> None:
    engine = make("d")
    before = told(engine, 0).steps.turns
    for _ in range(3):
        engine.step()
    found = told(engine, before + 6)
    assert found.steps.turns == before + 6
    assert found.incarnation == engine.scheduler._incarnation
    assert found.steps.patience_s == FIRST_S, "it may compile yet"
