"""The scheduler side's calls to its workers, over the real queue; workers are threads of this process."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from xpyd_sidecar.broadcast.errors import ReaderStuck
from xpyd_sidecar.contract import duty, keys
from xpyd_sidecar.contract.duty import EngineRole
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId
from xpyd_sidecar.engine import worker_rpc as crew_module
from xpyd_sidecar.engine.worker_rpc import WorkerRpc, WorkerRpcServer
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Release
from xpyd_sidecar.process.host_identity import place
from xpyd_sidecar.threads import watched
from xpyd_sidecar.threads.watched import ThreadEnded

SERVICE_KEY = keys.ServiceKey(bytes(range(32)))


def release(number: int, outcome: Outcome = Outcome.PEER_LOST) -> Release:
    return Release(Key(TransferId(f"{number:032x}"), Attempt(2), 3), outcome, "decode d-e3 is silent")


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


class Team:
    """A crew of two workers; ``far``: the second one is on another host."""

    def __init__(self, folder: Path, *, far: bool = False, members: bool = False) -> None:
        self.abandoned: list[str] = []
        self.members = members
        self.back: list[Release] = []
        places = [place(), "elsewhere" if far else place()]
        self.crew = WorkerRpc(places, host="127.0.0.1", key=SERVICE_KEY, run_dir=folder, give_back=self.back.extend,
                              abandon=self.ends("crew"))
        self.gone: list[list[Release]] = [[], []]
        self.roles: list[list[Role]] = [[], []]
        self.held = [{"kept": 0}, {"kept": 0}]
        self.hands: list[WorkerRpcServer] = []

    def ends(self, who: str) -> Callable[[], None] | None:
        return partial(self.abandoned.append, who) if self.members else None

    def join(self) -> None:
        handle = self.crew.handle()
        assert self.crew.handle() == b""
        for rank in (0, 1):
            def let_go(key: Key, outcome: Outcome, reason: str, rank: int = rank) -> None:
                self.gone[rank].append(Release(key, outcome, reason))

            def told(role: Role, rank: int = rank) -> dict[str, int]:
                self.roles[rank].append(role)
                return self.held[rank]

            self.hands.append(WorkerRpcServer(handle, rank, host="127.0.0.1", key=SERVICE_KEY, let_go=let_go, duty=told,
                                              abandon=self.ends(f"rank {rank}")))
        first = release(0)
        wait_for(lambda: self.crew.let_go(first))
        wait_for(lambda: all(first in gone for gone in self.gone))

    def stop(self) -> None:
        self.crew.stop()
        for hand in self.hands:
            hand.stop()


@pytest.fixture(params=[False, True], ids=["near", "far"])
def team(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    monkeypatch.setattr(crew_module, "LOOK_S", 0.02)
    monkeypatch.setattr(crew_module, "GONE_S", 0.2)
    made = Team(tmp_path, far=request.param)
    yield made
    made.stop()


def test_all_workers_let_go_of_a_dead_peers_transfers(team: Team) -> None:
    assert not team.crew.let_go(release(1)), "nobody has joined: it goes with the orders"
    team.join()
    wanted = [release(number) for number in range(1, 300)]
    assert all(team.crew.let_go(one) for one in wanted)
    wait_for(lambda: all(gone[-299:] == wanted for gone in team.gone))
    assert team.back == []


def test_workers_are_told_what_the_engine_is_for_and_what_they_hold_is_said(
        team: Team, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    duty.write(tmp_path, EngineRole(Role.PREFILL, 1))
    team.join()
    wait_for(lambda: [set(roles) for roles in team.roles] == [{Role.PREFILL}] * 2)
    team.held[1] = {"kept": 4096, "pool": 0}
    duty.write(tmp_path, EngineRole(Role.DECODE, 2, draining=True))
    wait_for(lambda: "decode of epoch 2, draining; workers hold {'rank 1': {'kept': 4096, 'pool': 0}}" in caplog.text)
    team.held[1] = {"kept": 0, "pool": 0}
    wait_for(lambda: "decode of epoch 2, draining; workers hold nothing" in caplog.text)
    # One that answers late is told again.
    assert [[role for role, _ in groupby(roles)] for roles in team.roles] == [[Role.PREFILL, Role.DECODE]] * 2


def test_an_unreadable_duty_changes_nothing_and_is_said_once(team: Team, tmp_path: Path,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / duty.FILE).write_text("{")
    team.join()
    wait_for(lambda: "workers go on as before" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("workers go on as before") == 1
    assert team.roles == [[], []]


def test_a_worker_that_is_gone_is_named_and_ends_the_engine(team: Team) -> None:
    team.join()
    watched.check(team.crew.thread, *(hand.thread for hand in team.hands))
    team.hands[1].stop()
    taken: list[Release] = []

    def refused() -> bool:
        one = release(len(taken) + 1)
        if team.crew.let_go(one):
            taken.append(one)
            return False
        return True

    wait_for(refused)
    wait_for(lambda: all(one in team.gone[0] or one in team.back for one in taken))
    wait_for(lambda: team.crew.thread.words != "")
    with pytest.raises(ThreadEnded, match=r"thread xpyd-crew ended: .*worker rank 1: "):
        watched.check(team.crew.thread)


def test_workers_that_end_before_the_engine_does_are_no_fault(team: Team) -> None:
    team.crew._gone_s = 120.0
    team.join()
    for hand in team.hands:
        hand.stop()
    wait_for(lambda: not team.crew.let_go(release(1)))
    team.stop()
    watched.check(team.crew.thread, *(hand.thread for hand in team.hands))


def test_what_was_to_be_said_comes_back_where_nobody_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "JOIN_S", 0.1)
    monkeypatch.setattr(crew_module, "GONE_S", 0.0)
    team = Team(tmp_path)
    assert team.crew.handle()
    assert not team.crew.let_go(release(1))
    wait_for(lambda: "rank 0, rank 1: did not join" in team.crew.thread.words)
    team.stop()
    team.stop()
    assert not team.crew.let_go(release(2))


def test_a_call_that_raises_on_one_worker_is_named_once_and_made_again(team: Team, tmp_path: Path,
                                                                       caplog: pytest.LogCaptureFixture) -> None:
    team.join()
    hand, failed = team.hands[1], []
    told = hand._duty

    def raising(role: Role) -> dict[str, int]:
        if len(failed) < 3:
            failed.append(role)
            raise RuntimeError("CUDA error: out of memory")
        return told(role)

    hand._duty = raising
    duty.write(tmp_path, EngineRole(Role.PREFILL, 1))
    wait_for(lambda: len(team.roles[0]) >= 4 and len(team.roles[1]) >= 1)  # as often as one has failed, and once more
    assert len(failed) == 3
    assert caplog.text.count("xpyd: worker rank 1: duty raised RuntimeError: CUDA error: out of memory") == 1
    watched.check(team.crew.thread)


def test_what_workers_do_not_take_goes_with_the_steps_and_later_calls_go_on(team: Team, monkeypatch: pytest.MonkeyPatch,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    team.join()
    tell, faults = team.crew._group.tell, [ReaderStuck("kv workers", ("rank 1",), "silent")]

    def stuck(*args: Any, **more: Any) -> None:
        if faults:
            raise faults.pop()
        tell(*args, **more)

    monkeypatch.setattr(team.crew._group, "tell", stuck)
    assert team.crew.let_go(release(1))
    wait_for(lambda: team.back == [release(1)])
    assert "kv workers: rank 1: silent; it goes with the next step" in caplog.text
    assert team.crew.let_go(release(2))
    wait_for(lambda: all(gone[-1] == release(2) for gone in team.gone))
    watched.check(team.crew.thread)


@pytest.mark.parametrize("fault", [
    RuntimeError("CUDA error: out of memory"), ReaderStuck("kv workers", ("rank 1",), "silent")],
                         ids=["a worker raises", "a worker is stuck"])
def test_workers_are_called_again_after_a_call_that_failed(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           fault: Exception) -> None:
    team.join()
    failed: list[str] = []
    if isinstance(fault, ReaderStuck):
        start = team.crew._group.start

        def stuck(name: str, *args: Any, **more: Any) -> Any:
            if not failed:
                failed.append(name)
                raise fault
            return start(name, *args, **more)

        monkeypatch.setattr(team.crew._group, "start", stuck)
    else:
        hand = team.hands[1]
        told = hand._duty

        def raising(role: Role) -> dict[str, int]:
            if not failed:
                failed.append(role)
                raise fault
            return told(role)

        hand._duty = raising
    duty.write(tmp_path, EngineRole(Role.PREFILL, 1))
    wait_for(lambda: bool(failed))
    duty.write(tmp_path, EngineRole(Role.DECODE, 2))
    wait_for(lambda: Role.DECODE in team.roles[1] or not team.crew._ready)
    assert Role.DECODE in team.roles[1]


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    monkeypatch.setattr(crew_module, "LOOK_S", 0.02)
    monkeypatch.setattr(crew_module, "MEMBER_GONE_S", 0.05)
    monkeypatch.setattr(watched, "ABANDON_S", 0.05)
    made = Team(tmp_path, far=True, members=True)
    made.join()
    yield made
    made.stop()


def test_between_members_a_lost_worker_ends_an_engine_that_makes_no_step(members: Team) -> None:
    members.hands[1].stop()
    wait_for(lambda: "crew" in members.abandoned)
    assert "worker rank 1: " in members.crew.thread.words


def test_between_members_the_end_of_the_engine_ends_the_workers(members: Team) -> None:
    members.crew.stop()
    wait_for(lambda: sorted(members.abandoned) == ["rank 0", "rank 1"])
    assert all("scheduler side: it has ended" in hand.thread.words for hand in members.hands)


def test_a_member_that_is_told_to_end_is_not_ended_by_force(members: Team) -> None:
    for hand in members.hands:
        hand._stop.set()
    members.crew.stop()
    members.stop()
    time.sleep(0.2)
    assert members.abandoned == []


LEADER = """
import sys, time
from xpyd_sidecar.contract import keys
from xpyd_sidecar.engine.worker_rpc import WorkerRpc
from xpyd_sidecar.threads import watched
rpc = WorkerRpc(["elsewhere"], host="127.0.0.1", key=keys.ServiceKey(bytes(range(32))), run_dir=None, give_back=print,
                abandon=watched.end_process)
print(rpc.handle().hex(), flush=True)
while not rpc._ready:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(60)
"""
WORKER = """
import sys, time
from xpyd_sidecar.contract import keys
from xpyd_sidecar.engine.worker_rpc import WorkerRpcServer
from xpyd_sidecar.threads import watched
WorkerRpcServer(bytes.fromhex(sys.argv[1]), 0, host="127.0.0.1", key=keys.ServiceKey(bytes(range(32))),
                let_go=print, duty=lambda role: {}, abandon=watched.end_process)
time.sleep(60)
"""


@pytest.mark.parametrize("killed", ["leader", "worker"])
def test_a_process_whose_other_member_was_killed_ends_by_itself(killed: str) -> None:
    python = (sys.executable, "-c")
    with subprocess.Popen([*python, LEADER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as leader:
        assert leader.stdout is not None
        handle = leader.stdout.readline().strip()
        with subprocess.Popen([*python, WORKER, handle], stderr=subprocess.DEVNULL) as worker:
            try:
                assert leader.stdout.readline().strip() == "ready"
                gone, left = (leader, worker) if killed == "leader" else (worker, leader)
                gone.send_signal(signal.SIGKILL)
                assert left.wait(50) == 1, "it would stay for a minute"
            finally:
                leader.kill()
                worker.kill()
