"""What a rank offers its peers over NIXL, and how it is refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest
from nixl_fake import World
from running_threads import until_none_runs

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import nixl_setup
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.nixl import driver as nixl_driver

KEEP = 4 << 20


def copies(size: int) -> Chunk:
    return Chunk(None, memoryview(bytearray(size)))


def prepare(transport: str, folder: Path,
            environ: dict[str, str] | None = None) -> tuple[LinkOptions, object, nixl_setup.Make]:
    options = KvOptions(transport=transport)  # type: ignore[arg-type]
    return nixl_setup.prepare(options, LinkOptions(transport), 1 << 20, KEEP, copies, environ or {}, folder)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(nixl_setup, "unlocked", lambda _: "")
    return tmp_path


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(nixl_driver, "load", lambda _: (world.driver(), ""))
    return world


@pytest.mark.parametrize("transport", ["tcp", "shm", "nccl"])
def test_other_transports_look_for_nothing(transport: str, device: Path) -> None:
    assert prepare(transport, device) == (LinkOptions(transport), None, copies)


@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_memory_for_copies_is_registered_once_and_never_made_anew(transport: str, device: Path, world: World) -> None:
    ways, reading, make = prepare(transport, device)
    assert reading is not None
    assert ways.reads == ways.nixl is not None
    assert make(KEEP).view.obj is make(KEEP).view.obj
    assert reading.size == KEEP  # type: ignore[attr-defined]
    assert len(world.agents) == 1
    reading.hub.stop()  # type: ignore[attr-defined]


def test_without_a_device_nothing_is_loaded_unless_ucx_was_told_what_to_take(tmp_path: Path, world: World) -> None:
    ways, reading, make = prepare("auto", tmp_path, {"UCX_TLS": "tcp"})
    assert (ways.nixl, reading, make) == (None, None, copies)
    assert ways.no_nixl.startswith("no RDMA device is here")
    with pytest.raises(ConfigError, match=r"rdma cannot be used: no RDMA device is here.*resources: rdma/.*UCX_TLS"):
        prepare("rdma", tmp_path)
    assert world.agents == {}
    ways, reading, _ = prepare("rdma", tmp_path, {"UCX_TLS": "tcp"})
    assert ways.nixl is not None
    reading.hub.stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("broken", ["target", "register"])
def test_what_nixl_refuses_is_told_and_leaves_no_thread(device: Path, world: World, broken: str) -> None:
    world.broken = broken
    with pytest.raises(ConfigError, match=r"rdma cannot be used: NIXL 1.5.1: FakeError: .*write kv.transport: auto or tcp"):
        prepare("rdma", device)
    ways, reading, _ = prepare("auto", device)
    assert (ways.nixl, reading) == (None, None)
    assert "FakeError" in ways.no_nixl
    until_none_runs("xpyd-nixl")


def test_too_little_memory_to_lock_is_told_before_anything_is_loaded(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_setup, "unlocked", lambda needed: f"{needed >> 20} MiB")
    with pytest.raises(ConfigError, match="rdma cannot be used: 516 MiB;"):
        prepare("rdma", device)


def test_an_image_without_nixl_is_told_where_it_belongs(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(nixl_driver.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"nixl cannot be loaded: No module named 'nixl._api' \(add it to engine.image\)"):
        prepare("rdma", device)


@pytest.mark.parametrize(("environ", "settings"), [
    ({}, "TLS=^tcp,TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"),
    ({"UCX_TLS": "tcp"}, "TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k")])
def test_tcp_is_out_unless_ucx_was_told_what_to_take(
        monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], settings: str) -> None:
    monkeypatch.setattr(nixl_driver.importlib, "import_module", lambda _: object())
    monkeypatch.setattr(nixl_driver, "version", lambda: "1.5.1")
    driver, reason = nixl_driver.load(environ)
    assert reason == ""
    assert driver is not None
    assert driver._parameters == {"engine_config": settings}


def test_devices_are_what_verbs_are_spoken_to(tmp_path: Path) -> None:
    assert nixl_setup.no_device(tmp_path / "none") == f"no RDMA device is here (no {tmp_path / 'none'}/uverbs*)"
    (tmp_path / "rdma_cm").touch()
    assert nixl_setup.no_device(tmp_path) == f"no RDMA device is here (no {tmp_path}/uverbs*)"
    (tmp_path / "uverbs0").touch()
    assert nixl_setup.no_device(tmp_path) == ""


@pytest.mark.parametrize(("limit", "capabilities", "fits"), [
    (8 << 20, "0", False), (1 << 30, "0", True), (-1, "0", True), (8 << 20, "4000", True), (8 << 20, "3fff", False)])
def test_memory_that_must_be_locked_fits_the_limit_or_the_capability(
        tmp_path: Path, limit: int, capabilities: str, fits: bool) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    reason = nixl_setup.unlocked(512 << 20, status, limit)
    assert (reason == "") is fits
    if not fits:
        assert reason == ("512 MiB must be locked, and the limit (memlock) is 8 MiB: raise it for the container runtime, "
                          "or add the capability IPC_LOCK")


def test_who_cannot_read_its_capabilities_has_none(tmp_path: Path) -> None:
    assert nixl_setup.unlocked(1, tmp_path / "none", 0) != ""
