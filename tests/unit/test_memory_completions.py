"""One thread waits for copies, in order; what fails there is told, and it ends when told."""

from __future__ import annotations

import threading
import time

import pytest
from running_threads import until_none_runs

from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.marks import NOW
from xpyd_sidecar.threads import watched
from xpyd_sidecar.threads.watched import ThreadEnded


class Scripted:
    """Passes when told to, or fails."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self, seconds: float) -> bool:
        if self.error is not None:
            raise self.error
        return self.passed.wait(min(seconds, 0.01))


def until(condition: object) -> None:
    end = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_is_complete_is_told_at_once_and_needs_no_thread() -> None:
    completions, told = Completions(), list[int]()
    completions.add(NOW, lambda: told.append(threading.get_ident()))
    assert told == [threading.get_ident()]
    assert completions.thread.ident is None, "none has begun"
    completions.stop()


def test_marks_are_told_in_their_order_on_the_thread() -> None:
    completions, told = Completions(), list[str]()
    first, second = Scripted(), Scripted()
    completions.add(first, lambda: told.append("first"))
    completions.add(second, lambda: told.append("second"))
    second.passed.set()
    completions.add(NOW, lambda: told.append("third"))
    time.sleep(0.05)
    assert told == []
    first.passed.set()
    until(lambda: len(told) == 3)
    assert told == ["first", "second", "third"]
    completions.stop()


def test_a_call_that_fails_keeps_nobody_else_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    completions, told, mark = Completions(), list[str](), Scripted()

    def fails() -> None:
        raise ValueError("planted")

    completions.add(mark, fails)
    completions.add(mark, lambda: told.append("next"))
    mark.passed.set()
    until(lambda: told)
    assert "planted" in caplog.text
    completions.stop()


def test_a_device_that_fails_ends_the_thread_with_its_words() -> None:
    completions, mark = Completions(), Scripted()
    mark.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    completions.add(mark, lambda: pytest.fail("told of a copy that has failed"))
    until(lambda: completions.thread.words)
    with pytest.raises(ThreadEnded, match="thread xpyd-copies ended: RuntimeError: CUDA error: an illegal memory access"):
        watched.check(completions.thread)
    completions.stop()


def test_it_ends_while_it_waits_and_tells_nothing_more() -> None:
    completions, mark = Completions(), Scripted()
    completions.add(mark, lambda: pytest.fail("told after the end"))
    completions.stop()
    mark.passed.set()
    until_none_runs("xpyd-copies")
