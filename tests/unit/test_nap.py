"""Naps of an engine that only waits."""

from __future__ import annotations

import threading
import time

import pytest

from xpyd_sidecar.engine import nap
from xpyd_sidecar.engine.nap import STEPS, Nap


def napping(one: Nap) -> None:
    """Let it come to its first nap."""
    assert not any(one.step(idle=True) for _ in range(STEPS))


def test_many_idle_steps_lead_to_naps_and_work_ends_them() -> None:
    one = Nap()
    napping(one)
    began = time.monotonic()
    assert one.step(idle=True)
    assert time.monotonic() - began >= 0.9 * nap.NAP_S
    assert not one.step(idle=False)
    napping(one)
    assert one.step(idle=True)


def test_who_is_woken_looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nap, "NAP_S", 60.0)
    one = Nap()
    napping(one)
    timer = threading.Timer(0.05, one.wake)
    timer.start()
    began = time.monotonic()
    assert one.step(idle=True)
    assert time.monotonic() - began < 30
    timer.join()


def test_what_came_before_a_nap_is_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nap, "NAP_S", 60.0)
    one = Nap()
    napping(one)
    one.wake()
    began = time.monotonic()
    assert one.step(idle=True)
    assert time.monotonic() - began < 30
