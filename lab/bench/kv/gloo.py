"""gloo, as torch.distributed has it.

gloo_blocks: each block into its place, 32 on their way; gloo_packed: pieces of 1 MiB, then copied to their places.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from harness import Trigger
from peer import place

WINDOW: Final = 32
PIECE: Final = 1 << 20
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Side:
    rank = 0

    def __init__(self, name: str, memory: Bytes) -> None:
        self.packed = name == "gloo_packed"
        self.memory = torch.from_numpy(memory)
        self.trigger = Trigger()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def join(self, port: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=self.rank, world_size=2)

    def ready(self, block: int, *, cover: int) -> None:
        self.whole = max(block, PIECE) if self.packed else block
        self.order = torch.from_numpy(place(len(self.memory) // block))


class Prefill(Side):
    """Sends in the order of the source."""

    def hello(self) -> dict[str, Any]:
        return {"trigger": self.trigger.listen()}

    def meet(self, other: dict[str, Any]) -> None:
        self.trigger.accept()
        self.join(other["store"])

    def move(self, block: int) -> None:
        self.trigger.wait()
        flying: deque[Any] = deque()
        for piece in self.memory.split(self.whole):
            flying.append(dist.isend(piece, 1))
            if len(flying) >= WINDOW:
                flying.popleft().wait()
        for one in flying:
            one.wait()


class Decode(Side):
    """Receives blocks in their places."""

    rank = 1

    def hello(self) -> dict[str, Any]:
        self.store = self.trigger.free_port()
        return {"store": self.store}

    def meet(self, other: dict[str, Any]) -> None:
        self.trigger.connect(other["trigger"])
        self.join(self.store)

    def move(self, block: int) -> None:
        self.trigger.send()
        blocks = self.memory.view(-1, block)
        count = len(self.memory) // self.whole
        flying: deque[tuple[Any, torch.Tensor, int]] = deque()
        for n in range(count + WINDOW):
            if n < count:
                into = torch.empty(self.whole, dtype=torch.uint8) if self.packed else blocks[self.order[n]]
                flying.append((dist.irecv(into, 0), into, n))
            if flying and (n >= count or len(flying) >= WINDOW):
                work, into, which = flying.popleft()
                work.wait()
                if self.packed:
                    each = self.whole // block
                    blocks.index_copy_(0, self.order[which * each:(which + 1) * each], into.view(each, block))
