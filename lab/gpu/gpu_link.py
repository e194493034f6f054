"""Prefill and decode of the link's checks: two processes, each with a small KV cache, and the connector's own sender and
receiver. They obey lines on stdin and answer with lines, so that one of them can be killed.

    python lab/gpu/gpu_link.py ROLE DEVICE BLOCK        started by ``gpu_link_checks``
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from gpu_seen import NotHeldError

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import kv_cache
from xpyd_sidecar.engine.kv_cache import KvCache, Move
from xpyd_sidecar.engine.nccl_setup import choose
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.mapping import Cut, PlacedCut
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import Finished, From, Instruction, Order, Receiving
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.session.receiver_events import Arrived
from xpyd_sidecar.session.sender import Kept, Sender

LAYERS, BLOCKS, COUNT = 8, 128, 64
TIMEOUT_S = 5.0
OPTIONS = KvOptions(peer_timeout_s=TIMEOUT_S)
KEY = bytes(32)


def pattern(layer: int, block: int) -> int:
    """What a block is filled with."""
    return layer * 1000 + block


def key_of(turn: int) -> Key:
    """Of one transfer."""
    return Key(TransferId(f"{turn:032x}"), Attempt(1), 1)


class Rank:
    """One process: a cache, and sender or receiver."""

    def __init__(self, device: torch.device, block: int) -> None:
        shape = (BLOCKS, block // 4)
        self.device = device
        self.caches = {f"layer{n}": torch.zeros(shape, dtype=torch.int32, device=device) for n in range(LAYERS)}
        self.memory = KvCache(self.caches, BLOCKS)
        options = msgspec.structs.replace(OPTIONS, transport="nccl" if device.type == "cuda" else "auto")
        ways, self.grouping = choose(options, device, self.memory.largest_frame)
        self.me = LocalRank(InstanceName("check"), Incarnation(secrets.token_hex(16)), 0, KEY, ways, TIMEOUT_S,
                            self.memory.largest_frame, self.grouping)


class Prefill(Rank):
    """Sends what it is told to."""

    def __init__(self, device: torch.device, block: int) -> None:
        super().__init__(device, block)
        machine = Sending[Kept](keep_s=60, send_s=60, regions=LAYERS, block_bytes=LAYERS * block, cover=True)
        pinned = device.type == "cuda"
        self.store = CopyStore(lambda size: kv_cache.chunk(size, pinned=pinned), 2 * LAYERS * COUNT * block)
        self.memory.prepare(COUNT * block)
        self.completions = Completions()
        self.sender = Sender(self.me, machine, host="127.0.0.1", port=0, store=self.store)

    def push(self, turn: int) -> None:
        """Fill the blocks, by kernels that take a while, have them copied out, and write over them at once."""
        ids = np.arange(COUNT, dtype=np.int64)
        for region, cache in enumerate(self.caches.values()):
            for block in range(COUNT):
                cache[block] = -1
            if self.device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            for block in range(COUNT):
                cache[block] = pattern(region, block)
            lease = self.store.lease(self.memory.block_bytes[region] * COUNT)
            if lease is None:
                raise RuntimeError("no room to keep")
            mark = self.memory.gather([Move(region, ids, lease.chunk.tensor)])
            copy = Copy(region, 0, COUNT, Kept(lease.chunk.view, lease))
            self.completions.add(mark, partial(self.sender.push, key_of(turn), [copy]))
        self.memory.fence()
        for cache in self.caches.values():
            cache.fill_(-2)


class Decode(Rank):
    """Loads, and looks at what has come."""

    def __init__(self, device: torch.device, block: int) -> None:
        super().__init__(device, block)
        make = self.memory.largest_frame
        self.staging = Staging(lambda _: kv_cache.chunk(make, pinned=device.type == "cuda"), 16)
        self.receiver = Receiver(self.me, self.staging, block_bytes=self.memory.block_bytes, cover=True,
                                 caches=self.memory.caches(), make=partial(kv_cache.chunk, pinned=device.type == "cuda"))
        self.loads = Receiving(load_s=60, grace_s=0, regions=LAYERS, cover=True)
        self.block = block
        self.finished: list[Finished] = []
        self.moved: dict[str, int] = {}
        self.placing: list[tuple[CopyMark, Chunk]] = []

    def load(self, turn: int, address: HostPort, life: Incarnation, limit_s: float = 60.0) -> dict[str, Any]:
        """One transfer into the last blocks, in reverse order; what became of it."""
        ids = tuple(range(BLOCKS - 1, BLOCKS - 1 - COUNT, -1))
        source = From(address, life, (PlacedCut(Cut(0, LAYERS, 0, 0, self.block), 0, 0),))
        began = time.monotonic()
        self.moved = {}
        self._carry_out(self.loads.load(Order(f"r{turn}", key_of(turn), (TableSpan(0, ids),), (source,), b""), began))
        while len(self.finished) < turn or self.placing:
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
            if not isinstance(event, Arrived):
                self._carry_out(self.loads.broken(event.key, event.source, (event.outcome, event.reason), now,
                                                  final=event.final))
                continue
            place = self.loads.arrived(event.key, event.source, event.region, (event.first, event.blocks), event.size)
            if place is not None:
                self.moved[event.way] = self.moved.get(event.way, 0) + event.size
                if event.chunk is not None:
                    mark = self.memory.scatter([Move(place.region, np.array(place.ids, np.int64), event.chunk.tensor)])
                    self.placing.append((mark, event.chunk))
                self._carry_out(self.loads.placed(event.key))
            elif event.chunk is not None:
                self.staging.give(event.chunk)
        while self.placing and self.placing[0][0].done():
            self.staging.give(self.placing.pop(0)[1])
        self._carry_out(self.loads.tick(now))

    def _carry_out(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            if isinstance(step, Finished):
                self.receiver.close(step.request)
                self.finished.append(step)
            else:
                self.receiver.carry_out(step)

    def usage(self) -> dict[str, int]:
        """Groups and GPU memory, as NCCL counts and as the device shows."""
        usage = self.grouping.usage if self.grouping is not None else None
        free, total = torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else (0, 0)
        stats = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        return {"groups": usage.groups if usage else 0, "bytes": usage.memory if usage else 0, "used": total - free,
                "allocations": stats.get("num_device_alloc", 0)}

    def empty(self) -> None:
        """Give back what torch keeps, as vLLM does before it captures graphs."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def child(role: str, device: torch.device, block: int) -> None:
    """Obey lines on stdin, answer each with a line."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = Prefill(device, block) if role == "prefill" else Decode(device, block)
    say({"address": rank.sender.address, "life": rank.me.incarnation} if isinstance(rank, Prefill) else rank.usage())
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


def say(answer: dict[str, Any]) -> None:
    """One line."""
    print(json.dumps(answer), flush=True)


class Process:
    """A child."""

    def __init__(self, role: str, device: str, block: int, *, apart: bool) -> None:
        environ = dict(os.environ)
        if apart:
            environ |= {"NCCL_HOSTID": f"check-{role}", "NCCL_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, role, device, str(block)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.hello = self.hear()

    def tell(self, order: dict[str, Any]) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise NotHeldError("prefill or decode has ended by itself", {})
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    """One of the two."""
    role, device, block = sys.argv[1:]
    child(role, torch.device(device), int(block))


if __name__ == "__main__":
    main()
