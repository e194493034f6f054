"""What a stream still does after its communicator was aborted reaches nobody else: scripted NCCL, scripted streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_ranks import PATIENCE_S, until
from nccl_fake import FakeNccl, HostDevice, World
from nccl_streams import StreamDevice

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.nccl_setup import choose
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.transport.nccl import driver as nccl_driver
from xpyd_sidecar.transport.nccl import thread as nccl_thread
from xpyd_sidecar.transport.nccl.driver import Driver, Piece, load
from xpyd_sidecar.transport.nccl.thread import NcclLimits, NcclThread

SIZE = 1000
LIMITS = NcclLimits(groups=4, open_s=PATIENCE_S, move_s=PATIENCE_S, idle_s=60)


class Side:
    """One side of a group; what it is told, on the communicator thread itself."""

    def __init__(self, hub: NcclThread, way: Way, uid: bytes | None = None) -> None:
        self.uid, self.open, self.reason = uid, False, ""
        self.done: list[Piece] = []
        self.back: list[Piece] = []
        self.ended = False
        self.hub = hub
        self.number = hub.join(self, way, uid)

    def post(self, call: Callable[[], None]) -> None:
        call()

    def begun(self, uid: bytes) -> None:
        self.uid = uid

    def opened(self, number: int) -> None:
        self.open = True

    def posted(self, piece: Piece) -> None:
        """The peer would be told."""

    def moved(self, piece: Piece) -> None:
        self.done.append(piece)

    def lost(self, number: int, reason: str, *, busy: bool) -> None:
        self.reason = reason

    def over(self, pieces: tuple[Piece, ...]) -> None:
        self.back += pieces
        self.ended = True


class Pair:
    """Prefill with a plain device, decode with streams; one piece at a time of each direction."""

    def __init__(self) -> None:
        self.world = World()
        self.gpu = StreamDevice("d", self.world)
        self.hubs = [NcclThread(Driver(FakeNccl(self.world), device, ctas=4, piece=4096, groups=4, flight=2), LIMITS)
                     for device in (HostDevice("p"), self.gpu)]

    def group(self, *, spins: bool = False) -> tuple[Side, Side]:
        self.world.spins = spins
        p = Side(self.hubs[0], Way.SEND)
        until(lambda: p.uid)
        d = Side(self.hubs[1], Way.RECEIVE, p.uid)
        until(lambda: p.open and d.open)
        return p, d

    def receive(self, side: Side) -> Piece:
        piece = Piece(SIZE, True, slot=torch.zeros(self.hubs[1].driver.slot_bytes, dtype=torch.uint8))
        self.hubs[1].move(side.number, piece, side)
        return piece

    def send(self, side: Side, data: bytes) -> None:
        self.hubs[0].move(side.number, Piece(SIZE, True, memoryview(bytearray(data))), side)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(nccl_thread, "STOP_S", 1.0)
    made = Pair()
    yield made
    made.gpu.looked = made.gpu.run_tails
    for hub in made.hubs:
        hub.stop()
    assert made.world.misuse == []


def aborted(pair: Pair) -> tuple[Side, Piece]:
    """A group that was left in the middle of a piece: its kernel is gone, its stream has still to copy the verdict."""
    _, d = pair.group(spins=True)
    piece = pair.receive(d)
    until(lambda: any(stream.behind for stream in pair.gpu.streams))
    pair.hubs[1].leave(d.number, "the session has ended")
    until(lambda: not any(stream.spinning for stream in pair.gpu.streams))
    until(lambda: d.reason)
    time.sleep(0.05)  # for those who give back too early
    return d, piece


def test_the_tail_of_an_aborted_stream_does_not_reach_the_next_group(pair: Pair) -> None:
    d, lost = aborted(pair)
    other_p, other_d = pair.group()
    got = pair.receive(other_d)
    until(lambda: other_d.hub._joined[other_d.number].pieces)
    pair.gpu.looked = lambda: pair.gpu.run_tails() if got.mark is not None else None  # before its verdict is looked at
    pair.send(other_p, b"k" * SIZE)
    until(lambda: other_d.done)
    assert got.intact, "the tail of another stream has written into its verdict"
    assert bytes(got.slot[:SIZE].numpy()) == b"k" * SIZE  # type: ignore[index]
    until(lambda: d.back == [lost])


def test_what_a_piece_lies_in_comes_back_when_the_stream_is_empty(pair: Pair) -> None:
    d, lost = aborted(pair)
    assert d.back == []
    assert len(pair.hubs[1]._kits[Way.RECEIVE]) == 1
    assert pair.hubs[1].usage.groups == 1
    pair.gpu.run_tails()
    until(lambda: d.back == [lost])
    until(lambda: pair.hubs[1].usage.groups == 0)
    assert len(pair.hubs[1]._kits[Way.RECEIVE]) == 2


def test_a_stream_that_is_never_empty_keeps_what_it_has_and_holds_up_nobody(
        pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(nccl_driver, "TAIL_S", 0.1)
    d, _ = aborted(pair)
    until(lambda: "its stream still runs 0.1 s after the abort" in caplog.text)
    assert f"NCCL group {d.number} could not be aborted; its memory stays taken" in caplog.text
    other_p, other_d = pair.group()
    got = pair.receive(other_d)
    until(lambda: other_d.hub._joined[other_d.number].pieces)
    pair.send(other_p, b"k" * SIZE)
    until(lambda: other_d.done)
    assert got.intact
    assert d.back == []
    assert pair.hubs[1].usage.groups == 2


# --- two NCCLs in one process ---


def nccl4py(monkeypatch: pytest.MonkeyPatch, version: Any, torchs: Any) -> None:
    binding = SimpleNamespace(get_version=lambda: SimpleNamespace(libnccl=SimpleNamespace(version=version)))
    real = nccl_driver.importlib.import_module  # type: ignore[attr-defined]
    monkeypatch.setattr(nccl_driver.importlib, "import_module",  # type: ignore[attr-defined]
                        lambda name: binding if name == "nccl.core" else real(name))
    monkeypatch.setattr(torch.cuda.nccl, "version", torchs)
    monkeypatch.setattr(torch.version, "cuda", "12.9")


def no_nccl() -> tuple[int, ...]:
    raise AttributeError("module 'torch._C' has no attribute '_nccl_version'")


def no_gpu(device: torch.device) -> None:
    raise RuntimeError("no memory is left")


@pytest.mark.parametrize(("version", "torchs"), [
    ("2.28.9", lambda: (2, 28, 9)), ("2.28.9+cuda12.9", lambda: (2, 28, 9)), ("2.28.9", lambda: (2, 28, 9, "rc1")),
    ("2.28.9", no_nccl)], ids=["equal", "with its CUDA", "with its suffix", "torch has none"])
def test_one_nccl_in_a_process_is_used(monkeypatch: pytest.MonkeyPatch, version: str, torchs: Any) -> None:
    nccl4py(monkeypatch, version, torchs)
    monkeypatch.setattr(nccl_driver, "CudaDevice", no_gpu)  # it comes this far
    *_, reason = load(torch.device("cuda"), ctas=4, piece=8, groups=1, flight=1)
    assert reason == "cuda: no memory is left"


def test_two_nccls_in_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl4py(monkeypatch, "2.28.9", lambda: (2, 27, 5))
    reason = ("two NCCLs in one process: torch has 2.27.5, nccl4py loads 2.28.9; install torch's "
              "(nvidia-nccl-cu12==2.27.5), or set kv.transport to another link")
    with pytest.raises(ConfigError, match="transport: nccl cannot be used: two NCCLs in one process") as raised:
        choose(KvOptions(transport="nccl"), torch.device("cuda"), 4096)
    assert reason in str(raised.value)
