from __future__ import annotations

import errno
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from xpyd_sidecar.process import resources
from xpyd_sidecar.process.resources import (
    PER_REQUEST,
    RESERVE,
    Complaint,
    Lack,
    is_own_lack,
    open_limits,
    raise_files,
    words,
)
from xpyd_sidecar.router.http.server import ADMIN_CONNECTIONS, REFUSED


@pytest.mark.parametrize("number", sorted(resources.WORDS))
def test_a_lack_of_files_memory_or_ports_is_our_own(number: int) -> None:
    error = OSError(number, "as the kernel says it")
    assert is_own_lack(error)
    assert "left" in words(error)


@pytest.mark.parametrize("error", [
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ConnectionResetError(errno.ECONNRESET, "reset"),
    OSError(errno.EHOSTUNREACH, "unreachable"), OSError("several"), TimeoutError(), ValueError(errno.EMFILE)])
def test_everything_else_is_the_other_side_s(error: Exception) -> None:
    assert not is_own_lack(error)


@pytest.mark.parametrize("files", [70, 100, 256, 1024, 4096, 65536, 1 << 20])
def test_what_is_allowed_fits_into_the_limit_of_files(files: int) -> None:
    found = open_limits(files, 16384, 4096)
    assert 1 <= found.in_flight <= 4096
    assert found.in_flight <= found.connections <= 16384
    if files >= RESERVE + PER_REQUEST + 1:
        assert RESERVE + found.connections + (PER_REQUEST - 1) * found.in_flight <= files


def test_the_reserve_has_room_for_all_that_are_open_beside_clients_with_a_place() -> None:
    assert RESERVE >= REFUSED + ADMIN_CONNECTIONS + REFUSED + 128


def test_a_limit_that_is_high_enough_changes_nothing() -> None:
    assert open_limits(65536, 16384, 4096) == resources.OpenLimits(16384, 4096)
    assert open_limits(1024, 16384, 4096) == resources.OpenLimits(352, 176)


@pytest.mark.parametrize(("soft", "hard", "then"), [(64, 512, 512), (512, 512, 512)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, then: int) -> None:
    script = ("import resource; from xpyd_sidecar.process.resources import raise_files; "
              f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
              "print(raise_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(then), str(then), str(hard)]


def test_a_limit_that_cannot_be_raised_is_said_and_kept(monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 200))
    monkeypatch.setattr("resource.setrlimit", refuse)
    assert raise_files() == 100
    assert "stays at 100" in caplog.text


def test_no_more_files_are_asked_for_than_the_loop_can_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1 << 30))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: asked.append(limits))
    assert raise_files() == resources.MOST_FILES
    assert asked == [(resources.MOST_FILES, 1 << 30)]


def test_a_lack_is_told_once_a_second_with_how_often(caplog: pytest.LogCaptureFixture) -> None:
    complaint = Complaint("no connection")
    with caplog.at_level(logging.WARNING):
        for at in (10.0, 10.1, 10.9, 11.0, 11.5, 20.0):
            complaint.add(OSError(errno.EMFILE, "x") if at < 20 else Lack("no files"), at)
    assert [(record.getMessage(), record.times) for record in caplog.records] == [
        ("no connection: no file descriptors are left to this process", 1),
        ("no connection: no file descriptors are left to this process", 3), ("no connection: no files", 2)]


@pytest.mark.parametrize(("files", "found"), [
    ({}, 0),
    ({"proc/meminfo": "MemTotal:       16 kB\nMemFree: 1 kB\n"}, 16 << 10),
    ({"proc/meminfo": "MemTotal: 16 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 16 << 10),
    ({"proc/meminfo": "MemTotal: 16 kB\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096),
    ({"proc/meminfo": "MemTotal: 16 kB\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 62}\n"}, 16 << 10),
], ids=["unknown", "machine", "no limit", "limit", "no limit of version 1"])
def test_memory_is_that_of_the_container_or_of_the_machine(tmp_path: Path, files: dict[str, str], found: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert resources.memory_bytes(tmp_path) == found
