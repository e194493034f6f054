"""Prefill and decode of the link's checks: two processes, each with a small KV cache, and the connector's own publisher
and receiver. They obey lines on stdin and answer with lines, so that one of them can be killed.

    python -m lab.gpu.link_ranks ROLE DEVICE BLOCK TRANSPORT        started by ``link_checks``
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from msgspec.structs import replace

from lab.gpu.children import say
from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.worker.data_plane import PIECE_BYTES, DataPlane, PlaneSizes
from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.engine.worker.numa_setup import node_binding
from xpyd_sidecar.engine.worker.saving import BlockSaver
from xpyd_sidecar.kv.array_layout import ArrayPart
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.offers import Push
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import Instruction, LoadFinished, LoadSource, Order, Receiving
from xpyd_sidecar.kv.ring import SHARE
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.receiver import FetchedBlocks

TransportName = Literal["tcp", "shm", "nccl"]
TRANSPORTS: Final[tuple[TransportName, ...]] = ("tcp", "shm", "nccl")
LAYERS, BLOCKS, COUNT = 8, 128, 64
RING: Final = 256 << 20
LEAST: Final = 1 << 20
"""Of memory that these checks do not use."""
TIMEOUT_S: Final = 5.0
LOAD_S: Final = 60.0
OPTIONS: Final = KvOptions(peer_timeout_s=TIMEOUT_S, load_timeout_s=LOAD_S)
KEY: Final = bytes(32)


def pattern(layer: int, block: int) -> int:
    """What a block is filled with."""
    return layer * 1000 + block


def key_of(turn: int) -> Key:
    """Of one transfer."""
    return Key(TransferId(f"{turn:032x}"), Attempt(1), 1)


class Rank:
    """One process: a cache, and what moves its blocks."""

    def __init__(self, device: torch.device, block: int, transport: TransportName, store: int) -> None:
        """``store``: bytes for copies."""
        self.device = device
        self.on_device = device.type == "cuda"
        shape = BLOCKS, block // 4
        self.caches = {f"layer{n}": torch.zeros(shape, dtype=torch.int32, device=device) for n in range(LAYERS)}
        self.memory = KvCache(self.caches, BLOCKS)
        self.layouts = self.memory.layouts({})
        sizes = PlaneSizes(store, LEAST, 0, 0, 0, 0, PIECE_BYTES)
        if self.on_device:
            sizes = sizes._replace(slab=LAYERS * COUNT * block, ring=RING, through=LEAST, piece=RING // (2 * SHARE))
        self.me = OwnRank(InstanceName("check"), Incarnation(secrets.token_hex(16)), 0, KEY)
        options = replace(OPTIONS, transport=transport)
        settings = ConnectorSettings(options, self.me.instance, "127.0.0.1", ServiceKey(KEY), None)
        self.binding = node_binding(device, 0)
        self.plane = DataPlane(settings, self.memory, sizes, self.me, {}, binding=self.binding)


class Prefill(Rank):
    """Sends what it is told to."""

    def __init__(self, device: torch.device, block: int, transport: TransportName) -> None:
        super().__init__(device, block, transport, 2 * LAYERS * COUNT * block)
        self.saving = BlockSaver(self.memory, self.layouts, self.plane.store, self.plane.publisher,
                                 completions=Completions(),
                             wait_s=LOAD_S, put=None, layers={})

    def push(self, turn: int) -> None:
        """Fill the blocks, by kernels that take a while, have them copied out, and write over them at once."""
        for region, cache in enumerate(self.caches.values()):
            cache[:COUNT] = -1
            if self.on_device:
                torch.cuda._sleep(20_000_000)
            for block in range(COUNT):
                cache[block] = pattern(region, block)
        self.saving.begin([Push(key_of(turn), 0, tuple(range(COUNT)))])
        self.saving.finish()
        self.memory.fence()
        for cache in self.caches.values():
            cache.fill_(-2)


class Decode(Rank):
    """Loads, and looks at what has come."""

    def __init__(self, device: torch.device, block: int, transport: TransportName) -> None:
        super().__init__(device, block, transport, LEAST)
        self.receiver = self.plane.receiver
        self.loads = Receiving(load_s=LOAD_S, grace_s=0)
        self.finished: list[LoadFinished] = []
        self.moved: dict[str, int] = {}

    def load(self, turn: int, address: HostPort, life: Incarnation, limit_s: float = LOAD_S) -> dict[str, Any]:
        """One transfer into the last blocks, in reverse order; what became of it."""
        ids = tuple(range(BLOCKS - 1, BLOCKS - 1 - COUNT, -1))
        plan = FetchPlan(self.layouts, {at: ArrayPart(at, 0, one.heads, 0) for at, one in enumerate(self.layouts)}, 1)
        began = time.monotonic()
        self.moved = {}
        order = Order(f"r{turn}", key_of(turn), (TableSpan(0, ids),), (LoadSource(address, life, plan),))
        self._carry_out(self.loads.load(order, began))
        while len(self.finished) < turn:
            self._poll()
            if time.monotonic() - began > limit_s:
                return {"outcome": "nothing came", "seconds": limit_s, "moved": self.moved, "wrong": -1}
        seconds = time.monotonic() - began
        allocations = self.usage()["allocations"]
        wrong = sum(int((cache[ids[at]] != pattern(layer, at)).any()) for layer, cache in enumerate(self.caches.values())
                    for at in range(COUNT))
        for cache in self.caches.values():
            cache.zero_()
        return {"outcome": self.finished[-1].outcome.value, "seconds": seconds, "moved": self.moved, "wrong": wrong,
                "allocations": allocations}

    def _poll(self) -> None:
        now = time.monotonic()
        for _ in range(len(self.receiver.inbox)):
            event = self.receiver.inbox.popleft()
            if isinstance(event, FetchedBlocks):
                self.moved[event.link] = self.moved.get(event.link, 0) + event.size
                self._carry_out(self.loads.on_arrived(event.key, event.source, event.blocks, event.size))
            else:
                self._carry_out(self.loads.on_source_lost(event.key, event.source, (event.outcome, event.reason), now,
                                                  final=event.final))
        self._carry_out(self.loads.tick(now))

    def _carry_out(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            if isinstance(step, LoadFinished):
                self.receiver.close(step.request)
                self.finished.append(step)
            else:
                self.receiver.carry_out(step, self.memory.moment())

    def usage(self) -> dict[str, int]:
        """Groups and GPU memory, as NCCL counts and as the device shows."""
        levels = self.plane.levels()
        free, total = torch.cuda.mem_get_info(self.device) if self.on_device else (0, 0)
        stats = torch.cuda.memory_stats(self.device) if self.on_device else {}
        return {"groups": levels.get(metrics.NCCL_GROUPS, 0), "bytes": levels.get(metrics.NCCL_BYTES, 0),
                "used": total - free, "allocations": stats.get("num_device_alloc", 0)}

    def empty(self) -> None:
        """Give back what torch keeps, as vLLM does before it captures graphs."""
        if self.on_device:
            torch.cuda.empty_cache()


def child(role: str, device: torch.device, block: int, transport: TransportName) -> None:
    """Obey lines on stdin, answer each with a line."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = (Prefill if role == "prefill" else Decode)(device, block, transport)
    address = {"address": rank.plane.publisher.address, "life": rank.me.incarnation}
    say(address if isinstance(rank, Prefill) else rank.usage())
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(rank, Prefill):
            rank.push(order["turn"])
            say({})
        elif "turn" in order:
            say(rank.load(order["turn"], HostPort(order["address"]), Incarnation(order["life"])))
        else:
            if order.get("empty"):
                rank.empty()
            say(rank.usage())


def main() -> None:
    """One of the two."""
    role, device, block, name = sys.argv[1:]
    [transport] = [one for one in TRANSPORTS if one == name]
    child(role, torch.device(device), int(block), transport)


if __name__ == "__main__":
    main()
