"""The broadcast queue under vLLM's own executor and workers, which are processes, on one host and over two; no engine."""

from __future__ import annotations

import contextlib
import itertools
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

from xpyd_sidecar import curve
from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings

SEEN_S = 5.0
KINDS = (zmq.DEALER, zmq.SUB, zmq.XSUB, zmq.PUB, zmq.REQ, zmq.PAIR)
"""Of sockets that a stranger has."""
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
        wait(lambda: host.ask("status")["silent"] == ("rank 1",), SEEN_S, "silent")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait(lambda: not host.ask("status")["silent"], SEEN_S, "heard again")
    assert not host.ask("status")["failed"]
    assert host.ask("call", "echo", 1) == [(0, 1), (1, 1)]


def test_a_killed_worker_ends_the_engine_while_an_answer_is_waited_for() -> None:
    with hosts(1, 2, QueueSettings()) as (one,):
        workers = one.ask("workers")
        began = time.monotonic()
        one.begin("call", "sleep", 3)
        os.kill(workers[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"cancelled|rank 1|rank 0 is lost|its process has ended"):
            one.hear(SEEN_S + 15)
        assert time.monotonic() - began < SEEN_S + 15
        wait(lambda: one.ask("status")["failed_at"] > 0, SEEN_S + 15, "vLLM is told")


def test_workers_end_with_their_executor_however_it_ends() -> None:
    with hosts(1, 2, QueueSettings()) as (one,):
        workers = one.ask("workers")
        one.kill()
        wait(lambda: not any(map(running, workers)), 20, "the workers end")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_an_executor_that_is_shut_down_leaves_no_process() -> None:
    with hosts(1, 2, QueueSettings()) as (one,):
        workers = one.ask("workers")
        one.ask("stop")
        assert not any(map(running, workers))


# --- over hosts ---


@pytest.fixture(scope="module")
def spread() -> Iterator[list[Host]]:
    with hosts(2, 1, SETTINGS) as made:
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


def test_a_stopped_worker_elsewhere_is_seen_and_eight_seconds_of_silence_end_nothing(spread: list[Host]) -> None:
    leader, follower = spread
    (pid,) = follower.ask("workers")
    time.sleep(1.5)  # the connection by which it is seen
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        wait(lambda: leader.ask("status")["silent"] == ("rank 1",), SEEN_S, "seen while nothing is called")
        leader.begin("call", "echo", 7)
    finally:
        time.sleep(max(0.0, began + 8 - time.monotonic()))
        os.kill(pid, signal.SIGCONT)
    assert leader.hear(20) == [(0, 7), (1, 7)]
    wait(lambda: not leader.ask("status")["silent"], SEEN_S, "heard again")
    assert not leader.ask("status")["failed"]


def frames(payload: bytes) -> list[list[bytes]]:
    """What a stranger may say: as vLLM's queue has it, as ours has it, and nonsense."""
    return [[payload], [b"READY"], [wire.pack_number(1, 1), payload], [wire.pack(wire.Taken(1 << 40))],
            [wire.pack(wire.Bye(0))], [wire.pack(wire.Welcome())], [b"\x00" * 70_000], [b"\x01"], [b""]]


@pytest.mark.parametrize("shown", ["no key", "another key", "another life"])
def test_a_stranger_can_neither_read_nor_send_a_call(spread: list[Host], tmp_path: Path, shown: str) -> None:
    leader, _ = spread
    mark = tmp_path / "ran"
    other = keys.of_life(SERVICE_KEY, "cd" * 16)
    key = {"no key": None, "another key": ServiceKey(bytes(32)), "another life": other}[shown]
    context: zmq.Context[Any] = zmq.Context()
    try:
        socks = []
        for endpoint, kind in itertools.product(leader.ask("endpoints"), KINDS):
            sock = context.socket(kind)
            sock.setsockopt(zmq.LINGER, 0)
            if key is not None:
                curve.connect(sock, key, "broadcast")
            if kind == zmq.SUB:
                sock.setsockopt(zmq.SUBSCRIBE, b"")
            sock.connect(endpoint)
            socks.append((sock, kind))
        time.sleep(0.3)
        for sock, kind in socks:
            for each in frames(pickle.dumps(Bomb(mark))):
                if kind != zmq.SUB and sock.poll(0, zmq.POLLOUT):
                    sock.send_multipart(each if kind != zmq.XSUB else [b"\x01", *each], zmq.NOBLOCK)
        assert leader.ask("call", "echo", "secret") == [(0, "secret"), (1, "secret")]
        time.sleep(0.2)
        readable = [sock for sock, kind in socks if kind != zmq.PUB and sock.poll(0)]
        assert not readable, "a stranger was told something"
    finally:
        context.destroy(linger=0)
    assert not mark.exists()
    assert not leader.ask("status")["failed"]


def test_garbage_at_the_port_changes_nothing(spread: list[Host], tmp_path: Path) -> None:
    leader, _ = spread
    mark = tmp_path / "ran"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    for endpoint in leader.ask("endpoints"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        bomb = pickle.dumps(Bomb(mark))
        for said in (bomb, b"GET / HTTP/1.1\r\n\r\n", bytes(100_000), greeting + bomb):
            with socket.create_connection((host, int(port)), 5) as sock:
                sock.sendall(said)
                sock.settimeout(0.1)
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    assert b"secret" not in sock.recv(1 << 16)
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
            sock.send(wire.pack(wire.Hello(wire.WIRE_VERSION, bytes(16), "rank 1", b"")))
            assert leader.ask("call", "echo", "secret") == [(0, "secret"), (1, "secret")]
            while sock.poll(500):
                assert isinstance(wire.unpack("writer", sock.recv()), wire.Refuse)
    finally:
        context.destroy(linger=0)
    assert not mark.exists()
    assert not leader.ask("status")["failed"]


def test_a_killed_member_ends_the_others_whichever_it_is() -> None:
    with hosts(2, 1, SETTINGS) as (leader, follower):
        (pid,) = follower.ask("workers")
        os.kill(pid, signal.SIGKILL)
        wait(lambda: leader.ask("status")["failed_at"] > 0, SEEN_S, "the leader knows, though nothing is called")
        with pytest.raises(RuntimeError, match=r"Executor failed|rank 1"):
            leader.ask("call", "echo", 1)
    with hosts(2, 1, SETTINGS) as (leader, follower):
        leader.kill()
        wait(lambda: not any(follower.ask("status")["alive"]), SEEN_S + 5, "the follower's worker ends")
