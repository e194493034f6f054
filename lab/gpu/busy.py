"""Work that keeps the compute stream busy, and waiting for what is behind it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lab.gpu.findings import NotHeldError
from xpyd_sidecar.memory.marks import CopyMark

WAIT_S = 20.0


class Busy:
    """Work for the compute stream of about so many milliseconds; nothing on a CPU, whose copies wait for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._real = device.type == "cuda"
        self.kinds: tuple[Callable[[float], None], ...] = (self.sleep, self.multiply) if self._real else (self.sleep,)
        if self._real:
            self._one = torch.randn(4096, 4096, dtype=torch.float16, device=device)
            self._out = torch.empty_like(self._one)
            self._cycles = 1e7 / self._measure(lambda: torch.cuda._sleep(10_000_000))
            self._products = 10 / self._measure(lambda: self._multiply(10))

    def sleep(self, ms: float) -> None:
        """One kernel that spins, on one multiprocessor."""
        if self._real:
            torch.cuda._sleep(int(ms * self._cycles))

    def multiply(self, ms: float) -> None:
        """Products of matrices, on all of them."""
        self._multiply(max(1, round(ms * self._products)))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._one, self._one, out=self._out)

    def _measure(self, work: Callable[[], None]) -> float:
        """Milliseconds, the second time."""
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):
            began.record()
            work()
            ended.record()
            ended.synchronize()
        return max(0.001, float(began.elapsed_time(ended)))


def settle(device: torch.device) -> None:
    """Wait for all that the device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_done(mark: CopyMark) -> float:
    """Seconds until a mark is done, asked for without waiting.

    Raises:
        NotHeldError: it does not come to be done.
    """
    began = time.monotonic()
    while not mark.done():
        if time.monotonic() - began > WAIT_S:
            raise NotHeldError(f"a mark is not done after {WAIT_S:.0f} s", {})
    return time.monotonic() - began
