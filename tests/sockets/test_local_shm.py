from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_service import wait

from xpyd_operator.local import procs, shm

CODE = """
import mmap, sys, time
file = open(sys.argv[1], "r+b")
kept = mmap.mmap(file.fileno(), 4096)
if sys.argv[2] == "mapped": file.close()
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/xpyd_unit_{os.getpid()}")
    path.write_bytes(b"\0" * 4096)
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_found_while_used_and_removed_when_its_user_is_gone(segment: Path, tmp_path: Path, how: str) -> None:
    listed = tmp_path / "shm"
    user = subprocess.Popen([sys.executable, "-S", "-c", CODE, str(segment), how], stdout=subprocess.PIPE)
    try:
        assert user.stdout is not None
        user.stdout.readline()
        stat = procs.read_stat(user.pid)
        assert stat is not None
        assert shm.used_by([stat]) == {str(segment)}
        shm.remember(listed, shm.used_by([stat]))
        shm.remember(listed, {"/dev/shm/xpyd_never_there"})
        assert shm.remembered_names(listed) == {str(segment), "/dev/shm/xpyd_never_there"}
        assert shm.clean(listed) == [], "somebody uses it still"
        assert segment.exists()
        shm.remember(listed, {str(segment)})
    finally:
        user.kill()
        user.wait()
        user.stdout.close()
    assert shm.clean(listed) == [str(segment)]
    assert not segment.exists()
    assert not listed.exists()


SEMAPHORE = """
import multiprocessing, time
kept = multiprocessing.get_context("spawn").Lock()
print(kept._semlock.name, flush=True)
time.sleep(1000)
"""


def test_a_semaphore_is_found_by_its_file_and_goes_with_processes_that_were_killed_whole(tmp_path: Path) -> None:
    listed = tmp_path / "shm"
    user = subprocess.Popen([sys.executable, "-S", "-c", SEMAPHORE], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert user.stdout is not None
        path = Path(f"/dev/shm/sem.{user.stdout.readline().decode().strip().removeprefix('/')}")
        assert path.exists()
        session = [stat for stat in procs.all_processes() if stat.session == user.pid]
        assert shm.used_by(session) == {str(path)}
        shm.remember(listed, shm.used_by(session))
        assert shm.clean(listed) == [], "somebody uses it still"
        shm.remember(listed, {str(path)})
    finally:
        os.killpg(user.pid, signal.SIGKILL)  # its resource tracker, too
        user.wait()
        user.stdout.close()
    wait(lambda: not [stat for stat in procs.all_processes() if stat.session == user.pid])
    assert path.exists()
    assert shm.clean(listed) == [str(path)]
    assert not path.exists()


def test_a_list_is_whole_at_every_moment_in_which_a_supervisor_may_be_killed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "shm"
    shm.remember(listed, {"/dev/shm/one"})

    def killed(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(shm.os, "replace", killed)
    with pytest.raises(InterruptedError):
        shm.remember(listed, {"/dev/shm/other"})
    assert shm.remembered_names(listed) == {"/dev/shm/one"}


def test_nothing_listed_nothing_removed(segment: Path, tmp_path: Path) -> None:
    assert shm.clean(tmp_path / "none") == []
    assert segment.exists()
