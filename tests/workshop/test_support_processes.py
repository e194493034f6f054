"""Processes of tests are never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
from processes import Group, ProcessFailed, free_port

CHILD = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(600)"
UP_S = 120.0
"""For a process to come up, on a machine that is busy with other things."""


def alive(group: int) -> bool:
    return subprocess.run(["ps", "-o", "pid=", "-g", str(group)], capture_output=True, check=False).stdout.strip() != b""


def started(folder: Path) -> Group:
    group = Group([sys.executable, "-S", "-c", CHILD], log=folder / "log")
    group.wait_until(lambda: "up" in group.tail(), UP_S, "up", poll_s=0.01)
    return group


def test_kill_ends_the_children_too(tmp_path: Path) -> None:
    group = started(tmp_path)
    assert len(group.pids()) == 2
    group.kill()
    group.kill()
    assert group.pids() == []
    assert group.returncode() == -9


def test_kill_ends_children_in_groups_of_their_own(tmp_path: Path) -> None:
    program = CHILD.replace("'60'])", "'60'], process_group=0)")
    group = Group([sys.executable, "-S", "-c", program], log=tmp_path / "log")
    group.wait_until(lambda: "up" in group.tail(), UP_S, "up", poll_s=0.01)
    assert len(group.pids()) == 2
    group.kill()
    assert group.pids() == []


def test_shared_memory_of_a_killed_process_goes_with_it(tmp_path: Path) -> None:
    program = ("from multiprocessing.shared_memory import SharedMemory as S; import time\n"
               "s = S(create=True, size=4096); print('name', s.name, 'end', flush=True); time.sleep(60)")
    group = Group([sys.executable, "-c", program], log=tmp_path / "log")
    group.wait_until(lambda: "end" in group.tail(), UP_S, "up", poll_s=0.01)
    name = Path("/dev/shm") / group.tail().split()[1]
    assert name.exists()
    group.kill()
    assert not name.exists()


SEMAPHORE = """
import multiprocessing, tempfile, time
context = multiprocessing.get_context("spawn")
lock = context.Lock()
tempfile.NamedTemporaryFile(delete=False).write(b"left")
print("name", lock._semlock.name.lstrip("/"), tempfile.gettempdir(), "end", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_semaphores_and_temporary_files_of_a_killed_process_go_with_it(tmp_path: Path, stopped: bool) -> None:
    """Where processes are spawned, a semaphore keeps its name, and who it is by no map tells."""
    group = Group([sys.executable, "-c", SEMAPHORE], log=tmp_path / "log")
    group.wait_until(lambda: "end" in group.tail(), UP_S, "up", poll_s=0.01)
    _, name, folder, _ = group.tail().split()
    left = Path("/dev/shm") / f"sem.{name}"
    assert left.exists()
    assert any(Path(folder).iterdir())
    if stopped:
        group.signal_all(signal.SIGSTOP)
    group.kill()
    assert not left.exists()
    assert not Path(folder).exists()
    assert group.pids() == []


def test_stop_reports_the_exit_code(tmp_path: Path) -> None:
    group = started(tmp_path)
    assert group.stop(5) == -15
    assert group.pids() == []


def test_a_process_that_ends_early_fails_with_its_log(tmp_path: Path) -> None:
    program = "print('no such model'); raise SystemExit(3)"
    group = Group([sys.executable, "-S", "-c", program], log=tmp_path / "log", name="e0")
    with pytest.raises(ProcessFailed, match=r"e0 ended with 3 before it was healthy(.|\n)*no such model"):
        group.wait_until(lambda: False, 10, "healthy", poll_s=0.01)
    group.kill()


def test_a_process_that_is_late_fails_with_its_log(tmp_path: Path) -> None:
    group = started(tmp_path)
    with pytest.raises(ProcessFailed, match=r"not healthy within 0 s(.|\n)*up"):
        group.wait_until(lambda: False, 0.05, "healthy", poll_s=0.01)
    group.kill()


def test_killed_tests_leave_no_process(tmp_path: Path) -> None:
    """kill -9 of the interpreter that started a group: the guard ends the group."""
    support = Path(__file__).resolve().parents[1] / "support"
    program = (f"import sys, time; sys.path.insert(0, {str(support)!r}); from pathlib import Path\n"
               f"from processes import Group\n"
               f"g = Group(['sleep', '60'], log=Path({str(tmp_path / 'log')!r})); print(g.pid, flush=True); time.sleep(60)")
    test = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    group = int(test.stdout.readline())
    assert alive(group)
    test.kill()
    test.wait()
    test.stdout.close()
    end = time.monotonic() + 30
    while alive(group) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(group)


def test_killed_tests_leave_no_home_of_a_service(tmp_path: Path) -> None:
    support = Path(__file__).resolve().parents[1] / "support"
    for name in ("begun one", "ended"):
        (tmp_path / name / "tiny").mkdir(parents=True)
    program = (f"import sys, os; sys.path.insert(0, {str(support)!r}); from pathlib import Path\n"
               f"from processes import home_begins, home_ends\n"
               f"here = Path({str(tmp_path)!r})\n"
               f"home_begins(here / 'begun one'); home_begins(here / 'ended'); home_ends(here / 'ended')\n"
               f"os.kill(os.getpid(), 9)")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    end = time.monotonic() + 30
    while (tmp_path / "begun one").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ended"]


def test_a_free_port_is_nobody_elses_who_asks_for_one_or_for_any() -> None:
    """Nobody listens there yet: an engine that was given it does in a minute."""
    ours = {free_port() for _ in range(20)}
    assert len(ours) == 20
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= port <= last for port in ours)
    port = min(ours)
    program = f"import processes; processes.PORTS = range({port}, {port + 1}); print(processes.free_port())"
    environment = {"PYTHONPATH": str(Path(processes.__file__).parent)}

    def another() -> str:
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]

    assert another() == "OSError: no 1 free ports in a row"
    for _ in range(processes.CLAIMS):
        free_port()
    assert another() == str(port), "it is held on to for a while"
