"""NCCL through NVIDIA's nccl4py, and the CUDA around it: one communicator of two ranks, pieces in, pieces out.

Free of vLLM. Every call returns at once (``blocking=0``); whether it is over, ``pending`` says. A piece travels as one
message, laid out in a slot of GPU memory on both sides:

    0                         size rounded up to 8      + 8          + 16
    +-------------------------+-------------------------+------------+
    | packed blocks           | weighed sum, or 0       | nth piece  |
    +-------------------------+-------------------------+------------+

The trailer shows that both sides mean the same piece, and that what has come is what was sent. There is no xxh3 for GPUs;
the sum is Σ (2i+1)·word_i modulo 2^64: as odd factors are invertible, one changed word always shows, as do two that have
changed places unless they differ in their highest bits alone.

What happens on the stream of a group, in order: copy or gather into the slot, sum, ``ncclSend``; at the other end
``ncclRecv``, sum, comparison, and its result into pinned memory. Only then passes the event that the host looks at. The
forward's stream is not involved: the copy out of the cache was waited for before the piece was given (``memory.marks``),
and the copy into the cache is made by the engine's thread when the piece is here (``engine.kv_cache``).

All memory is taken at the start, and all streams. To allocate while NCCL's kernels run may wait for them (CUDA synchronizes
implicitly), and they wait for a peer whose thread may be doing just the same. For that reason no copy is made from memory
that is not pinned either.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from xpyd_sidecar.kv.groups import Way, group_bytes
from xpyd_sidecar.memory.device import CudaMark
from xpyd_sidecar.memory.marks import CopyMark

TRAILER: Final = 16
STREAM_BYTES: Final = 2 << 20
"""That torch's allocator takes for the first small tensor of a stream."""
TAIL_S: Final = 30.0
"""For what an aborted communicator has left on its stream; kernels of a forward may hold it up."""
TAIL_LOOK_S: Final = 0.001
_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7


class NcclFailed(Exception):
    """NCCL says that a communicator cannot go on."""


class Kit(NamedTuple):
    """What one piece uses while it is under way. ``slot``: to send from. ``host``: pinned; a piece, or two words."""

    slot: torch.Tensor | None
    scratch: torch.Tensor
    host: torch.Tensor


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

    def on(self, stream: Any) -> AbstractContextManager[Any]:
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

    def host(self, size: int) -> torch.Tensor:
        """``size`` bytes of pinned host memory, which its streams copy from and to."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@dataclass(eq=False)
class Piece:
    """Packed blocks on their way. To send: ``data`` in host memory. To receive: ``slot`` of the receiver's."""

    size: int
    cover: bool
    data: memoryview | None = None
    slot: torch.Tensor | None = None
    tag: Any = None
    """The owner's."""
    kit: Kit | None = None
    mark: CopyMark | None = None
    nth: int = 0
    intact: bool = False
    """Of a piece that was received: it is what was sent, and the piece that was meant."""

    def look(self) -> None:
        """The mark has passed: see what came."""
        if self.data is None and self.kit is not None:
            self.intact = self.kit.host.view(torch.int64).tolist() == [0, self.nth]


class Driver:
    """Makes communicators. Used by the communicator thread alone, but for ``Communicator.abort``."""

    def __init__(self, binding: Any, device: CudaDevice, *, ctas: int, piece: int, groups: int, flight: int) -> None:
        """``binding``: ``nccl.core``. ``ctas``: channels of a group; ``piece``: bytes of the largest piece.

        ``groups``: at once, at most; ``flight``: pieces under way in each direction, at most.
        """
        self.device = device
        self.ctas = ctas
        self.piece = piece
        self.slot_bytes = padded(piece) + TRAILER
        self.binding = binding
        self.weights = weights(padded(piece) // 8, device.empty)
        self.sends = [Kit(device.empty(self.slot_bytes), self._words(), device.host(piece)) for _ in range(flight)]
        self.receives = [Kit(None, self._words(), device.host(TRAILER)) for _ in range(flight)]
        device.settle()  # every group's stream reads the weights
        self.bytes = fixed_bytes(piece, groups, flight)
        """GPU memory that it has, besides that of groups."""
        self.streams = deque(device.stream() for _ in range(groups))
        self._anchors: list[torch.Tensor] = []
        """One small tensor of each stream: as long as it lives, torch keeps that stream's memory for small ones, whoever
        empties the cache (vLLM does before it captures graphs)."""
        for stream in self.streams:  # what sums need besides, torch allocates with a stream's first one
            with device.on(stream):
                weigh(self.weights, self.weights, self.sends[0].scratch)
                self._anchors.append(device.empty(1))
            device.settle()

    def _words(self) -> torch.Tensor:
        return self.device.empty(padded(self.piece)).view(torch.int64)

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
        self._peer = 1 if way is Way.SEND else 0
        self._nth = 0
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

    def launch(self, piece: Piece) -> None:
        """Begin to send or to receive a piece, which has a slot and a kit."""
        assert piece.slot is not None
        assert piece.kit is not None
        self._nth += 1
        piece.nth = self._nth
        end = padded(piece.size)
        message = piece.slot[:end + TRAILER]
        with self._device.on(self.stream):
            if piece.data is None:
                self._comm.recv(message, self._peer, stream=self._device.handle(self.stream))
                return
            words = message.view(torch.int64)
            words[end // 8 - 1:].zero_()
            message[:piece.size].copy_(_pinned(piece.data, piece.kit.host), non_blocking=True)
            if piece.cover:
                words[-2].copy_(weigh(words[:-2], self._driver.weights, piece.kit.scratch))
            words[-1].fill_(piece.nth)
            self._comm.send(message, self._peer, stream=self._device.handle(self.stream))

    def launched(self, piece: Piece) -> None:
        """The call is over: the stream has the piece. Have it checked, and its end marked."""
        assert piece.slot is not None
        assert piece.kit is not None
        with self._device.on(self.stream):
            if piece.data is None:
                words = piece.slot[:padded(piece.size) + TRAILER].view(torch.int64)
                verdict = piece.kit.host.view(torch.int64)
                found = weigh(words[:-2], self._driver.weights, piece.kit.scratch) - words[-2] if piece.cover else words[-2]
                verdict[0:1].copy_(found.reshape(1), non_blocking=True)
                verdict[1:2].copy_(words[-1:], non_blocking=True)
            piece.mark = self._device.mark(self.stream)

    def memory(self) -> int:
        """Bytes of GPU memory: what NCCL says, or (a library that cannot say) what it may be."""
        stat = getattr(getattr(self._driver.binding, "NcclCommMemStat", None), "GPU_MEM_TOTAL", None)
        if stat is not None:
            with contextlib.suppress(Exception):  # the binding knows the call, the library may not
                return int(self._comm.get_mem_stat(stat))
        return group_bytes(self._driver.ctas)

    def abort(self) -> None:
        """End it, whatever runs. May take long, so it has a thread of its own.

        An abort ends NCCL's kernels. What was enqueued behind them (a sum, the copy of a verdict) still runs then and
        writes into what the piece lies in, so this returns when the stream is empty.

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


def fixed_bytes(piece: int, groups: int, flight: int) -> int:
    """GPU memory of a driver, besides that of groups: slots to send from, weights, what sums need, torch's for streams."""
    return flight * (padded(piece) + TRAILER) + (1 + 2 * flight) * padded(piece) + groups * STREAM_BYTES


def padded(size: int) -> int:
    """Bytes rounded up to whole words."""
    return (size + 7) & ~7


def weights(words: int, empty: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """2i+1 for the first ``words`` i."""
    out = empty(8 * words).view(torch.int64)
    torch.arange(1, 2 * words, 2, dtype=torch.int64, out=out)
    return out


def weigh(words: torch.Tensor, factors: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The sum that a trailer carries, on the device of the words; overflow wraps."""
    return torch.mul(words, factors[:len(words)], out=scratch[:len(words)]).sum()


def _pinned(data: memoryview, host: torch.Tensor) -> torch.Tensor:
    """Bytes of a copy (pinned, as every pool is), or what was cut out of one, brought to pinned memory."""
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    memoryview(host.numpy())[:len(data)] = data
    return host[:len(data)]
