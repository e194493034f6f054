"""Naps of an engine that only waits."""

from __future__ import annotations

import threading
import time

import pytest

from xpyd_sidecar.threads import idle_polling
from xpyd_sidecar.threads.idle_polling import IdlePolling, Inbox


def napping(one: IdlePolling) -> None:
    """Let it come to its first nap."""
    assert not one.step(idle=True, loading=False, sending=False)


def test_many_idle_steps_lead_to_naps_and_work_ends_them() -> None:
    one = IdlePolling()
    napping(one)
    began = time.monotonic()
    assert one.step(idle=True, loading=False, sending=False)
    assert time.monotonic() - began >= 0.9 * idle_polling.NAP_S
    assert not one.step(idle=False, loading=False, sending=False)
    napping(one)
    assert one.step(idle=True, loading=False, sending=False)


def test_who_is_woken_looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_polling, "NAP_S", 60.0)
    one = IdlePolling()
    napping(one)
    timer = threading.Timer(0.05, one.wake)
    timer.start()
    began = time.monotonic()
    assert one.step(idle=True, loading=False, sending=False)
    assert time.monotonic() - began < 30
    timer.join()


def test_what_came_before_a_nap_is_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_polling, "NAP_S", 60.0)
    one = IdlePolling()
    napping(one)
    one.wake()
    began = time.monotonic()
    assert one.step(idle=True, loading=False, sending=False)
    assert time.monotonic() - began < 30


def test_while_blocks_come_the_worker_waits_and_not_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_polling, "NAP_S", 60.0)
    one = IdlePolling()
    napping(one)
    began = time.monotonic()
    assert one.step(idle=True, loading=True, sending=False)
    assert time.monotonic() - began < 30


def test_copies_that_wait_to_leave_keep_an_engine_awake_for_a_moment_and_then_naps_are_short() -> None:
    """A peer that is stopped holds them for the length of a lease: no time to spend a processor on."""
    one = IdlePolling()
    began = time.monotonic()
    while not one.step(idle=True, loading=False, sending=True):
        assert time.monotonic() - began < 30
    awake = time.monotonic() - began
    assert awake >= idle_polling.SENDING_S
    began = time.monotonic()
    assert one.step(idle=True, loading=False, sending=True)
    assert 0.9 * idle_polling.SENDING_NAP_S <= time.monotonic() - began < 30
    assert not one.step(idle=False, loading=False, sending=True)
    assert not one.step(idle=True, loading=False, sending=True), "what came is over: a moment again"


def test_an_inbox_ends_a_nap_with_what_comes() -> None:
    inbox: Inbox[int] = Inbox()
    timer = threading.Timer(0.05, inbox.append, [7])
    timer.start()
    began = time.monotonic()
    inbox.nap(60.0)
    assert time.monotonic() - began < 30
    assert list(inbox) == [7]
    timer.join()


def test_an_empty_inbox_is_waited_for_no_longer_than_is_said() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.append(1)
    inbox.popleft()
    inbox.nap(60.0)  # what was told before
    began = time.monotonic()
    inbox.nap(0.02)
    assert 0.018 <= time.monotonic() - began < 30
