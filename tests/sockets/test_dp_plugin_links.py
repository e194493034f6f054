"""Ranks over the real links, in threads of one process."""

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from dp_ranks import Core, Lockstep, Store, wait_for

from xpyd_sidecar.contract import keys, launch
from xpyd_sidecar.dp.look_ahead import LookAhead
from xpyd_sidecar.engine.dp_plugin import meeting, shm, steps
from xpyd_sidecar.engine.dp_plugin.settings import StepSyncSettings
from xpyd_sidecar.errors import ConfigError, PeerGone

Way = Literal["rpc", "shm", "spread"]
WAYS: tuple[Way, ...] = ("rpc", "shm", "spread")


@pytest.fixture(params=WAYS)
def mode(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Over spread, rank 0 and 1 are on one host and rank 2, or the last of two, on another."""
    if request.param == "spread":
        keys.write(tmp_path / "key", keys.mint())
        monkeypatch.setenv(launch.ENV_KEY_FILE, str(tmp_path / "key"))
    found: Way = request.param
    return found


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads take turns after each microsecond: what one rank's threads do in between another's shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def cores(mode: Way) -> Iterator[list[Core]]:
    made = started(mode, 3)
    yield made
    for core in made:
        core.stop()
    for core in made:
        core.join(20.0)
    assert [(core.is_alive(), core.error) for core in made] == [(False, None)] * len(made)


def done(cores: list[Core], condition: Callable[[], bool]) -> None:
    """Wait for ``condition``; a core that has ended says why at once.

    Raises:
        TimeoutError: not in time.
    """
    wait_for(lambda: condition() or any(core.error for core in cores))
    assert [core.error for core in cores] == [None] * len(cores)


def started(mode: Way, size: int, timeout_s: float = 20.0) -> list[Core]:
    store, lockstep = Store(), Lockstep(size)
    settings = StepSyncSettings("rpc" if mode == "spread" else mode, LookAhead(), timeout_s)
    made = [Core(rank, size, store, settings, lockstep, one_host=mode != "spread", here="b" if rank == size - 1 else "a")
            for rank in range(size)]
    for core in made:
        core.start()
    wait_for(lambda: all(core.steps is not None or core.error is not None for core in made))
    assert [core.error for core in made] == [None] * size
    return made


def locals_of(cores: list[Core]) -> list[int]:
    return [core.steps.state.local if core.steps else -1 for core in cores]


def settled(cores: list[Core]) -> bool:
    """Not by ``busy``, which looks at what others say: a core that sleeps would not be woken for what it has seen."""
    return all(not core.left for core in cores) and all(core.steps and not core.steps.state.is_behind for core in cores)


def test_idle_ranks_run_a_dummy_for_each_forward_of_another(cores: list[Core]) -> None:
    cores[1].ask(30)
    done(cores, lambda: settled(cores) and locals_of(cores) == [30, 30, 30])
    assert [core.real for core in cores] == [0, 30, 0]


@pytest.mark.usefixtures("eager")
def test_random_work_ends_with_all_ranks_at_one_step(cores: list[Core]) -> None:
    rng = random.Random(3)
    total = 0
    for _ in range(60):
        tokens = rng.randint(1, 6)
        total += tokens
        cores[rng.randrange(3)].ask(tokens)
        time.sleep(rng.choice((0.0, 0.0, 0.003)))
    done(cores, lambda: sum(core.real for core in cores) == total)
    done(cores, lambda: settled(cores) and len(set(locals_of(cores))) == 1)


def test_a_pause_holds_at_one_step_on_all_ranks(cores: list[Core]) -> None:
    cores[0].ask(5)
    for core in cores:
        core.pause()
    done(cores, lambda: all(core.held == 1 for core in cores))
    assert len(set(locals_of(cores))) == 1
    cores[2].ask(3)
    for core in cores:
        core.resume()
    done(cores, lambda: cores[2].real == 3 and settled(cores) and len(set(locals_of(cores))) == 1)
    assert cores[0].real == 5


def test_ranks_leave_together(mode: Way) -> None:
    cores = started(mode, 2)
    cores[0].stop()
    time.sleep(0.1)
    assert cores[0].is_alive()
    cores[1].ask(4)
    cores[1].stop()
    for core in cores:
        core.join(20.0)
    assert [core.is_alive() for core in cores] == [False, False]
    assert [core.error for core in cores] == [None, None]
    assert cores[0].dummies == 4


@pytest.mark.parametrize("dead", [0, 1])
def test_a_silent_rank_ends_the_others_with_its_name(mode: Way, dead: int) -> None:
    cores = started(mode, 2, timeout_s=4.0)
    cores[dead].cut()
    wait_for(lambda: cores[1 - dead].error is not None)
    error = cores[1 - dead].error
    assert isinstance(error, PeerGone)
    assert error.peer == ("coordinator in DP rank 0" if mode != "shm" and dead == 0 else f"DP rank {dead}")


@pytest.mark.parametrize("mode", ["spread"], indirect=True)
def test_over_several_hosts_a_process_that_ends_is_known_before_the_timeout(mode: Way) -> None:
    """The other links know by silence alone."""
    for dead in (0, 1):
        cores = started(mode, 2, timeout_s=1000.0)
        cores[dead].cut()
        wait_for(lambda cores=cores, dead=dead: cores[1 - dead].error is not None)
        assert isinstance(cores[1 - dead].error, PeerGone)


def test_ranks_on_several_hosts_need_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.ENV_KEY_FILE, raising=False)
    core = Core(0, 2, Store(), StepSyncSettings("rpc"), Lockstep(2), one_host=False)
    core.start()
    core.join(20.0)
    assert isinstance(core.error, ConfigError)
    assert f"{launch.ENV_KEY_FILE} is not set" in str(core.error)


def test_a_rank_stuck_in_a_step_is_abandoned(mode: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "GRACE_S", 0.2)
    cores = started(mode, 2, timeout_s=1.0)
    cores[1].lockstep = Lockstep(1)
    cores[0].ask(1)  # its forward waits for rank 1 for 20 s
    wait_for(lambda: cores[0].lockstep.waiting == 1)
    cores[1].cut()
    wait_for(lambda: cores[0].abandoned is not None)
    assert isinstance(cores[0].abandoned, PeerGone)


def test_nothing_is_left_in_shared_memory(mode: Way, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "shm"  # in the machine's own are other tests' too
    folder.mkdir()
    monkeypatch.setattr(shm, "FOLDER", folder)
    made = []
    make = shm.make

    def noted(size: int) -> Path:
        made.append(make(size))
        return made[-1]

    monkeypatch.setattr(shm, "make", noted)
    cores = started(mode, 2)
    assert len(made) == (mode == "shm")
    assert list(folder.iterdir()) == []
    for core in cores:
        core.stop()
    for core in cores:
        core.join(20.0)


def test_other_settings_at_another_rank_are_refused_by_both() -> None:
    store, lockstep = Store(), Lockstep(2)
    cores = [Core(0, 2, store, StepSyncSettings("rpc"), lockstep),
             Core(1, 2, store, StepSyncSettings("rpc", LookAhead(24)), lockstep)]
    for core in cores:
        core.start()
    for core in cores:
        core.join(20.0)
        assert isinstance(core.error, ConfigError)
        assert f"DP rank {1 - cores.index(core)} runs with other settings" in str(core.error)


def test_a_rank_without_the_rules_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_S", 0.2)
    core = Core(0, 2, Store(), StepSyncSettings("rpc"), Lockstep(2))
    core.start()
    core.join(20.0)
    assert isinstance(core.error, ConfigError)
    assert "DP rank 1 has not come to config/1" in str(core.error)


def test_auto_takes_shared_memory_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting.mode_of(StepSyncSettings("auto"), one_host=True) == "shm"
    assert meeting.mode_of(StepSyncSettings("auto"), one_host=False) == "rpc"
    monkeypatch.setattr(shm, "usable", lambda: False)
    assert meeting.mode_of(StepSyncSettings("auto"), one_host=True) == "rpc"
    with pytest.raises(ConfigError, match="x86-64"):
        meeting.mode_of(StepSyncSettings("shm"), one_host=True)
    with pytest.raises(ConfigError, match="several hosts"):
        meeting.mode_of(StepSyncSettings("shm"), one_host=False)
