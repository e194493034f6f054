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

ENDS = "import sys; sys.exit(3)"
STAYS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), flush=True)
time.sleep(60)
"""
AWAY = """
import subprocess, sys, time
away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(away.pid, flush=True)
time.sleep(60)
"""


class Launched:
    """A launcher of one command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.turn = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self, code: str, grace_s: str = "5") -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "xpyd_sidecar.member", "--run-dir", str(self.folder), "--grace-s", grace_s, "--",
             sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
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
        one.process.wait(20)
        assert one.process.stdout is not None
        one.process.stdout.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_third_end_of_an_engine_ends_the_launcher_with_its_code(launched: Launched) -> None:
    process = launched.start(ENDS)
    for life in ("a", "b", "c"):
        assert process.poll() is None
        launched.tell(life)
        wait_for(lambda life=life: launched.is_at(life, running=False))  # type: ignore[misc]
        state = launched.state()
        assert state is not None
        assert state.why == "exit code 3"
    assert process.wait(10) == 3


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
    code = "import os, time; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True); time.sleep(60)"
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
    assert process.wait(10) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_launcher_that_is_started_again_begins_no_life_a_second_time(launched: Launched) -> None:
    first = launched.start(STAYS)
    launched.tell("a")
    assert first.stdout is not None
    pid = int(first.stdout.readline())
    wait_for(lambda: launched.is_at("a", running=True))
    first.kill()
    first.wait(10)
    first.stdout.close()
    os.killpg(pid, signal.SIGKILL)
    launched.start(STAYS)
    wait_for(lambda: launched.is_at("a", running=False))
    time.sleep(0.5)
    assert launched.is_at("a", running=False)
    launched.tell("b")
    wait_for(lambda: launched.is_at("b", running=True))
