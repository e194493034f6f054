from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xpyd_operator.local import lock

CODE = """
import sys, time
from pathlib import Path
from xpyd_operator.local import lock
with lock.hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_one_holder_and_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock.holder(path) == 0
    with lock.hold_lock(path):
        assert lock.holder(path) == os.getpid()
        with pytest.raises(lock.LockHeld, match=f"pid {os.getpid()}"), lock.hold_lock(path):
            pass
    assert lock.holder(path) == 0


def test_who_only_looks_turns_no_supervisor_away_however_long_that_takes(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    looks = os.open(path, os.O_RDWR)
    fcntl.flock(looks, fcntl.LOCK_SH)  # as ``holder`` does, and then has no processor for a while
    timer = threading.Timer(5 * lock.TRIES * lock.PAUSE_S, os.close, [looks])
    timer.start()
    with lock.hold_lock(path):
        assert lock.holder(path) == os.getpid()
    timer.join()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = subprocess.Popen([sys.executable, "-c", CODE, str(path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert lock.holder(path) == other.pid
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert lock.holder(path) == 0
    with lock.hold_lock(path):
        assert lock.holder(path) == os.getpid()


def test_a_holder_that_cannot_be_named_is_no_process(tmp_path: Path) -> None:
    """Whoever ends a holder that does not end by itself must not end process 1."""
    path = tmp_path / "lock"
    gone = subprocess.Popen(["true"])
    gone.wait()
    with lock.hold_lock(path):
        for written in (f"{gone.pid}\n", "", "x"):
            path.write_text(written)
            assert lock.holder(path) == -1, written
