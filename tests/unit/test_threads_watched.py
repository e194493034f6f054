"""Threads whose death ends the engine: words are left, faults in a row are counted."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from xpyd_sidecar.threads import termination_log, watched
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.threads.watched import FAULTS_MAX, Faults, ThreadEnded, WatchedThread


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setattr(termination_log, "TERMINATION_LOG", path)
    monkeypatch.setattr(watched, "PAUSE_S", 0.0)
    return path


def run(body: object) -> WatchedThread:
    thread = WatchedThread("xpyd-one", body)  # type: ignore[arg-type]
    thread.start()
    assert thread.end(5)
    return thread


def test_a_thread_that_ends_as_it_should_leaves_no_words(log: Path) -> None:
    thread = run(lambda: None)
    watched.check(thread, None)
    assert (thread.words, log.read_text()) == ("", "")


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3)])
def test_a_thread_that_dies_leaves_its_words_and_whoever_looks_raises(error: BaseException, log: Path,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        raise error

    words = f"thread xpyd-one ended: {termination_log.innermost(error)}"
    thread = run(body)
    for _ in range(2):
        with pytest.raises(ThreadEnded, match=words.replace("'", ".")) as raised:
            watched.check(None, run(lambda: None), thread)
        assert raised.value.__cause__ is None, "what is left of an exception is its innermost, which has to name the thread"
    assert log.read_text() == words
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


def test_a_thread_that_does_not_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    thread = WatchedThread("xpyd-slow", lambda: go_on.wait(10) and None)
    assert thread.end(0), "it has never begun"
    thread.start()
    assert not thread.end(0.01)
    assert "thread xpyd-slow did not end within 0.01 s" in caplog.text
    go_on.set()
    assert thread.end(5)


def test_faults_are_borne_until_too_many_come_in_a_row(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("x")

    faults = Faults("its look")
    for _ in range(3):
        for _ in range(FAULTS_MAX - 1):
            assert faults.try_once(fails) is None
        assert faults.try_once(lambda: 7) == 7
    assert len([one for one in caplog.records if one.name.startswith("xpyd_")]) == 3 * (FAULTS_MAX - 1)
    for _ in range(FAULTS_MAX - 1):
        faults.try_once(fails)
    with pytest.raises(ValueError, match="x"):
        faults.try_once(fails)


def test_a_loop_whose_look_at_deadlines_always_fails_dies_closes_what_it_has_and_takes_nothing_more(log: Path) -> None:
    closed, late = threading.Event(), threading.Event()

    def tick(now: float) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    loop = Loop("xpyd-one", tick)
    loop.at_end(closed.set)
    loop.start()
    assert closed.wait(10)
    loop.thread.join(5)
    with pytest.raises(ThreadEnded, match="thread xpyd-one ended: RuntimeError: CUDA error: an illegal memory access"):
        watched.check(loop.thread)
    loop.post(late.set)
    loop.stop()
    assert not late.is_set()
