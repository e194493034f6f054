"""Whether a host lets a process use RDMA."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_sidecar.transport.nixl import host as rdma_host


def test_devices_are_what_verbs_are_spoken_to(tmp_path: Path) -> None:
    assert rdma_host.no_device(tmp_path / "none") == f"no RDMA device is here (no {tmp_path / 'none'}/uverbs*)"
    (tmp_path / "rdma_cm").touch()
    assert rdma_host.no_device(tmp_path) == f"no RDMA device is here (no {tmp_path}/uverbs*)"
    (tmp_path / "uverbs0").touch()
    assert rdma_host.no_device(tmp_path) == ""


@pytest.mark.parametrize(("limit", "capabilities", "fits"), [
    (8 << 20, "0", False), (1 << 30, "0", True), (-1, "0", True), (8 << 20, "4000", True), (8 << 20, "3fff", False)])
def test_memory_that_must_be_locked_fits_the_limit_or_the_capability(
        tmp_path: Path, limit: int, capabilities: str, fits: bool) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    reason = rdma_host.unlocked(512 << 20, status, limit)
    assert (reason == "") is fits
    if not fits:
        assert reason == ("512 MiB must be locked, and the limit (memlock) is 8 MiB: raise it for the container runtime, "
                          "or add the capability IPC_LOCK")


def test_who_cannot_read_its_capabilities_has_none(tmp_path: Path) -> None:
    assert rdma_host.unlocked(1, tmp_path / "none", 0) != ""
