"""What an engine's cache holds is written for the agent by a thread of its own, and never while it is not known."""

from __future__ import annotations

import logging
import time
from collections.abc import KeysView
from pathlib import Path

import pytest

from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.contract.prefix_cuts import WHOLE, PromptCut
from xpyd_sidecar.engine.scheduler import prefix_recorder
from xpyd_sidecar.engine.scheduler.prefix_ledger import PrefixLedger
from xpyd_sidecar.engine.scheduler.prefix_recorder import PrefixRecorder
from xpyd_sidecar.kv.reach import CacheGroup, Reach

I1 = Incarnation("a1")
KEY = 7
HELD = HeldPrefixes(frozenset({KEY}), frozenset())


def ledger() -> PrefixLedger:
    """Of blocks of 16 tokens, with one prompt of 64 that is wholly named."""
    found = PrefixLedger({0: CacheGroup(Reach("all", 16), 16)}, 16, lambda block, _: block)
    found.add("r", [PromptCut(WHOLE, KEY)], 64, [b"a", b"b", b"c"])
    return found


def told(folder: Path) -> HeldPrefixes | None:
    found = held_prefixes.read(folder, 0)
    return None if found is None else found[1]


def wait(folder: Path, wanted: HeldPrefixes | None) -> None:
    end = time.monotonic() + 60.0
    while told(folder) != wanted:
        assert time.monotonic() < end, told(folder)
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_recorder, "EVERY_S", 0.01)


def test_what_the_cache_gets_and_loses_is_written(tmp_path: Path) -> None:
    cached = {b"a": 1, b"b": 2, b"c": 3}
    recorder = PrefixRecorder(tmp_path, 0, I1, ledger(), cached.keys)
    recorder.start()
    try:
        wait(tmp_path, HeldPrefixes(frozenset({KEY}), frozenset()))
        cached.clear()
        wait(tmp_path, HeldPrefixes(frozenset(), frozenset({KEY})))
    finally:
        recorder.stop()
    cached.update({b"a": 1, b"b": 2, b"c": 3})
    time.sleep(0.05)
    assert told(tmp_path) == HeldPrefixes(frozenset(), frozenset({KEY})), "a recorder that was stopped writes no more"


def test_a_look_that_fails_withdraws_what_was_told_until_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached, broken = {b"c": 3}, False

    def keys() -> KeysView[bytes]:
        if broken:
            raise RuntimeError("dictionary changed size during iteration")
        return cached.keys()

    recorder = PrefixRecorder(tmp_path, 0, I1, ledger(), keys)
    recorder.start()
    try:
        wait(tmp_path, HELD)
        with caplog.at_level(logging.WARNING):
            broken = True
            wait(tmp_path, HeldPrefixes())
            time.sleep(0.1)
        broken = False
        wait(tmp_path, HELD)
    finally:
        recorder.stop()
    assert caplog.text.count("cannot be told") == 1, "once"


def test_what_cannot_be_written_is_withdrawn_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {b"c": 3}
    recorder = PrefixRecorder(tmp_path, 0, I1, ledger(), cached.keys)
    recorder.record()
    with monkeypatch.context() as patch:
        patch.setattr(held_prefixes, "write", refuse)
        recorder.record()
        assert told(tmp_path) == HELD, "nothing has changed, so nothing is written"
        cached.clear()
        recorder.record()
        assert told(tmp_path) is None, "nor can it be withdrawn"
    recorder.record()
    assert told(tmp_path) == HeldPrefixes(frozenset(), frozenset({KEY}))


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")
