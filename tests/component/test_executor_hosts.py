"""The broadcast queue under vLLM's own executor and workers, which are processes, on one host and over two; no engine."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from executor_hosts import KEY, SERVICE_KEY, SETTINGS, Bomb, Host, hosts
from networks import Networks
from queue_strangers import Stranger, StrangerElsewhere, frames, talk_garbage

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings
from xpyd_sidecar.process import curve

PATIENCE_S = 60.0
"""For what comes at once on a machine that has a processor for it."""
LONG_S = 10 * PATIENCE_S
"""Of silence, where none ends a member: the test goes on sooner on whatever machine."""
SEEN_S = 5.0
"""For so long a member that is seen to be silent stays so: the connection by which it is seen ends twice meanwhile."""
MIB = 1 << 20


def wait(holds: Callable[[], bool], deadline_s: float, what: str) -> float:
    """Until it holds; how long that took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began


# --- one host ---


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosts(1, 2, QueueSettings()) as (one,):
        yield one


def test_a_call_goes_to_all_workers_and_answers_come_by_rank(host: Host) -> None:
    assert host.ask("call", "echo", "x") == [(0, "x"), (1, "x")]
    assert host.ask("one", 1, "echo", 3) == (1, 3)


def test_calls_that_are_not_waited_for_are_answered_in_their_order(host: Host) -> None:
    assert host.ask("many", 15) == list(range(15))


def test_what_a_worker_raises_is_told_and_the_next_call_goes_on(host: Host) -> None:
    with pytest.raises(RuntimeError, match="worker 0 cannot"):
        host.ask("one", 0, "fail")
    assert host.ask("call", "echo", None) == [(0, None), (1, None)]


@pytest.mark.parametrize("size", [1, 3 * MIB, 30 * MIB], ids=["small", "in a chunk", "larger than a chunk"])
def test_large_calls_and_answers_arrive_whole(host: Host, size: int) -> None:
    assert host.ask("total", size // 4 + 1) == [size // 4 + 1] * 2
    assert [len(one) for one in host.ask("call", "bytes", size)] == [size] * 2


def test_a_queue_within_a_host_listens_nowhere(host: Host) -> None:
    assert host.ask("endpoints") == []


def test_a_stopped_worker_of_this_host_is_seen_and_heard_again(host: Host) -> None:
    pid = host.ask("workers")[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait(lambda: host.ask("status")["silent"] == ("rank 1",), PATIENCE_S, "silent")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait(lambda: not host.ask("status")["silent"], PATIENCE_S, "heard again")
    assert not host.ask("status")["failed"]
    assert host.ask("call", "echo", 1) == [(0, 1), (1, 1)]


def test_a_killed_worker_ends_the_engine_while_an_answer_is_waited_for(tmp_path: Path) -> None:
    with hosts(1, 2, QueueSettings()) as (one,):
        workers = one.ask("workers")
        one.begin("call", "sleep", 2 * PATIENCE_S, str(tmp_path / "sleeps"))
        wait((tmp_path / "sleeps-1").exists, PATIENCE_S, "the call has come to it")
        os.kill(workers[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"cancelled|rank 1|rank 0 is lost|its process has ended"):
            one.hear(PATIENCE_S)
        wait(lambda: one.ask("status")["failed_at"] > 0, PATIENCE_S, "vLLM is told")


def test_workers_end_with_their_executor_however_it_ends() -> None:
    with hosts(1, 2, QueueSettings()) as (one,):
        workers = one.ask("workers")
        one.kill()
        wait(lambda: not any(map(running, workers)), 120, "the workers end")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_an_executor_that_is_shut_down_leaves_no_process() -> None:
    with hosts(1, 2, QueueSettings()) as (one,):
        workers = one.ask("workers")
        one.ask("stop")
        wait(lambda: not any(map(running, workers)), PATIENCE_S, "the kernel has ended what was killed")


# --- over hosts ---


def wait_seen(leader: Host) -> None:
    """The second connection of the one elsewhere, by whose silence it is seen, is there."""
    wait(lambda: leader.ask("status")["seen"] == ("rank 1",), PATIENCE_S, "the connection by which it is seen")


@pytest.fixture(scope="module")
def spread() -> Iterator[list[Host]]:
    with hosts(2, 1, SETTINGS, silence_s=LONG_S) as made:
        yield made


def test_calls_cross_hosts_large_ones_too(spread: list[Host]) -> None:
    leader, follower = spread
    assert leader.ask("call", "echo", "x") == [(0, "x"), (1, "x")]
    assert leader.ask("many", 15) == list(range(15))
    assert leader.ask("total", 8 * MIB) == [8 * MIB] * 2
    assert [len(one) for one in leader.ask("call", "bytes", 30 * MIB)] == [30 * MIB] * 2
    assert leader.ask("call", "pid")[1] == follower.ask("workers")[0]
    assert leader.ask("call", "spread", {"from": 0}) == [{"from": 0}] * 2, "a queue of a group of processes"
    assert len(leader.ask("endpoints")) == 4, "the calls, and the answers of the one elsewhere; each has two"


def test_a_stopped_worker_elsewhere_is_seen_and_less_than_the_silence_that_ends_it_ends_nothing(spread: list[Host]) -> None:
    leader, follower = spread
    (pid,) = follower.ask("workers")
    wait_seen(leader)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait(lambda: leader.ask("status")["silent"] == ("rank 1",), PATIENCE_S, "seen while nothing is called")
        leader.begin("call", "echo", 7)
        time.sleep(SEEN_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert leader.hear(PATIENCE_S) == [(0, 7), (1, 7)]
    wait(lambda: not leader.ask("status")["silent"], PATIENCE_S, "heard again")
    assert not leader.ask("status")["failed"]


@pytest.mark.parametrize("shown", ["no key", "another key", "another life"])
def test_a_stranger_can_neither_read_nor_send_a_call(spread: list[Host], tmp_path: Path, shown: str) -> None:
    leader, _ = spread
    mark = tmp_path / "ran"
    other = keys.of_life(SERVICE_KEY, "cd" * 16)
    key = {"no key": None, "another key": ServiceKey(bytes(32)), "another life": other}[shown]
    stranger = Stranger(leader.ask("endpoints"), key)
    try:
        stranger.speak(mark)
        assert leader.ask("call", "echo", "secret") == [(0, "secret"), (1, "secret")]
        time.sleep(0.2)
        assert stranger.told() == []
    finally:
        stranger.close()
    assert not mark.exists()
    assert not leader.ask("status")["failed"]


def test_garbage_at_the_port_changes_nothing(spread: list[Host], tmp_path: Path) -> None:
    leader, _ = spread
    mark = tmp_path / "ran"
    assert talk_garbage(leader.ask("endpoints"), mark) == 16
    assert leader.ask("call", "echo", "secret") == [(0, "secret"), (1, "secret")]
    assert not mark.exists()


def test_who_holds_the_key_and_not_the_handle_is_told_nothing(spread: list[Host], tmp_path: Path) -> None:
    leader, _ = spread
    mark = tmp_path / "ran"
    context: zmq.Context[Any] = zmq.Context()
    try:
        for endpoint in leader.ask("endpoints"):
            sock = context.socket(zmq.DEALER)
            curve.connect(sock, KEY, "broadcast")
            sock.setsockopt(zmq.SNDTIMEO, 2000)
            sock.connect(endpoint)
            for each in frames(pickle.dumps(Bomb(mark))):
                sock.send_multipart(each)
            sock.send(wire.pack(wire.QueueHello(wire.WIRE_VERSION, bytes(16), "rank 1", b"")))
            assert leader.ask("call", "echo", "secret") == [(0, "secret"), (1, "secret")]
            while sock.poll(500):
                assert isinstance(wire.unpack("writer", sock.recv()), wire.QueueRefuse)
    finally:
        context.destroy(linger=0)
    assert not mark.exists()
    assert not leader.ask("status")["failed"]


def test_a_killed_member_ends_the_others_whichever_it_is() -> None:
    with hosts(2, 1, SETTINGS) as (leader, follower):
        (pid,) = follower.ask("workers")
        os.kill(pid, signal.SIGKILL)
        wait(lambda: leader.ask("status")["failed_at"] > 0, PATIENCE_S, "the leader knows, though nothing is called")
        with pytest.raises(RuntimeError, match=r"Executor failed|rank 1"):
            leader.ask("call", "echo", 1)
    with hosts(2, 1, SETTINGS) as (leader, follower):
        leader.kill()
        wait(lambda: not any(follower.ask("status")["alive"]), PATIENCE_S, "the follower's worker ends")


# --- over hosts in networks of their own ---


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    if os.geteuid() != 0:
        pytest.skip("networks are made by root")
    with Networks(3) as made:
        yield made


@pytest.fixture(scope="module")
def apart(networks: Networks) -> Iterator[list[Host]]:
    """As two pods; the third network is a stranger's."""
    with hosts(2, 1, SETTINGS, networks, silence_s=LONG_S) as made:
        yield made


@pytest.mark.parametrize("shown", ["no key", "another key", "another life"])
def test_a_stranger_in_the_network_of_the_pods_can_neither_read_nor_send_a_call(
        apart: list[Host], networks: Networks, tmp_path: Path, shown: str) -> None:
    leader, _ = apart
    mark, secret = tmp_path / "ran", f"secret-{os.urandom(16).hex()}"
    other = keys.of_life(SERVICE_KEY, "cd" * 16)
    key = {"no key": None, "another key": ServiceKey(bytes(32)), "another life": other}[shown]
    endpoints = leader.ask("endpoints")
    assert {one.rpartition(":")[0] for one in endpoints} == {f"tcp://{each.address}" for each in networks[:2]}
    stranger = StrangerElsewhere(networks[2], endpoints, key, mark)
    with networks[1].listen() as heard:
        try:
            assert stranger.hear() == 16, "it reaches every port"
            passed = everything(heard)
            assert leader.ask("call", "echo", secret) == [(0, secret), (1, secret)]
            time.sleep(0.2)
            stranger.go()
            assert stranger.hear() == []
            passed = everything(heard)
        finally:
            stranger.end()
    assert len(passed) > 2 * len(secret), "the call and its answer went by"
    assert secret.encode() not in passed, "nor who reads along"
    assert not mark.exists()
    assert not leader.ask("status")["failed"]


def everything(heard: socket.socket) -> bytes:
    """What has crossed a link since the last time."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(heard.recv(1 << 16))
    return b"".join(found)


def test_a_member_that_is_cut_off_is_seen_and_some_seconds_of_it_end_nothing(apart: list[Host], networks: Networks) -> None:
    leader, _ = apart
    assert leader.ask("call", "echo", 1) == [(0, 1), (1, 1)]
    wait_seen(leader)
    networks[1].cut()
    try:
        wait(lambda: leader.ask("status")["silent"] == ("rank 1",), PATIENCE_S, "seen while nothing is called")
        leader.begin("call", "echo", 7)
        time.sleep(SEEN_S)
    finally:
        networks[1].mend()
    assert leader.hear(PATIENCE_S) == [(0, 7), (1, 7)]
    wait(lambda: not leader.ask("status")["silent"], PATIENCE_S, "heard again")
    assert not leader.ask("status")["failed"]


def test_a_member_that_stays_cut_off_ends_the_engine_on_both_sides(networks: Networks) -> None:
    with hosts(2, 1, SETTINGS, networks) as (leader, follower):
        networks[1].cut()
        try:
            wait(lambda: leader.ask("status")["failed_at"] > 0, 120, "the leader gives it up")
            wait(lambda: not any(follower.ask("status")["alive"]), 120, "the follower's worker ends")
        finally:
            networks[1].mend()
