"""How long engines of campaigns may take (``patience``): by the clock, less what a full machine has kept them waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import patience
import pytest
from patience import MOST_S, Patience
from processes import kept_waiting_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``now``, and what the engine has waited and computed so far."""
    made = SimpleNamespace(now=50.0, kept=7.0, computed=1.0)
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(patience, "kept_waiting_s", lambda pids: made.kept)
    monkeypatch.setattr(patience, "processor_s", lambda pids: made.computed)
    return made


def of_an_engine(seconds: float) -> Patience:
    engine: Any = SimpleNamespace(group=SimpleNamespace(pids=lambda: [1]))
    return Patience(engine, seconds)


def test_an_engine_that_waits_for_something_else_has_its_seconds(clock: SimpleNamespace) -> None:
    one = of_an_engine(90.0)
    clock.now += 90.0
    assert not one.over()
    clock.now += 0.1
    assert one.over()


def test_what_it_was_kept_waiting_for_a_processor_does_not_count(clock: SimpleNamespace) -> None:
    one = of_an_engine(90.0)
    clock.now, clock.kept, clock.computed = clock.now + 300, clock.kept + 250, clock.computed + 12
    assert not one.over()
    assert one.told() == "300 s, of which it computed for 12 s and was kept waiting for 250 s"
    clock.now += 41
    assert one.over()


def test_however_full_the_machine_is_there_is_an_end(clock: SimpleNamespace) -> None:
    one = of_an_engine(90.0)
    clock.now, clock.kept = clock.now + MOST_S + 1, clock.kept + MOST_S
    assert one.over()


def test_who_is_ready_to_run_and_does_not_is_kept_waiting_and_who_sleeps_is_not() -> None:
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    sleeps = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        began = time.monotonic()
        while kept_waiting_s(one.pid for one in busy) < 0.3:
            assert time.monotonic() - began < 30.0
            time.sleep(0.05)
        assert kept_waiting_s([sleeps.pid]) < kept_waiting_s(one.pid for one in busy)
    finally:
        for one in (*busy, sleeps):
            one.kill()
            one.wait()
