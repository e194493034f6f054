"""NCCL through NVIDIA's nccl4py, and the CUDA around it: one communicator of two ranks, messages in, messages out.

Free of vLLM. Every call returns at once (``blocking=0``); whether it is over, ``pending`` says. A message has the bytes of
one fetch, piece behind piece as ``kv.selection.places`` says:

    prefill   store, in pinned host memory ─[copy engine]─▶ a slot on the device ─[ncclSend]──┐
    decode                                                  its own device memory ◀─[ncclRecv]┘

A group has one stream, on which that happens in order; then an event passes, which the host looks at. Nothing is summed up
here: decode's kernel does it when blocks are placed (``memory.device``), and compares with what prefill has told.

All memory is taken at the start, and all streams. To allocate while NCCL's kernels run may wait for them (CUDA synchronizes
implicitly), and they wait for a peer whose thread may be doing just the same.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch

from xpyd_sidecar.kv.groups import Way, group_bytes
from xpyd_sidecar.memory.device import CudaMark
from xpyd_sidecar.memory.marks import CopyMark

TAIL_S: Final = 30.0
"""For what an aborted communicator has left on its stream; kernels of a forward may hold it up."""
TAIL_LOOK_S: Final = 0.001
_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7


class NcclFailed(Exception):
    """NCCL says that a communicator cannot go on."""


class CudaDevice:
    """Streams and events of the GPU that this process uses, through torch."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_properties(self._device).uuid)
        """Unique among all GPUs."""

    def enter(self) -> None:
        """Make it the calling thread's device."""
        torch.cuda.set_device(self._device)

    def stream(self) -> Any:
        """A stream of its own."""
        return torch.cuda.Stream(self._device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Within this context torch uses the stream."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def handle(self, stream: Any) -> int:
        """What NCCL calls the stream."""
        return int(stream.cuda_stream)

    def mark(self, stream: Any) -> CopyMark:
        """The work that the stream has now."""
        event = torch.cuda.Event()
        event.record(stream)
        return CudaMark(event, self._device)

    def empty(self, size: int) -> torch.Tensor:
        """``size`` bytes of its memory."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def settle(self) -> None:
        """Wait for what the calling thread has begun on it."""
        torch.cuda.current_stream(self._device).synchronize()


@dataclass(eq=False)
class Message:
    """Bytes on their way in a group."""

    size: int
    memory: torch.Tensor | None = None
    """Of the device: where they are received; of what is sent, a slot of the driver's, while it has one."""
    spans: Sequence[tuple[int, memoryview]] = ()
    """What is sent: pinned host memory, and from where on in the message; the rest is zeros."""
    tag: Any = None
    """The owner's."""
    mark: CopyMark | None = None


class Driver:
    """Makes communicators. Used by the communicator thread alone, but for ``Communicator.abort``."""

    def __init__(self, binding: Any, device: CudaDevice, *, ctas: int, piece: int, groups: int, flight: int) -> None:
        """``binding``: ``nccl.core``. ``ctas``: channels of a group; ``piece``: bytes of the largest message.

        ``groups``: at once, at most; ``flight``: messages that are being sent, at most.
        """
        self.device = device
        self.ctas = ctas
        self.piece = piece
        self.binding = binding
        self.slots = [device.empty(piece).zero_() for _ in range(flight)]
        """To send from."""
        self.streams = deque(device.stream() for _ in range(groups))
        device.settle()

    def unique_id(self) -> bytes:
        """Names a new group; made by rank 0."""
        return bytes(self.binding.get_unique_id())


class Communicator:
    """One rank of a group of two."""

    def __init__(self, driver: Driver, uid: bytes, way: Way) -> None:
        """Begin to make it."""
        binding = driver.binding
        self._driver = driver
        self._device = driver.device
        self.stream = driver.streams.popleft()
        self._way = way
        self._peer = 1 if way is Way.SEND else 0
        config = binding.NCCLConfig(blocking=False, min_ctas=1, max_ctas=driver.ctas)
        self._comm = binding.Communicator.init(2, 1 - self._peer, binding.UniqueId.from_bytes(uid), config)

    def pending(self) -> bool:
        """Whether a call is in progress; then no other may be made.

        Raises:
            NcclFailed: it will never be over.
        """
        code = int(self._comm.get_async_error())
        if code not in {_SUCCESS, _IN_PROGRESS}:
            raise NcclFailed(f"{self._driver.binding.get_error_string(code)} ({self._comm.get_last_error()})")
        return code == _IN_PROGRESS

    def launch(self, message: Message) -> None:
        """Begin to send or to receive a message, which has its memory."""
        assert message.memory is not None
        data = message.memory[:message.size]
        with self._device.use_stream(self.stream):
            if self._way is Way.RECEIVE:
                self._comm.recv(data, self._peer, stream=self._device.handle(self.stream))
            else:
                _fill(data, message.spans)
                self._comm.send(data, self._peer, stream=self._device.handle(self.stream))

    def on_launched(self, message: Message) -> None:
        """The call is over: the stream has the message. Have its end marked."""
        message.mark = self._device.mark(self.stream)

    def memory(self) -> int:
        """Bytes of GPU memory: what NCCL says, or (a library that cannot say) what it may be."""
        stat = getattr(getattr(self._driver.binding, "NcclCommMemStat", None), "GPU_MEM_TOTAL", None)
        if stat is not None:
            with contextlib.suppress(Exception):  # the binding knows the call, the library may not
                return int(self._comm.get_mem_stat(stat))
        return group_bytes(self._driver.ctas)

    def abort(self) -> None:
        """End it, whatever runs. May take long, so it has a thread of its own.

        An abort ends NCCL's kernels. What was enqueued behind them (the copy of the next message into its slot) still runs
        then, reads prefill's store and writes into that slot, so this returns when the stream is empty.

        Raises:
            NcclFailed: the stream is not empty within ``TAIL_S``.
        """
        self._device.enter()
        self._comm.abort()
        tail, end = self._device.mark(self.stream), time.monotonic() + TAIL_S
        while not tail.done():
            if time.monotonic() >= end:
                raise NcclFailed(f"its stream still runs {TAIL_S:g} s after the abort")
            time.sleep(TAIL_LOOK_S)


def load(device: torch.device, *, ctas: int, piece: int, groups: int, flight: int) -> tuple[Driver | None, str, str]:
    """A driver for a device or None; NCCL's version; and why there is none."""
    if device.type != "cuda":
        return None, "", f"the KV cache is on {device.type}, not on a CUDA device"
    try:
        binding = importlib.import_module("nccl.core")
        library = binding.get_version().libnccl
    except (ImportError, RuntimeError, OSError) as error:
        return None, "", f"nccl4py: {error}"
    if library is None:
        return None, "", "nccl4py: libnccl cannot be loaded"
    if reason := two_libraries(str(library.version)):
        return None, "", reason
    try:
        driver = Driver(binding, CudaDevice(device), ctas=ctas, piece=piece, groups=groups, flight=flight)
    except RuntimeError as error:  # above all: no GPU memory is left
        return None, "", f"{device}: {error}"
    return driver, str(library.version), ""


def two_libraries(version: str) -> str:
    """Why an NCCL of this version cannot be used beside torch's, which the engine itself uses; empty: it can.

    Two libraries in one process have the same symbols, threads and settings; whose are used is nobody's choice.
    """
    try:
        torchs = ".".join(str(part) for part in torch.cuda.nccl.version()[:3])
    except (AttributeError, RuntimeError):  # a torch without NCCL
        return ""
    if re.findall(r"\d+", version)[:3] == torchs.split("."):
        return ""
    cuda = (torch.version.cuda or "").partition(".")[0]
    return (f"two NCCLs in one process: torch has {torchs}, nccl4py loads {version}; install torch's "
            f"(nvidia-nccl-cu{cuda}=={torchs}), or set kv.transport to another link")


def fixed_bytes(piece: int, flight: int) -> int:
    """GPU memory of a driver, besides that of groups: slots to send from."""
    return flight * piece


def _fill(slot: torch.Tensor, spans: Sequence[tuple[int, memoryview]]) -> None:
    """Have a slot hold just these bytes, and zeros between them."""
    end = 0
    for at, view in spans:
        if at > end:
            slot[end:at].zero_()
        end = at + len(view)
        slot[at:end].copy_(torch.frombuffer(view, dtype=torch.uint8), non_blocking=True)
    if end < len(slot):
        slot[end:].zero_()
