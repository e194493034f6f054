"""Whether the folder that engines share is in memory, by the mounts that the process sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_sidecar.agent import folder

MOUNTS = """\
21 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
22 21 0:5 / /dev rw,nosuid shared:2 - devtmpfs devtmpfs rw
23 22 0:21 / /dev/shm rw,nosuid shared:3 - tmpfs tmpfs rw
24 21 0:30 /kv /run/xpyd-kv rw - tmpfs tmpfs rw
25 21 259:2 /var/kv /run/xpyd-kv2 rw,relatime - ext4 /dev/root rw
26 21 0:31 / /dev/huge\\040pages rw shared:9 - hugetlbfs hugetlbfs rw,pagesize=2M
27 21 259:2 / /twice rw - ext4 /dev/root rw
28 27 0:40 / /twice rw - tmpfs tmpfs rw
short line
"""


@pytest.mark.parametrize(("path", "kind"), [
    ("/", "ext4"), ("/dev", "devtmpfs"), ("/dev/shm", "tmpfs"), ("/dev/shm/a/b", "tmpfs"), ("/dev/shmx", "devtmpfs"),
    ("/run/xpyd-kv", "tmpfs"), ("/run/xpyd-kv2", "ext4"), ("/dev/huge pages/x", "hugetlbfs"), ("/twice", "tmpfs"),
])
def test_the_mount_that_holds_a_path_says_what_it_is_on(path: str, kind: str) -> None:
    assert folder.file_system(path, MOUNTS) == kind


def test_what_no_mount_holds_is_unknown() -> None:
    assert folder.file_system("/x", "23 22 0:21 / /dev/shm rw - tmpfs tmpfs rw") == ""
    assert folder.file_system("/x", "") == ""


def test_a_folder_on_a_disk_is_trouble_and_one_in_memory_is_none(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert "is on ext4, not in memory" in folder.trouble("/run/xpyd-kv2", mounts)
    assert folder.trouble("/run/xpyd-kv", mounts) == ""
    assert folder.trouble("/dev/shm", tmp_path / "missing") == "", "it cannot be told"


def test_the_mounts_of_this_machine_can_be_read() -> None:
    assert folder.file_system("/proc/self", folder.MOUNTS.read_text()) == "proc"
