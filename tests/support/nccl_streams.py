"""Streams for the scripted NCCL of ``nccl_fake``: what is enqueued behind a kernel runs when a test says so.

    device = StreamDevice("p", world)
    world.spins = True                     a group made now: its kernels run until both sides have called, or an abort
    …                                      an abort ends the kernel; what was enqueued behind it is the stream's tail
    device.run_tails()                     the tail runs: the next message is copied into its slot

Only writes into the device's memory are made late: those of a slot, which another message may have by then.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo  # a dispatch mode imports it when it is first used, for seconds, on whatever thread that is
from nccl_fake import HostDevice, World
from torch.utils._python_dispatch import TorchDispatchMode

from xpyd_sidecar.memory.marks import CopyMark

_numbers = itertools.count(1)


class Stream:
    """One, and what was enqueued behind its kernel."""

    def __init__(self, number: int, world: World) -> None:
        self.number = number
        self.behind: deque[Callable[[], Any]] = deque()
        self._world = world

    @property
    def spinning(self) -> bool:
        """Whether a kernel waits for its peer."""
        return bool(self._world.kernels.get(self.number))

    def run(self) -> None:
        """What is behind the kernel runs, if that is over."""
        while self.behind and not self.spinning:
            self.behind.popleft()()


class Behind(TorchDispatchMode):
    """Writes into device memory wait for their turn, and read what they copy then."""

    def __init__(self, stream: Stream, memory: set[int]) -> None:
        super().__init__()
        self._stream, self._memory = stream, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        late = func in {torch.ops.aten.copy_.default, torch.ops.aten.zero_.default}
        if late and args[0].untyped_storage().data_ptr() in self._memory:
            self._stream.behind.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


class Empty:
    """A mark: nothing is left on a stream."""

    def __init__(self, device: StreamDevice, stream: Stream) -> None:
        self._device, self._stream = device, stream

    def done(self) -> bool:
        """Asked by the communicator thread, or by that of an abort."""
        self._device.looked()
        return not self._stream.spinning and not self._stream.behind


class StreamDevice(HostDevice):
    """Host memory in the place of a GPU's, with streams."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name)
        self.looked: Callable[[], None] = lambda: None
        """Called at each look at a mark."""
        self.streams: list[Stream] = []
        self._world = world
        self._memory: set[int] = set()

    def stream(self) -> Stream:
        self.streams.append(Stream(next(_numbers), self._world))
        return self.streams[-1]

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        return Behind(stream, self._memory) if stream.spinning else contextlib.nullcontext(stream)

    def handle(self, stream: Stream) -> int:
        return stream.number

    def mark(self, stream: Stream) -> CopyMark:
        return Empty(self, stream)

    def empty(self, size: int) -> torch.Tensor:
        made = super().empty(size)
        self._memory.add(made.untyped_storage().data_ptr())
        return made

    def run_tails(self) -> None:
        """All streams run what their kernels have left."""
        for stream in self.streams:
            stream.run()
