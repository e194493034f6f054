"""The thread that looks after an executor's workers."""

from __future__ import annotations

import threading

import pytest

from xpyd_sidecar.engine.executor_queue import watch
from xpyd_sidecar.engine.executor_queue.watch import ReaderWatch

END_S = 5.0


class Looks:
    """Answers look after look; the last one again and again."""

    def __init__(self, *answers: dict[str, str] | None) -> None:
        self.answers = list(answers)
        self.looks = 0
        self.looked = threading.Event()

    def lost_readers(self) -> dict[str, str] | None:
        self.looks += 1
        if len(self.answers) == 1:
            self.looked.set()
            return self.answers[0]
        return self.answers.pop(0)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.001)


def test_the_first_one_that_is_lost_is_told_and_then_the_thread_ends() -> None:
    told: list[tuple[str, str]] = []
    one = ReaderWatch(Looks(None, {}, None, {"rank 1": "gone", "rank 2": "too"}), lambda *said: told.append(said))
    one._thread.join(END_S)
    assert not one._thread.is_alive()
    assert told == [("rank 1", "gone")]


def test_it_ends_when_it_is_told_to_and_says_nothing_more() -> None:
    told: list[tuple[str, str]] = []
    looks = Looks({})
    one = ReaderWatch(looks, lambda *said: told.append(said))
    assert looks.looked.wait(END_S)
    one.stop()
    one._thread.join(END_S)
    assert not one._thread.is_alive()
    assert told == []


def test_it_may_be_stopped_by_what_it_tells() -> None:
    ended = threading.Event()

    def lost(name: str, reason: str) -> None:
        one.stop()
        ended.set()

    started = threading.Event()

    class Later(Looks):
        def lost_readers(self) -> dict[str, str] | None:
            started.wait(END_S)
            return super().lost_readers()

    one = ReaderWatch(Later({"rank 0": "gone"}), lost)
    started.set()
    assert ended.wait(END_S)
