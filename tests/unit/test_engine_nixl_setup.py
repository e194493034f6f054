"""What a rank has of NIXL, and how it is refused at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nixl_fake import World
from running_threads import until_none_runs

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.worker import nixl_setup
from xpyd_sidecar.engine.worker.nixl_setup import NixlMemorySizes, NixlSetup
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.reads import READ_BYTES, READS
from xpyd_sidecar.kv.session_bodies import Able
from xpyd_sidecar.memory.allocation import Allocation
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.transport.nixl import driver as nixl_driver
from xpyd_sidecar.transport.nixl.serve import NixlServer

SIZES = NixlMemorySizes(store=4 << 20, order=2 << 20, ring=0)


def memory(size: int) -> Chunk:
    return Chunk(None, memoryview(bytearray(size)))


def prepare(transport: str, folder: Path, environ: dict[str, str] | None = None,
            sizes: NixlMemorySizes = SIZES) -> NixlSetup:
    options = KvOptions(transport=transport)  # type: ignore[arg-type]
    return nixl_setup.prepare(options, sizes, memory, held=lambda: True, environ=environ or {}, folder=folder)


def reason(setup: NixlSetup) -> str:
    """Why decode is told that there is none."""
    session: Any = None
    told = setup.servers["nixl"].serve(session, Able(nixl="1.5.1"))
    assert isinstance(told, str)
    return told


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(nixl_setup, "lock_refusal", lambda _: "")
    return tmp_path


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(nixl_driver, "load", lambda _: (world.driver(), ""))
    return world


def test_auto_looks_for_nothing_where_kv_is_encrypted(device: Path, world: World) -> None:
    options = KvOptions(transport="auto", encryption="enabled")
    setup = nixl_setup.prepare(options, SIZES, memory, held=lambda: True, environ={}, folder=device)
    assert (setup.hub, setup.servers, setup.lacks, setup.link_sides(None)) == (None, {}, "", {})


@pytest.mark.parametrize("transport", ["tcp", "shm", "nccl"])
def test_other_transports_look_for_nothing(transport: str, device: Path) -> None:
    setup = prepare(transport, device)
    assert (setup.hub, setup.servers, setup.store, setup.version) == (None, {}, memory, "")
    assert setup.link_sides(None) == {}


@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_the_memory_of_the_store_is_registered_once_and_never_made_anew(
        transport: str, device: Path, world: World) -> None:
    setup = prepare(transport, device)
    assert setup.hub is not None
    server = setup.servers["nixl"]
    assert isinstance(server, NixlServer)
    assert setup.version == "1.5.1"
    assert setup.store(SIZES.store).view.obj is setup.store(SIZES.store).view.obj is server.memory.view.obj
    assert server.descriptor(0).size == SIZES.store
    assert len(world.agents) == 1
    assert world.made == 0, "nobody reads yet"
    assert setup.hub.held()
    fetcher: Any = setup.link_sides(None)["nixl"]
    assert fetcher.insists is (transport == "rdma")
    assert not setup.hub.has_ring
    setup.hub.stop()


def test_memory_that_orders_name_ranges_of_is_what_a_device_has_on_its_host(device: Path, world: World) -> None:
    setup = prepare("rdma", device)
    assert setup.hub is not None
    ring = Allocation(memory, 1 << 20)
    setup.link_sides(ring)
    assert ring.made
    assert setup.hub._reading.agent.ring is not None
    assert setup.hub._reading.agent.ring.size == 1 << 20
    setup.hub.stop()


def test_without_a_device_nothing_is_loaded_unless_ucx_was_told_what_to_take(tmp_path: Path, world: World) -> None:
    setup = prepare("auto", tmp_path, {"UCX_TLS": "tcp"})
    assert (setup.hub, setup.store) == (None, memory)
    assert reason(setup).startswith("nixl: no RDMA device is here")
    assert reason(setup).endswith(" at prefill")
    with pytest.raises(ConfigError, match=r"rdma cannot be used: no RDMA device is here.*resources: rdma/.*UCX_TLS"):
        prepare("rdma", tmp_path)
    assert world.agents == {}
    setup = prepare("rdma", tmp_path, {"UCX_TLS": "tcp"})
    assert setup.hub is not None
    setup.hub.stop()


def test_a_device_that_is_not_used_is_lacking_and_one_that_is_not_there_is_not(
        tmp_path: Path, device: Path, world: World, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    used = prepare("auto", device)
    assert used.lacks == ""
    assert used.hub is not None
    used.hub.stop()
    nowhere = tmp_path / "nowhere"
    assert prepare("auto", nowhere).lacks == ""
    assert caplog.records == []
    monkeypatch.setattr(nixl_driver, "load", lambda _: (None, "NIXL cannot be loaded"))
    words = "an RDMA device is here and is not used: NIXL cannot be loaded (add it to engine.image)"
    assert prepare("auto", device).lacks == words
    assert [record.getMessage() for record in caplog.records] == [f"xpyd: no RDMA between hosts: {words}"]
    assert prepare("tcp", device).lacks == "", "who has chosen TCP lacks nothing"


@pytest.mark.parametrize("broken", ["target", "register"])
def test_what_nixl_refuses_is_told_and_leaves_no_thread(device: Path, world: World, broken: str) -> None:
    world.broken = broken
    with pytest.raises(ConfigError, match=r"rdma cannot be used: NIXL 1.5.1: FakeError: .*write kv.transport: auto or tcp"):
        prepare("rdma", device)
    setup = prepare("auto", device)
    assert setup.hub is None
    assert "FakeError" in reason(setup)
    until_none_runs("xpyd-nixl")


@pytest.mark.parametrize(("sizes", "mib"), [
    (SIZES, 4 + 256), (SIZES._replace(ring=512 << 20), 4 + 256 + 512), (SIZES._replace(order=(90 << 20) - 5), 4 + 4 * 92)])
def test_too_little_memory_to_lock_is_told_before_anything_is_loaded(
        device: Path, monkeypatch: pytest.MonkeyPatch, sizes: NixlMemorySizes, mib: int) -> None:
    monkeypatch.setattr(nixl_setup, "lock_refusal", lambda needed: f"{needed >> 20} MiB")
    with pytest.raises(ConfigError, match=f"rdma cannot be used: {mib} MiB;"):
        prepare("rdma", device, sizes=sizes)


def test_there_are_slots_for_all_reads_that_there_may_be() -> None:
    assert SIZES.slots == READS * READ_BYTES


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
    reason = nixl_setup.lock_refusal(512 << 20, status, limit)
    assert (reason == "") is fits
    if not fits:
        assert reason == ("512 MiB must be locked, and the limit (memlock) is 8 MiB: raise it for the container runtime, "
                          "or add the capability IPC_LOCK")


def test_who_cannot_read_its_capabilities_has_none(tmp_path: Path) -> None:
    assert nixl_setup.lock_refusal(1, tmp_path / "none", 0) != ""
