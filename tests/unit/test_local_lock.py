from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xpyd_operator.local import lock

CODE = """
import sys, time
from pathlib import Path
from xpyd_operator.local import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_one_holder_and_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock.holder(path) == 0
    with lock.held(path):
        assert lock.holder(path) == os.getpid()
        with pytest.raises(lock.LockHeld, match=f"pid {os.getpid()}"), lock.held(path):
            pass
    assert lock.holder(path) == 0


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
    with lock.held(path):
        assert lock.holder(path) == os.getpid()
