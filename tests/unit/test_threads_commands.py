"""A thread on which others have calls made, and which looks how far things are between them."""

from __future__ import annotations

import threading

import pytest

from xpyd_sidecar.threads import watched
from xpyd_sidecar.threads.commands import CommandThread

WAIT_S = 10.0


class Counting(CommandThread):
    """Looks until it has moved so often in a row, then rests."""

    def __init__(self, moves: int = 0, rest_s: float = WAIT_S, error: Exception | None = None) -> None:
        super().__init__("xpyd-counting", "its count")
        self.looks, self.moves, self.rest_s, self.error = 0, moves, rest_s, error
        self.seen: list[str] = []
        self.thread.start()

    def enter(self) -> None:
        self.seen.append("enter")

    def rest(self) -> float:
        self.seen.append("rest")
        return self.rest_s

    def poll_once(self) -> bool:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.looks <= self.moves

    def end(self) -> None:
        self.seen.append("end")


def test_calls_are_made_on_the_thread_in_their_order_and_one_that_fails_ends_nobody() -> None:
    one, made = Counting(), []
    done = threading.Event()
    one.tell(lambda: made.append(threading.current_thread() is one.thread))
    one.tell(lambda: made.append(1 // 0))
    one.tell(lambda: made.append("last"))
    one.tell(done.set)
    assert done.wait(WAIT_S)
    one.stop()
    assert made == [True, "last"]
    assert not one.thread.words


def test_it_rests_only_where_nothing_has_moved() -> None:
    one = Counting(moves=50)
    looked = threading.Event()
    one.tell(lambda: None)
    while one.looks < 51:
        one.thread.join(0.001)
    one.tell(looked.set)
    assert looked.wait(WAIT_S)
    one.stop()
    # Before the first look, after the last that moved, and after calls: never between looks that moved.
    assert one.seen.count("rest") <= 4
    assert (one.seen[0], one.seen[-1]) == ("enter", "end")


def test_a_look_that_fails_again_and_again_ends_the_thread_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PAUSE_S", 0.0)
    one = Counting(rest_s=0.0, error=OSError("broken"))
    one.thread.join(WAIT_S)
    assert one.looks == watched.FAULTS_MAX
    assert one.thread.words == "thread xpyd-counting ended: OSError: broken"


def test_what_was_told_before_the_end_is_done() -> None:
    one, made = Counting(), []
    for number in range(100):
        one.tell(lambda number=number: made.append(number))
    one.stop()
    assert made == list(range(100))
    assert not one.thread.is_alive()
