"""When the step that a core does now hangs, and how its agent hears of steps."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
import pytest

from xpyd_sidecar.contract import core_steps
from xpyd_sidecar.contract.core_steps import CoreSteps, PromptWork, WrittenSteps
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.engine.scheduler import step_recorder
from xpyd_sidecar.engine.scheduler.step_recorder import StepRecorder
from xpyd_sidecar.engine.scheduler.step_times import BASE, FACTOR, FIRST_S, FLOOR_S, KNOWN, MOST_OPEN, WINDOW, StepTimes

I1 = Incarnation("i1")


def stepped(times: StepTimes, count: int, took: float, tokens: int = 8, now: float = 0.0) -> float:
    for _ in range(count):
        times.begins(now, tokens)
        times.ends(now + took)
        now += took
    return now


def test_each_beginning_and_each_end_is_a_turn() -> None:
    times = StepTimes()
    times.begins(0.0, 8)
    assert times.turns == 1
    times.ends(0.1)
    assert times.turns == 2
    times.ends(0.2)
    assert times.turns == 2, "an end without a beginning is none"


def test_the_first_steps_may_compile() -> None:
    times = StepTimes()
    now = stepped(times, KNOWN - 1, 60.0)
    assert times.patience_s == FIRST_S
    stepped(times, 1, 0.01, now=now)
    assert times.patience_s < FIRST_S


def test_what_compiled_is_no_measure_of_later_steps() -> None:
    times = StepTimes()
    now = stepped(times, KNOWN // 2, 60.0)
    stepped(times, KNOWN, 0.05, now=now)
    times.begins(now + 10.0, 8)
    assert times.patience_s == FLOOR_S


def test_a_step_of_many_tokens_has_longer_by_what_tokens_took() -> None:
    times = StepTimes()
    now = stepped(times, 2 * KNOWN, 2.0, tokens=BASE)
    assert times.patience_s == FLOOR_S, "nothing is under way"
    times.begins(now, 31 * BASE)
    assert times.patience_s == pytest.approx(FACTOR * 2.0 / (2 * BASE) * 32 * BASE)
    times.begins(now, 8)
    assert times.patience_s > 2 * FLOOR_S, "the longer one of those under way"


def test_a_step_that_began_while_another_was_under_way_takes_from_its_end() -> None:
    times, now = StepTimes(), 0.0
    times.begins(now, 8)
    for _ in range(3 * KNOWN):  # two are always under way, each of a second
        times.begins(now, 8)
        now += 1.0
        times.ends(now)
    assert times.patience_s == FLOOR_S
    assert times._worst == pytest.approx(1.0 / (8 + BASE)), "not two seconds"


def test_a_slow_step_of_long_ago_is_forgotten() -> None:
    times = StepTimes()
    now = stepped(times, KNOWN, 0.01)
    now = stepped(times, 1, 100.0, now=now)
    times.begins(now, 8)
    assert times.patience_s == pytest.approx(400.0)
    times.ends(now + 0.01)
    now = stepped(times, 2 * WINDOW, 0.01, now=now + 0.01)
    times.begins(now, 8)
    assert times.patience_s == FLOOR_S


def test_a_gap_without_requests_is_no_step() -> None:
    times = StepTimes()
    now = stepped(times, KNOWN, 0.01)
    stepped(times, KNOWN, 0.01, now=now + 3600.0)
    assert times.patience_s == FLOOR_S


def test_steps_whose_ends_nobody_tells_are_bounded() -> None:
    times = StepTimes()
    for i in range(100):
        times.begins(float(i), 8)
    assert (times.turns, len(times._open)) == (100, MOST_OPEN)


def test_what_ranks_say_is_added_and_who_says_nothing_makes_it_unknown() -> None:
    one, two = (WrittenSteps(I1, CoreSteps(turns, patience)) for turns, patience in ((5, 20.0), (7, 90.0)))
    assert core_steps.sum_steps([one, two], I1, 2) == CoreSteps(12, 90.0)
    assert core_steps.sum_steps([one], I1, 2) is None
    assert core_steps.sum_steps([one, two], Incarnation("another"), 2) is None
    assert core_steps.sum_steps([], I1, 0) is None
    assert core_steps.sum_prompts([one, two], I1, 2) is None, "of an engine that does not tell"
    told = [msgspec.structs.replace(each, prompts=PromptWork(3, 40)) for each in (one, two)]
    assert core_steps.sum_prompts(told, I1, 2) == PromptWork(6, 80)
    assert core_steps.sum_prompts(told, Incarnation("another"), 2) is None


def wait_for(path: Path, turns: int) -> WrittenSteps:
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        found = core_steps.read(path, 0)
        if found is not None and found.steps.turns == turns:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{turns} turns are not told")


def test_the_recorder_tells_what_the_core_has_done_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "EVERY_S", 0.02)
    recorder = StepRecorder(tmp_path, 0, I1)
    recorder.start()
    try:
        assert wait_for(tmp_path, 0) == WrittenSteps(I1, CoreSteps(0, FIRST_S), PromptWork())
        recorder.begins(8)
        wait_for(tmp_path, 1)
        recorder.ends()
        wait_for(tmp_path, 2)
    finally:
        recorder.stop()
    assert not recorder._thread.is_alive()


def test_without_an_agent_nothing_is_written_and_stopping_is_no_matter(tmp_path: Path) -> None:
    recorder = StepRecorder(None, 0, I1)
    recorder.start()
    recorder.begins(8)
    recorder.ends()
    recorder.stop()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_not_left_to_read_as_a_core_that_stands_still(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(step_recorder, "EVERY_S", 0.02)
    recorder = StepRecorder(tmp_path, 0, I1)
    recorder.start()
    try:
        wait_for(tmp_path, 0)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
            broken.setattr(core_steps, "write", full)
            recorder.begins(8)
            end = time.monotonic() + 30.0
            while core_steps.path_of(tmp_path, 0).exists():
                assert time.monotonic() < end
                time.sleep(0.01)
        assert caplog.text.count("cannot be written") == 1
        wait_for(tmp_path, 1)
    finally:
        recorder.stop()


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    assert core_steps.read(tmp_path, 0) is None
    for raw in (b"", b"{}", b'{"incarnation":"i","steps":{"turns":-1,"patience_s":1}}',
                b'{"incarnation":"i","steps":{"turns":1,"patience_s":0}}'):
        core_steps.path_of(tmp_path, 0).write_bytes(raw)
        with pytest.raises(ValueError, match=r"steps-0\.json"):
            core_steps.read(tmp_path, 0)
