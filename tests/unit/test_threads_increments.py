"""Increments keep what was added until it is taken, and no more than one number for a name."""

from __future__ import annotations

import threading

from xpyd_sidecar.threads.increments import Increments


def test_what_several_threads_add_is_taken_once() -> None:
    counts, taken = Increments(), []

    def add() -> None:
        for _ in range(5000):
            counts.add("a", 1)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        taken.append(counts.take().get("a", 0))
    taken.append(counts["a"])
    assert sum(taken) == 15000
    assert counts["b"] == 0
    assert set(counts.take()) <= {"a"}
    assert counts.take() == {}
