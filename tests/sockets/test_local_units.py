"""Real small processes: sessions, orphans, recycled ids, ends that are counted once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from xpyd_operator.errors import LocalError
from xpyd_operator.local import procs
from xpyd_operator.local.units import Unit, how_it_ended, wait_until

SLEEP = ("sleep", "1000")
FAMILY = """
import os, subprocess, sys, time
kwargs = {"start_new_session": True} if "away" in sys.argv else {}
env = {} if "bare" in sys.argv else None
child = subprocess.Popen(["sleep", "1000"], env=env, **kwargs)
print("child", child.pid, flush=True)
time.sleep(1000)
"""
SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print("made", lock._semlock.name, flush=True)
time.sleep(1000)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[[str], Unit]]:
    made: list[Unit] = []

    def one(name: str = "engine") -> Unit:
        made.append(Unit(name, tmp_path / "unit", f"{tmp_path}/{name}"))
        return made[-1]

    yield one
    for unit in made:
        await unit.kill()


async def wait_output(unit: Unit, word: str) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        text = unit.log.read_text() if unit.log.exists() else ""
        if word in text:
            return text
        await asyncio.sleep(0.02)
    raise AssertionError(f"{word!r} not in {text!r}")


async def test_started_alive_stopped(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    assert not unit.alive()
    assert unit.observe(time.time()).exit == "it was not started yet"
    leader = await unit.start(SLEEP, {})
    assert unit.alive()
    assert procs.environment_marker(leader.pid) == unit.marker
    stat = procs.read_stat(leader.pid)
    assert stat is not None
    assert stat.session == leader.pid
    await unit.stop(5.0)
    assert not unit.alive()
    assert unit.processes() == []
    assert unit.note_end(time.time()) is None, "a stop that was asked for is no crash"


async def test_an_unasked_end_is_counted_once_and_by_any_supervisor(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    leader = await unit.start(SLEEP, {})
    os.kill(leader.pid, signal.SIGKILL)
    assert await wait_until(lambda: not unit.alive(), 60)
    ends = unit.note_end(time.time())
    assert ends is not None
    assert (ends.crashes, ends.exit) == (1, "killed by SIGKILL")
    assert unit.note_end(time.time()) is None
    another = make("engine")
    assert another.note_end(time.time()) is None
    assert another.observe(time.time()).crashes == 1


async def test_crashes_in_a_row_grow_and_are_forgotten_after_a_healthy_run(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    for expected in (1, 2):
        await unit.start(("false",), {})
        assert await wait_until(lambda: not unit.alive(), 60)
        ends = unit.note_end(time.time())
        assert ends is not None
        assert (ends.crashes, ends.exit) == (expected, "exit code 1")
    await unit.start(SLEEP, {})
    assert unit.observe(time.time() + 299).crashes == 2
    assert unit.observe(time.time() + 301).crashes == 0


async def test_a_process_that_ends_while_its_start_looks_for_it_has_come_up(
        make: Callable[[str], Unit], monkeypatch: pytest.MonkeyPatch) -> None:
    unit, look = make("engine"), Unit.leader

    def leader(self: Unit) -> procs.Identity | None:
        found = look(self)
        if found is None and self._child is not None:
            self._child.wait(60)  # it comes up and ends just then
        return found

    monkeypatch.setattr(Unit, "leader", leader)
    assert await unit.start(("false",), {}) == unit.leader()
    assert await wait_until(lambda: not unit.alive(), 60)  # where it was there with the first look
    ends = unit.note_end(time.time())
    assert ends is not None
    assert (ends.crashes, ends.exit) == (1, "exit code 1")


SAYS = """
import sys
sys.stderr.write("(EngineCore pid=7) ERROR 11-25 21:53:42 [core.py:1] Traceback (most recent call last):\\n"
                 "(EngineCore pid=7) ERROR 11-25 21:53:42 [core.py:1] ValueError: no such cache\\n")
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""


async def test_an_end_by_itself_is_told_with_its_innermost_cause(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    for script, exit_ in ((SAYS, "exit code 1: ValueError: no such cache"), ("raise SystemExit(1)", "exit code 1"),
                          (f"{SAYS.partition('raise')[0]}import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
                           "killed by SIGKILL")):
        await unit.start((sys.executable, "-c", script), {})
        assert await wait_until(lambda: not unit.alive(), 60)
        ends = unit.note_end(time.time())
        assert ends is not None
        assert ends.exit == exit_, "what an earlier start wrote into the log is not its cause"


async def test_a_stubborn_process_is_killed_after_its_grace(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    await unit.start((sys.executable, "-c", STUBBORN), {})
    await wait_output(unit, "up")
    began = time.monotonic()
    await unit.stop(0.3)
    assert 0.3 <= time.monotonic() - began < 30
    assert not unit.processes()


@pytest.mark.parametrize("kind", ["", "away", "bare"])
async def test_grandchildren_of_a_killed_leader_are_found_and_ended(make: Callable[[str], Unit], kind: str) -> None:
    """In the session with the marker; in a session of its own; without the marker (a changed title overwrites it)."""
    unit = make("engine")
    leader = await unit.start((sys.executable, "-c", FAMILY, kind), {})
    child = int((await wait_output(unit, "child ")).partition("child ")[2].split()[0])
    os.kill(leader.pid, signal.SIGKILL)
    assert await wait_until(lambda: not unit.alive(), 60)
    assert [process.pid for process in make("engine").processes()] == [child]
    await make("engine").kill()
    assert procs.identify(child) is None


async def test_a_killed_unit_leaves_no_semaphore_though_nobody_has_it_open(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    await unit.start((sys.executable, "-c", SEMAPHORE), {})
    name = "sem." + (await wait_output(unit, "made")).split("made /")[1].split()[0]
    assert name in os.listdir("/dev/shm")
    assert len(unit.processes()) == 2, "the process and its resource tracker"
    await unit.kill()
    assert not unit.processes()
    assert name not in os.listdir("/dev/shm")


async def test_a_start_ends_what_is_left_of_the_one_before(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    leader = await unit.start((sys.executable, "-c", FAMILY), {})
    child = int((await wait_output(unit, "child ")).partition("child ")[2].split()[0])
    os.kill(leader.pid, signal.SIGKILL)
    await unit.start(SLEEP, {})
    assert procs.identify(child) is None
    assert len(unit.processes()) == 1


async def test_a_recycled_process_id_is_never_touched(make: Callable[[str], Unit], tmp_path: Path) -> None:
    """The record names a process id that a stranger has by now (with an earlier start time, as after a wrap)."""
    unit = make("engine")
    stranger = subprocess.Popen(SLEEP, start_new_session=True)  # noqa: ASYNC220 (returns at once)
    try:
        found = procs.identify(stranger.pid)
        assert found is not None
        forged = msgspec.structs.replace(found, start=found.start - 5)
        (tmp_path / "unit").mkdir(exist_ok=True)
        (tmp_path / "unit" / "engine.pid").write_bytes(msgspec.json.encode(forged))
        assert not unit.alive()
        assert unit.processes() == []
        await unit.stop(1.0)
        assert stranger.poll() is None
        assert not procs.send(found.pid, found.start - 5, signal.SIGKILL)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_record_of_an_earlier_boot_is_dead(make: Callable[[str], Unit], tmp_path: Path) -> None:
    unit = make("engine")
    leader = await unit.start(SLEEP, {})
    other = msgspec.structs.replace(leader, boot="another")
    (tmp_path / "unit" / "engine.pid").write_bytes(msgspec.json.encode(other))
    assert not unit.alive()
    assert [process.pid for process in unit.processes()] == [leader.pid], "the marker still tells"


async def test_a_unit_outlives_a_killed_supervisor_and_is_adopted(make: Callable[[str], Unit], tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal
from pathlib import Path
from xpyd_operator.local.units import Unit
unit = Unit("engine", Path({str(tmp_path / "unit")!r}), {f"{tmp_path}/engine"!r})
asyncio.run(unit.start(["sleep", "1000"], {{}}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await supervisor.wait() == -signal.SIGKILL
    unit = make("engine")
    assert unit.alive()
    await unit.stop(5.0)
    assert not unit.processes()


async def test_a_command_that_does_not_exist_is_a_crash_with_a_reason_in_the_log(make: Callable[[str], Unit]) -> None:
    unit = make("engine")
    await unit.start(("no-such-command",), {})
    assert "cannot run no-such-command" in await wait_output(unit, "cannot run")
    assert await wait_until(lambda: not unit.alive(), 60)
    ends = unit.note_end(time.time())
    assert ends is not None
    assert ends.exit == "exit code 127"


async def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((LocalError, OSError)):
        await Unit("engine", tmp_path / "file" / "unit", "m").start(SLEEP, {})


def test_ends_in_words() -> None:
    assert how_it_ended(None) == "it ended"
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(-9) == "killed by SIGKILL"
    assert how_it_ended(-99) == "killed by signal 99"
