"""What a stream still does after its communicator was aborted reaches nobody else: scripted NCCL, scripted streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from manifest_ranks import wait_until
from nccl_fake import FakeNccl, World
from nccl_streams import StreamDevice

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.worker.nccl_setup import nccl_links
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.transport.nccl import driver as nccl_driver
from xpyd_sidecar.transport.nccl import thread as nccl_thread
from xpyd_sidecar.transport.nccl.driver import Driver, Message, load
from xpyd_sidecar.transport.nccl.thread import NcclLimits, NcclThread

SIZE = 1000
SLOTS = 3
LIMITS = NcclLimits(groups=4, open_s=20.0, move_s=20.0, idle_s=60)


class Side:
    """One side of a group; what it is told, on the communicator thread itself."""

    def __init__(self, hub: NcclThread, way: Way, uid: bytes | None = None) -> None:
        self.uid, self.open, self.reason = uid, False, ""
        self.done: list[Message] = []
        self.back: list[Message] = []
        self.hub = hub
        self.number = hub.join(self, way, uid)

    def post(self, call: Callable[[], None]) -> None:
        call()

    def on_group_begun(self, number: int, uid: bytes) -> None:
        self.uid = uid

    def on_group_open(self, number: int) -> None:
        self.open = True

    def on_posted(self, message: Message) -> None:
        """The peer would be told."""

    def on_moved(self, message: Message) -> None:
        self.done.append(message)

    def on_group_lost(self, number: int, reason: str) -> None:
        self.reason = reason

    def on_released(self, messages: tuple[Message, ...]) -> None:
        self.back += messages

    def give(self, message: Message) -> Message:
        self.hub.move(self.number, message, self)
        return message


class Pair:
    """Prefill and decode, each with streams."""

    def __init__(self) -> None:
        self.world = World()
        self.gpus = [StreamDevice(name, self.world) for name in "pd"]
        self.hubs = [NcclThread(Driver(FakeNccl(self.world), gpu, ctas=4, piece=4096, groups=4, flight=SLOTS), LIMITS)
                     for gpu in self.gpus]
        self.gpu = self.gpus[0]

    def group(self, *, spins: bool = False) -> tuple[Side, Side]:
        self.world.spins = spins
        p = Side(self.hubs[0], Way.SEND)
        wait_until(lambda: p.uid)
        d = Side(self.hubs[1], Way.RECEIVE, p.uid)
        wait_until(lambda: p.open and d.open)
        return p, d

    def carry(self, p: Side, d: Side, data: bytes) -> bytes:
        """Have a message sent and received; what comes."""
        at = len(d.done)
        message = receive(d)
        send(p, data)
        wait_until(lambda: len(d.done) > at)
        return received(message)


def receive(side: Side) -> Message:
    return side.give(Message(SIZE, torch.zeros(SIZE, dtype=torch.uint8)))


def received(message: Message) -> bytes:
    assert message.memory is not None
    return bytes(message.memory.numpy())


def send(side: Side, data: bytes) -> Message:
    return side.give(Message(SIZE, spans=[(0, memoryview(bytearray(data)))]))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(nccl_thread, "STOP_S", 1.0)
    made = Pair()
    yield made
    for gpu in made.gpus:
        gpu.looked = gpu.run_tails
    for hub in made.hubs:
        hub.stop()
    assert made.world.misuse == []


def aborted(pair: Pair) -> tuple[Side, list[Message]]:
    """A group that prefill has left in the middle of a message: its kernel is gone, its stream has still to copy the next
    one into a slot.
    """
    p, d = pair.group(spins=True)
    assert pair.carry(p, d, b"f" * SIZE) == b"f" * SIZE
    wait_until(lambda: p.done)
    sent = [send(p, b"1" * SIZE), send(p, b"2" * SIZE)]
    wait_until(lambda: any(stream.behind for stream in pair.gpu.streams))
    pair.hubs[0].leave(p.number, "the session has ended")
    wait_until(lambda: not any(stream.spinning for stream in pair.gpu.streams))
    wait_until(lambda: p.reason)
    time.sleep(0.05)  # for those who give back too early
    return p, sent


def test_the_tail_of_an_aborted_stream_does_not_reach_the_next_group(pair: Pair) -> None:
    p, lost = aborted(pair)
    other_p, other_d = pair.group()
    sent = send(other_p, b"k" * SIZE)
    wait_until(lambda: sent.memory is not None and bytes(sent.memory[:SIZE].numpy()) == b"k" * SIZE)
    pair.gpu.run_tails()  # while it has still to be received
    got = receive(other_d)
    wait_until(lambda: other_d.done)
    assert received(got) == b"k" * SIZE, "the tail of another stream has written into its slot"
    wait_until(lambda: p.back == lost)


def test_what_a_message_lies_in_comes_back_when_the_stream_is_empty(pair: Pair) -> None:
    p, lost = aborted(pair)
    assert p.back == []
    assert len(pair.hubs[0]._slots) == SLOTS - len(lost)
    assert pair.hubs[0].usage.groups == 1
    pair.gpu.run_tails()
    wait_until(lambda: p.back == lost)
    wait_until(lambda: pair.hubs[0].usage.groups == 0)
    assert len(pair.hubs[0]._slots) == SLOTS


def test_a_stream_that_is_never_empty_keeps_what_it_has_and_holds_up_nobody(
        pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(nccl_driver, "TAIL_S", 0.1)
    p, _ = aborted(pair)
    wait_until(lambda: "its stream still runs 0.1 s after the abort" in caplog.text)
    assert f"NCCL group {p.number} could not be aborted; its memory stays taken" in caplog.text
    assert pair.carry(*pair.group(), b"k" * SIZE) == b"k" * SIZE
    assert p.back == []
    assert pair.hubs[0].usage.groups == 2


def test_a_message_has_just_what_it_is_made_of_and_zeros_between(pair: Pair) -> None:
    p, d = pair.group()
    assert pair.carry(p, d, b"x" * SIZE) == b"x" * SIZE
    for _ in range(SLOTS):
        message = receive(d)
        spans = [(8, memoryview(bytearray(b"ab"))), (10, memoryview(bytearray(b"c"))), (992, memoryview(bytearray(b"de")))]
        p.give(Message(SIZE, spans=spans))
        wait_until(lambda: message in d.done)  # noqa: B023 (now)
        assert received(message) == bytes(8) + b"abc" + bytes(981) + b"de" + bytes(6), "what a slot had before stays here"


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
        nccl_links(KvOptions(transport="nccl"), torch.device("cuda"), [])
    assert reason in str(raised.value)
