"""The launcher of a member, as a process: failures are counted, signals are handed on, what it leaves is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.group import ROUND, STATE, GroupRound, MemberState
from xpyd_sidecar.member import remains

DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
more = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=away) for away in (0, 1)]
print(os.getpid(), *[one.pid for one in more], flush=True)
time.sleep(600)
"""
ENDS = "import sys; sys.exit(3)"
STAYS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), flush=True)
time.sleep(600)
"""
AWAY = """
import subprocess, sys, time
away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(away.pid, flush=True)
time.sleep(600)
"""


class Launched:
    """A launcher of one command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.turn = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self, code: str, grace_s: str = "5", program: str = sys.executable) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "xpyd_sidecar.member", "--run-dir", str(self.folder), "--grace-s", grace_s, "--",
             program, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self.process

    def tell(self, life: str) -> None:
        self.turn += 1
        run_folder.write(self.folder / ROUND, GroupRound(self.turn, life, "h", 1))

    def state(self) -> MemberState | None:
        return run_folder.read(self.folder / STATE, MemberState)

    def is_at(self, life: str, *, running: bool) -> bool:
        state = self.state()
        return state is not None and state.turn == self.turn and (state.life, state.running) == (life, running)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    one = Launched(tmp_path)
    yield one
    if one.process is not None:
        one.process.terminate()
        one.process.wait(60)
        assert one.process.stdout is not None
        one.process.stdout.close()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """It runs: those that nobody has waited for yet do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_the_third_end_of_an_engine_ends_the_launcher_with_its_code(launched: Launched) -> None:
    process = launched.start(ENDS)
    for life in ("a", "b", "c"):
        assert process.poll() is None
        launched.tell(life)
        wait_for(lambda life=life: launched.is_at(life, running=False))  # type: ignore[misc]
        state = launched.state()
        assert state is not None
        assert state.why == "exit code 3"
    assert process.wait(60) == 3


def test_a_life_that_is_over_ends_all_that_the_engine_has_started(launched: Launched, tmp_path: Path) -> None:
    process = launched.start(STAYS)
    (tmp_path / "engine-0.json").write_text("of a life before")
    launched.tell("a")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert not (tmp_path / "engine-0.json").exists()
    wait_for(lambda: launched.is_at("a", running=True))
    launched.tell("")
    wait_for(lambda: launched.is_at("a", running=False))
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
    state = launched.state()
    assert state is not None
    assert state.why == "", "it was asked to end"


def test_an_engine_that_does_not_end_when_told_is_killed_soon(launched: Launched) -> None:
    process = launched.start(DEAF, grace_s="60")
    launched.tell("a")
    assert process.stdout is not None
    process.stdout.readline()
    wait_for(lambda: launched.is_at("a", running=True))
    began = time.perf_counter()  # the launcher's clock goes on while this process stands still
    launched.tell("")
    wait_for(lambda: launched.is_at("a", running=False))
    assert 0.9 < time.perf_counter() - began < 30, "it was told first; how long in all: test_group_alone"


def test_a_process_of_the_engine_in_a_session_of_its_own_ends_with_it(launched: Launched) -> None:
    process = launched.start(AWAY)
    launched.tell("a")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    wait_for(lambda: launched.is_at("a", running=True))
    launched.tell("")
    wait_for(lambda: launched.is_at("a", running=False))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_an_engine_compiles_is_of_its_life_alone(launched: Launched, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    code = "import os, time; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True); time.sleep(600)"
    (tmp_path / "compiled-before").mkdir()
    process = launched.start(code)
    launched.tell("a")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(tmp_path / "compiled-a")
    assert not (tmp_path / "compiled-before").exists()


def test_a_signal_ends_the_engine_and_then_the_launcher(launched: Launched) -> None:
    process = launched.start(STAYS)
    launched.tell("a")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_launcher_that_is_started_again_begins_no_life_a_second_time(launched: Launched) -> None:
    first = launched.start(STAYS)
    launched.tell("a")
    assert first.stdout is not None
    pid = int(first.stdout.readline())
    wait_for(lambda: launched.is_at("a", running=True))
    first.kill()
    first.wait(60)
    first.stdout.close()
    os.killpg(pid, signal.SIGKILL)
    launched.start(STAYS)
    wait_for(lambda: launched.is_at("a", running=False))
    time.sleep(0.5)
    assert launched.is_at("a", running=False)
    launched.tell("b")
    wait_for(lambda: launched.is_at("b", running=True))


def test_an_engine_ends_with_a_launcher_that_is_killed_alone(launched: Launched) -> None:
    process = launched.start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    launched.tell("a")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    wait_for(lambda: not lives(pid))


@pytest.mark.parametrize("first_has_ended", [False, True])
def test_what_a_launcher_that_was_killed_has_left_is_ended_before_its_life_is_called_over(
        launched: Launched, tmp_path: Path, first_has_ended: bool) -> None:
    process = launched.start(DEAF)
    launched.tell("a")
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    wait_for(lambda: launched.is_at("a", running=True))
    wait_for(lambda: (state := launched.state()) is not None and state.group == pids[0])
    process.kill()
    process.wait(60)
    process.stdout.close()
    if first_has_ended:
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: not lives(pids[0]))
    assert all(map(lives, pids[1:]))
    boot = run_folder.read(tmp_path / STATE, MemberState).boot  # type: ignore[union-attr]
    again = launched.start(DEAF)
    found = []
    wait_for(lambda: (state := launched.state()) is not None and state.boot != boot and (
        found.append((state.running, any(map(lives, pids)))) or not state.running))  # type: ignore[func-returns-value]
    assert (False, True) not in found, "it was called over while it lived"
    assert not any(map(lives, pids))
    launched.tell("b")
    assert again.stdout is not None
    assert int(again.stdout.readline().split()[0]) not in pids


def test_a_group_whose_number_is_anothers_by_now_is_left_alone(launched: Launched, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    try:
        now = remains.session_and_start(other.pid)
        for session, start in ((now[0], now[1] - 1), (now[0] + 1, now[1]), (now[0], now[1] + 1)):
            assert remains.find(MemberState("b", 1, 1, "a", True, "", other.pid, session, start), tmp_path) == []
        assert remains.find(MemberState("b", 1, 1, "a", True, "", other.pid, *now), tmp_path) == [other.pid]
    finally:
        other.kill()
        other.wait()


def test_a_process_that_has_ended_and_was_not_waited_for_is_not_left(tmp_path: Path) -> None:
    """Whoever waited until nothing is left would wait for as long as its parent lives."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    try:
        before = MemberState("b", 1, 1, "a", True, "", other.pid, *remains.session_and_start(other.pid))
        assert remains.find(before, tmp_path) == [other.pid]
        other.kill()
        wait_for(lambda: not lives(other.pid))
        assert remains.find(before, tmp_path) == []
    finally:
        other.kill()
        other.wait()


def test_a_program_that_cannot_be_started_counts_as_an_engine_that_ends(launched: Launched) -> None:
    process = launched.start(ENDS, program="/no/such/program")
    for life in ("a", "b"):
        launched.tell(life)
        wait_for(lambda life=life: launched.is_at(life, running=False))  # type: ignore[misc]
    state = launched.state()
    assert state is not None
    assert "No such file" in state.why
    launched.tell("c")
    assert process.wait(60) == 1


def test_nothing_is_begun_that_could_not_be_said_before(launched: Launched) -> None:
    process = launched.start(f"open({str(launched.folder / 'began')!r}, 'w').close(); import time; time.sleep(600)")
    wait_for(lambda: launched.state() is not None)
    in_the_way = launched.folder / f"{STATE}.tmp{process.pid}"

    def stands() -> bool:
        try:
            in_the_way.mkdir()
        except FileExistsError:  # the launcher says something at this moment
            return False
        return True

    wait_for(stands)
    launched.tell("a")
    time.sleep(1.5)
    assert not (launched.folder / "began").exists()
    in_the_way.rmdir()
    wait_for(lambda: launched.is_at("a", running=True))
    wait_for((launched.folder / "began").exists)


def test_an_engine_that_takes_its_time_to_end_leaves_no_silence(launched: Launched) -> None:
    code = ("import pathlib, signal, sys, time\n"
            f"here = pathlib.Path({str(launched.folder)!r})\n"
            "told = []\n"
            "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
            "(here / 'up').touch()\n"
            "while not (told and (here / 'go').exists()): time.sleep(0.05)")
    process = launched.start(code, grace_s="30")
    launched.tell("a")
    wait_for((launched.folder / "up").exists)
    process.terminate()
    before = launched.state()
    assert before is not None
    wait_for(lambda: (state := launched.state()) is not None and state.beat > before.beat + 1)
    after = launched.state()
    assert after is not None
    assert process.poll() is None
    assert after.running
    (launched.folder / "go").touch()
    assert process.wait(60) == 0


def test_of_members_of_one_life_on_one_host_each_launcher_ends_its_own(tmp_path: Path) -> None:
    before = MemberState("b", 1, 1, "life-of-both", running=True)
    env = {**os.environ, **remains.marks(before.life, tmp_path / "0")}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env) as other:
        try:
            wait_for(lambda: remains.find(before, tmp_path / "0") == [other.pid])
            assert remains.find(before, tmp_path / "1") == []
        finally:
            other.kill()
