"""Calls to groups of workers: answers by rank, errors with their traceback, and workers that are slow, stuck or gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import queue_peers
from queue_peers import JOIN_S, KEY, start

from xpyd_sidecar.broadcast import rpc
from xpyd_sidecar.broadcast.calls import SeparateBuffer
from xpyd_sidecar.broadcast.rpc import CallFailed, NoAnswer, WorkerGroup
from xpyd_sidecar.broadcast.worker import Worker
from xpyd_sidecar.errors import ConfigError, OurFault, PeerGone


class Team:
    """A group whose workers are threads here."""

    def __init__(self, *workers: str, remote: tuple[str, ...] = (), name: str = "team", chunk_bytes: int = 4096,
                 chunks: int = 4) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.release = threading.Event()
        self.group = WorkerGroup(name, workers, remote=remote, key=KEY, chunk_bytes=chunk_bytes, chunks=chunks)
        self.pool = ThreadPoolExecutor(len(workers))
        self.workers: dict[str, Worker] = {}
        self.ends: list[Future[None]] = [self.pool.submit(self._serve, each, chunk_bytes, chunks) for each in workers]
        self.group.wait_ready(JOIN_S)

    def _serve(self, name: str, chunk_bytes: int, chunks: int) -> None:
        worker = self.workers[name] = Worker(self.group.handle, name, timeout_s=JOIN_S, key=KEY, chunk_bytes=chunk_bytes,
                                             chunks=chunks)

        def who() -> str:
            return name

        def echo(*args: Any, **kwargs: Any) -> Any:
            return [bytes(arg) if isinstance(arg, memoryview) else arg for arg in args], kwargs

        def fail(text: str) -> None:
            raise KeyError(text)

        def big(size: int) -> SeparateBuffer:
            return SeparateBuffer(name.encode() * size)

        def note(what: Any) -> None:
            self.heard.append((name, what))

        def wait() -> str:
            self.release.wait(30)
            return "released"

        try:
            worker.serve({"who": who, "echo": echo, "fail": fail, "big": big, "note": note, "wait": wait,
                          "unsendable": object, "back": SeparateBuffer})
        finally:
            worker.close()

    def close(self) -> None:
        self.release.set()
        self.group.close()
        self.pool.shutdown()


Make = Callable[..., Team]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Team] = []

    def build(*workers: str, **options: Any) -> Team:
        made.append(Team(*workers, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.mark.parametrize("remote", [(), ("1",), ("0", "1", "2")], ids=["local", "mixed", "remote"])
def test_answers_come_by_rank_wherever_the_workers_are(make: Make, remote: tuple[str, ...]) -> None:
    group = make("0", "1", "2", remote=remote).group
    assert group.call("who") == ["0", "1", "2"]
    assert group.call("who", to=("2", "0")) == ["0", "2"]
    assert group.call("echo", 1, None, 2.5, "text", b"bytes", [1, [2]], {"a": 1}, flag=True, to=("1",)) == [
        [[1, None, 2.5, "text", b"bytes", [1, [2]], {"a": 1}], {"flag": True}]]


@pytest.mark.parametrize("remote", [(), ("0",)], ids=["local", "remote"])
def test_buffers_travel_apart_in_both_directions_and_at_any_depth(make: Make, remote: tuple[str, ...]) -> None:
    group = make("0", "1", remote=remote).group
    data = os.urandom(100_000)
    back = group.call("echo", SeparateBuffer(data), 1, SeparateBuffer(bytearray(data[:10])))[1]
    assert back == [[data, 1, data[:10]], {}]
    assert [bytes(each) for each in group.call("big", 50_000)] == [b"0" * 50_000, b"1" * 50_000]
    assert [bytes(each) for each in group.call("back", SeparateBuffer(data))] == [data, data]


def test_an_error_comes_back_with_worker_class_and_traceback_and_the_group_goes_on(make: Make) -> None:
    group = make("0", "1").group
    with pytest.raises(CallFailed, match=r"[01]: fail raised KeyError: 'no such'") as caught:
        group.call("fail", "no such")
    assert "raise KeyError(text)" in caught.value.failure.trace
    outcomes = group.start("fail", "x").outcomes()
    assert [type(each) for each in outcomes.values()] == [CallFailed, CallFailed]
    for method, odd, reason in (("nothing", (), "no method 'nothing'; there are back, big, echo"),
                                ("unsendable", (), "do not carry object"), ("who", (1,), "takes 0 positional arguments")):
        with pytest.raises(CallFailed, match=reason):
            group.call(method, *odd)
    assert group.call("who") == ["0", "1"]


def test_an_answer_that_is_too_large_comes_back_as_an_error(make: Make) -> None:
    team = make("0")
    assert team.group.call("who") == ["0"]
    team.workers["0"]._back._message_max = 1000
    with pytest.raises(CallFailed, match="allowed are"):
        team.group.call("big", 5000)
    assert team.group.call("who") == ["0"]


def test_many_calls_may_be_on_the_way_and_are_collected_in_any_order(make: Make) -> None:
    group = make("0", "1").group
    pending = [group.start("echo", number) for number in range(200)]
    for number in (150, 3, *range(10, 100)):
        assert pending[number].wait() == [[[number], {}]] * 2
    assert group.call("who") == ["0", "1"]


def test_large_calls_with_large_answers_that_nobody_collects_do_not_lock_up(make: Make) -> None:
    group = make("0", "1", chunks=2).group
    data = os.urandom(9_000)
    pending = [group.start("back", SeparateBuffer(data), timeout_s=20) for _ in range(12)]
    for each in pending:
        assert [bytes(answer) for answer in each.wait()] == [data, data]


def test_tell_wants_no_answer_and_keeps_the_order(make: Make) -> None:
    team = make("0", "1")
    for number in range(5):
        team.group.tell("note", number)
    team.group.tell("fail", "only logged")
    team.group.call("who")
    for name in ("0", "1"):
        assert [what for who, what in team.heard if who == name] == list(range(5))


def test_a_worker_that_does_not_answer_is_named_and_its_late_answer_is_thrown_away(make: Make) -> None:
    team = make("0", "1")
    slow = team.group.start("wait", to=("1",))
    began = time.monotonic()
    with pytest.raises(NoAnswer, match=r"team: who: no answer from 1 in [012]\.\d s") as caught:
        team.group.call("who", timeout_s=2.0)
    assert caught.value.workers == ("1",)
    assert time.monotonic() - began < 10
    team.release.set()
    assert slow.wait() == ["released"]
    assert team.group.call("who") == ["0", "1"]


def test_a_failure_is_raised_at_once_though_others_still_work(make: Make) -> None:
    team = make("0", "1")
    team.group.start("wait", to=("0",))
    began = time.monotonic()
    with pytest.raises(CallFailed, match="1: fail"):
        team.group.start("fail", "x").wait(20)
    assert time.monotonic() - began < 10


def test_groups_side_by_side_know_nothing_of_each_other(make: Make) -> None:
    first, second = make("0", "1", name="a"), make("0", "1", name="b")
    one = [first.group.start("echo", "a", number) for number in range(20)]
    two = [second.group.start("echo", "b", number) for number in range(20)]
    for number in range(20):
        assert two[number].wait() == [[["b", number], {}]] * 2
        assert one[number].wait() == [[["a", number], {}]] * 2
    first.close()
    assert second.group.call("who") == ["0", "1"]


def test_close_ends_serving_and_cancel_does_so_for_one_worker(make: Make) -> None:
    team = make("0", "1")
    team.group.call("who")
    team.workers["1"].cancel()
    team.ends[1].result(20)
    with pytest.raises(PeerGone, match="1: "):
        team.group.call("who", timeout_s=10)
    assert team.group.call("who", to=("0",)) == ["0"]
    team.group.close()
    team.ends[0].result(20)


def test_a_killed_worker_fails_its_calls_at_once_and_the_others_go_on() -> None:
    group = WorkerGroup("g", ("0", "1"), key=KEY, chunks=2)
    peers = [start(queue_peers.work, group.handle, name) for name in group.workers]
    group.wait_ready(JOIN_S)
    try:
        pids = group.call("pid")
        assert pids == [process.pid for process, _ in peers]
        asleep = group.start("sleep", 60.0, to=("1",))
        threading.Timer(0.3, peers[1][0].kill).start()
        began = time.monotonic()
        with pytest.raises(PeerGone, match="1: "):
            asleep.wait(30)
        assert time.monotonic() - began < 10
        for _ in range(10):
            outcome = group.start("pid").outcomes()
            assert outcome["0"] == pids[0]
            assert isinstance(outcome["1"], PeerGone)
        assert list(group.gone) == ["1"]
    finally:
        group.close()
        for process, _ in peers:
            process.kill()
            process.join()


def test_workers_end_when_the_caller_is_killed() -> None:
    caller, told = start(queue_peers.call_for_ever, ("0",))
    worker = Worker(told.recv(), "0", timeout_s=JOIN_S, key=KEY)
    called = threading.Event()

    def kill() -> None:
        called.wait(60)
        caller.kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(PeerGone, match="its process has ended"):
        worker.serve({"poke": called.set})
    assert called.is_set()
    worker.close()
    caller.join()


def test_what_callers_get_wrong_is_refused_before_anything_is_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="remote: 7: not one of 0, 1"):
        WorkerGroup("g", ("0", "1"), remote=("7",))
    group = make("0", "1").group
    for to in ((), ("9",)):
        with pytest.raises(ValueError, match="workers are 0, 1"):
            group.call("who", to=to)
    with pytest.raises(TypeError, match="calls do not carry object; buffers are wrapped in SeparateBuffer"):
        group.call("echo", object())
    monkeypatch.setattr(rpc, "OPEN_MAX", 1)
    group.start("who")
    with pytest.raises(OurFault, match="1 calls wait for answers"):
        group.start("who")
