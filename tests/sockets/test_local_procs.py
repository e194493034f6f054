from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from xpyd_operator.local import procs


def test_this_process_is_alive_and_knows_itself() -> None:
    me = procs.identify(os.getpid())
    assert me is not None
    assert procs.alive(me)
    assert not procs.alive(msgspec.structs.replace(me, start=me.start + 1))
    assert not procs.alive(msgspec.structs.replace(me, boot="other"))
    assert os.getpid() in {stat.pid for stat in procs.all_processes()}


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    identity = procs.identify(child.pid)
    assert identity is not None
    assert procs.send(identity.pid, identity.start, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    stat = procs.read_stat(child.pid)
    assert stat is not None
    assert stat.dead
    assert not procs.alive(identity)
    assert procs.identify(child.pid) is None
    assert child.pid not in {stat.pid for stat in procs.all_processes()}
    procs.reap(child.pid)
    assert procs.read_stat(child.pid) is None
    child.wait()


def test_names_with_spaces_and_parentheses_are_read(tmp_path: Path) -> None:
    script = tmp_path / "a) S (b"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o700)
    child = subprocess.Popen([str(script)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        stat = procs.read_stat(child.pid)
        assert stat is not None
        assert stat.session == child.pid
        assert stat.parent == os.getpid()
    finally:
        child.communicate()


def test_nobody_is_signalled_in_place_of_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert not procs.send(child.pid, 1, signal.SIGKILL)
    assert procs.read_stat(child.pid) is None
    assert procs.environment_marker(child.pid) == ""


def test_marker_and_log_of_a_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "ab") as file:
        child = subprocess.Popen(["sleep", "1000"], env={procs.MARKER: "/a/b/c"}, stdout=file)
    try:
        assert procs.environment_marker(child.pid) == "/a/b/c"
        assert procs.writes_to(child.pid, log)
        assert not procs.writes_to(child.pid, tmp_path)
        assert [stat.pid for stat in procs.members(None, "/a/b", log)] == [child.pid]
        assert procs.members(None, "/a/b/c/d", log) == []
        assert procs.members(None, "/a/bb", log) == []
    finally:
        child.kill()
        child.wait()


def test_a_process_within_exec_has_its_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procs, "EXEC_DEADLINE", 60.0)  # it may have no processor meanwhile
    # Popen returns as soon as the child has let go of this process's memory, before its own environment is laid out.
    for _ in range(400):
        child = subprocess.Popen(["sleep", "1000"], env={procs.MARKER: "/a/b/c"})
        try:
            assert procs.environment_marker(child.pid) == "/a/b/c"
        finally:
            child.kill()
            child.wait()


def test_a_process_without_an_environment_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procs, "EXEC_DEADLINE", 60.0)
    child = subprocess.Popen(["sleep", "1000"], env={})
    try:
        while (stat := procs.read_stat(child.pid)) is None or stat.executes:
            assert child.poll() is None
        began = time.monotonic()
        assert procs.environment_marker(child.pid) == ""
        assert time.monotonic() - began < 30.0
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(("state", "flags", "environment_end", "executes"), [
    ("R", 0, 0, True), ("S", procs.KERNEL_THREAD, 0, False), ("Z", 0, 0, False), ("S", 0, 4096, False)])
def test_who_has_no_environment_and_is_no_kernel_thread_and_not_dead_executes(
        state: str, flags: int, environment_end: int, executes: bool) -> None:
    stat = procs.Stat(pid=9, state=state, parent=1, session=9, start=7, flags=flags, environment_end=environment_end)
    assert stat.executes == executes
