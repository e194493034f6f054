"""Parking and waking, and fences, on this processor and on those that need a library for it."""

from __future__ import annotations

import threading
import time

import pytest

from xpyd_sidecar.broadcast.futex import Fences, Futex
from xpyd_sidecar.broadcast.segment import Segment
from xpyd_sidecar.errors import ConfigError


def test_a_wait_ends_when_it_is_woken_when_the_word_differs_and_when_its_time_is_over() -> None:
    segment = Segment.create("test", 4096)
    words = segment.words(8)
    sleeper = Futex(segment.address())
    began = time.monotonic()
    sleeper.wait(3, 1, 30.0)  # the word is 0
    assert time.monotonic() - began < 10
    began = time.monotonic()
    sleeper.wait(3, 0, 0.2)
    assert 0.15 < time.monotonic() - began < 10
    woken = threading.Event()

    def sleep() -> None:
        while words[3] == 0:
            Futex(segment.address()).wait(3, 0, 10.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    time.sleep(0.1)
    words[3] = 7
    sleeper.wake(3)
    assert woken.wait(20)
    thread.join()


def test_processors_without_a_known_call_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="aarch64 and x86_64, not on riscv64"):
        Futex(0, "riscv64")


def test_a_weakly_ordered_processor_needs_a_fence_from_libatomic_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fences = Fences("aarch64")
    assert fences.order is not None
    fences.full()
    monkeypatch.setattr("ctypes.util.find_library", lambda _: "libnone.so.9")
    with pytest.raises(ConfigError, match="libatomic1"):
        Fences("aarch64")


def test_on_x86_only_the_full_fence_is_needed() -> None:
    fences = Fences("x86_64")
    assert fences.order is None
    fences.full()
