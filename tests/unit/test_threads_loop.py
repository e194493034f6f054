"""The I/O loop: posts run, one failing callback stops nothing, it ends when told."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from xpyd_sidecar.threads.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop("test-loop", lambda _: None)
    loop.start()
    yield loop
    loop.stop()


def test_posts_run_in_order_on_the_loops_thread(loop: Loop) -> None:
    seen: list[tuple[int, str]] = []
    done = threading.Event()
    for n in range(100):
        loop.post(lambda n=n: seen.append((n, threading.current_thread().name)))
    loop.post(done.set)
    assert done.wait(30)
    assert seen == [(n, "test-loop") for n in range(100)]


def test_a_failing_callback_is_logged_and_the_others_go_on(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        loop.post(lambda: 1 // 0)
        loop.post(done.set)
        assert done.wait(30)
    assert "ZeroDivisionError" in caplog.text


def test_sockets_are_watched_until_told_otherwise(loop: Loop) -> None:
    near, far = socket.socketpair()
    got = threading.Event()

    def ready(_: int) -> None:
        assert near.recv(10)
        loop.watch(near, 0, ready)
        got.set()

    loop.post(lambda: loop.watch(near, selectors.EVENT_READ, ready))
    far.send(b"x")
    assert got.wait(30)
    got.clear()
    far.send(b"y")
    assert not got.wait(0.2)
    near.close()
    far.close()


def test_it_ticks_ends_with_its_closers_and_takes_nothing_more() -> None:
    ticked, closed, late = threading.Event(), threading.Event(), threading.Event()
    loop = Loop("test-end", lambda _: ticked.set())
    loop.at_end(closed.set)
    loop.start()
    assert ticked.wait(30)
    loop.stop()
    assert closed.is_set()
    loop.post(late.set)
    loop.stop()
    assert not late.is_set()
    assert "test-end" not in [thread.name for thread in threading.enumerate()]


def test_a_post_that_meets_the_end_writes_into_no_file_that_came_after(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("test-loop", lambda _: None)
    loop.start()
    loop.stop()
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]  # one of them has the number of what the loop was woken by
    try:
        monkeypatch.setattr(loop, "_stop", threading.Event())  # the poster has looked just before the end
        loop.post(lambda: None)
        for each in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(each)
    finally:
        for each in others:
            os.close(each)
