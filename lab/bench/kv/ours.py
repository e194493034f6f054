"""Our links: sender and receiver with their threads and machines, as in an engine; the main thread is the engine's.

Names: ours_tcp; ours_shm (decode maps prefill's copies); ours_nixl, over UCX's TCP. The cache has 16 arrays, as a model of
so many layers would.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from typing import Any, Final

import numpy as np
from peer import BLOCKS, PARTS

import xpyd_sidecar.session.receiver as receiver_module
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.frames import FRAME_BYTES
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Cut, PlacedCut
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import Finished, From, Order, Receiving
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.session.receiver_events import Arrived, Broken
from xpyd_sidecar.session.sender import Kept, Sender
from xpyd_sidecar.threads import idle_polling
from xpyd_sidecar.transport.gates import CacheArray
from xpyd_sidecar.transport.link import Sums
from xpyd_sidecar.transport.nixl import driver as nixl_driver
from xpyd_sidecar.transport.nixl.prefill import PIECE_BYTES, NixlReading
from xpyd_sidecar.transport.nixl.session import ReadLimits
from xpyd_sidecar.transport.nixl.thread import NixlThread
from xpyd_sidecar.transport.shm.prefill import SharedCopies

WAIT_S: Final = 60.0
PREFILL_STEP_S: Final = 0.002
KEY: Final = bytes(32)
LATE: Final = 2
MAKE: Final = Sums.make
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def reading_of(name: str, memory: memoryview) -> NixlReading | None:
    """What links over NIXL need; ``memory``: that others may read."""
    if name != "ours_nixl":
        return None
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    driver, reason = nixl_driver.load()
    if driver is None:
        raise RuntimeError(reason)
    reading = NixlReading(NixlThread(driver, ReadLimits()), max(PIECE_BYTES, *BLOCKS), timeout_s=30)
    reading.register(memory)
    return reading


def ways_of(name: str, reading: NixlReading | None = None) -> LinkOptions:
    if reading is not None:
        return LinkOptions("rdma", nixl=reading.ours())
    return LinkOptions("tcp" if name == "ours_tcp" else "shm")


def layout(size: int, block: int) -> tuple[int, int]:
    """Arrays, and blocks of each."""
    arrays = min(PARTS, size // block)
    return arrays, size // block // arrays


def _nothing(_: Sums) -> None:
    """Sums are made when the blocks are sent, as where they are asked for before they are computed."""


class Inbox(idle_polling.Inbox[Arrived | Broken]):
    """Tells when all blocks are there, so that looking for them costs the link nothing. An engine looks once in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.all = threading.Event()
        self.missing = 0

    def append(self, event: Arrived | Broken) -> None:
        """Also from another thread."""
        super().append(event)
        self.missing -= event.blocks if isinstance(event, Arrived) else self.missing
        if not self.missing:
            self.all.set()


receiver_module.Inbox = Inbox  # type: ignore[misc]


class Prefill:
    """A new sender for each size and cover, since these belong to the machine."""

    def __init__(self, name: str, memory: Bytes) -> None:
        sharing = None if name == "ours_nixl" else SharedCopies(len(memory))  # an engine on CPU has its copies there
        self._memory = memoryview(mmap.mmap(-1, len(memory))) if sharing is None else sharing.copies
        self._memory[:] = memory.data
        reading = reading_of(name, self._memory)
        self._ways = ways_of(name, reading)
        self._senders: dict[tuple[int, bool], Sender] = {}
        self._store = CopyStore(lambda size: Chunk(None, self._memory[:size]), len(self._memory), unit=1)
        self._life = Incarnation(secrets.token_hex(16))
        self._count = 0
        for block in BLOCKS:
            for cover in (False, True):
                arrays, _ = layout(len(memory), block)
                machine = Sending[Kept](keep_s=600, send_s=600, regions=arrays, block_bytes=arrays * block, cover=cover)
                self._senders[block, cover] = Sender(
                    LocalRank(InstanceName("p"), self._life, 0, KEY, self._ways, 30, max(block, FRAME_BYTES),
                              reading=reading, sharing=sharing), machine, host="127.0.0.1", port=0, store=self._store)

    def hello(self) -> dict[str, Any]:
        at = {f"{block} {int(cover)}": sender.address for (block, cover), sender in self._senders.items()}
        return {"life": self._life, "at": at}

    def meet(self, other: dict[str, Any]) -> None:
        del other

    def ready(self, block: int, *, cover: int) -> None:
        self._sender = self._senders[block, bool(cover)]
        Sums.make = _nothing if cover == LATE else MAKE  # type: ignore[method-assign]
        arrays, blocks = layout(len(self._memory), block)
        key = Key(TransferId(f"{self._count:032x}"), Attempt(1), 1)
        self._count += 1
        for array in range(arrays):
            lease = self._store.lease(blocks * block)
            if lease is None:
                raise RuntimeError("copies of the last transfer were not freed")
            self._sender.push(key, [Copy(array, 0, blocks, Kept(lease.chunk.view, lease))])
        time.sleep(0.05)  # prefill has copies before anybody asks for them, and makes their sums

    def move(self, block: int) -> None:
        while not (reports := self._sender.take_reports()):
            time.sleep(PREFILL_STEP_S)
        if reports[0].outcome is not Outcome.OK:
            raise RuntimeError(reports[0].reason)
        while self._store.used:
            time.sleep(PREFILL_STEP_S)


class Decode:
    """A new receiver for each size and cover."""

    def __init__(self, name: str, memory: Bytes) -> None:
        self._reading = reading_of(name, memoryview(mmap.mmap(-1, 4096)))
        self._ways = ways_of(name, self._reading)
        self._way = name.removeprefix("ours_")
        self._memory = memory
        self._made: dict[tuple[int, bool], tuple[Receiver, Receiving]] = {}
        self._count = 0

    def hello(self) -> dict[str, Any]:
        return {"host": link_choice.host()}

    def meet(self, other: dict[str, Any]) -> None:
        self._peer = other

    def ready(self, block: int, *, cover: int) -> None:
        arrays, blocks = layout(len(self._memory), block)
        if (block, bool(cover)) not in self._made:
            view = memoryview(self._memory)
            each = blocks * block
            caches = [CacheArray(view[n * each:(n + 1) * each], block) for n in range(arrays)]
            largest = max(block, FRAME_BYTES)
            if self._reading is not None:  # pieces as an engine with such blocks has them: the smaller side's are taken
                self._reading.piece = max(PIECE_BYTES, largest)
                self._ways = ways_of("ours_nixl", self._reading)
            receiver = Receiver(
                LocalRank(InstanceName("d"), Incarnation(secrets.token_hex(16)), 0, KEY, self._ways, 30, largest,
                          reading=self._reading),
                Staging(lambda _: Chunk(None, memoryview(bytearray(largest))), 64), block_bytes=[block] * arrays,
                cover=bool(cover), caches=caches, make=lambda size: Chunk(None, memoryview(bytearray(size))))
            machine = Receiving(load_s=600, grace_s=1, regions=arrays, cover=bool(cover))
            self._made[block, bool(cover)] = receiver, machine
        self._receiver, self._machine = self._made[block, bool(cover)]
        key = Key(TransferId(f"{self._count:032x}"), Attempt(1), 1)
        address = HostPort(self._peer["at"][f"{block} {min(cover, 1)}"])
        ids = tuple(n * 7919 % blocks for n in range(blocks))
        whole = PlacedCut(Cut(0, arrays, 0, 0, block), 0, 0)
        sources = (From(address, Incarnation(self._peer["life"]), (whole,)),)
        self._order = Order(str(self._count), key, (TableSpan(0, ids),), sources)
        self._count += 1

    def move(self, block: int) -> None:
        inbox = self._receiver.inbox
        assert isinstance(inbox, Inbox)
        arrays, blocks = layout(len(self._memory), block)
        inbox.missing = arrays * blocks
        inbox.all.clear()
        for step in self._machine.load(self._order, time.monotonic()):
            self._receiver.carry_out(step)  # type: ignore[arg-type]
        if not inbox.all.wait(WAIT_S):
            raise RuntimeError("nothing comes")
        for event in inbox:
            if not isinstance(event, Arrived) or event.chunk is not None or event.way != self._way:
                raise RuntimeError(f"not what is measured: {event}")
            blocks = event.first, event.blocks
            if self._machine.arrived(event.key, event.source, event.region, blocks, event.size) is None:
                raise RuntimeError("blocks for no load")
            for step in self._machine.placed(event.key):
                if not isinstance(step, Finished):
                    self._receiver.carry_out(step)
                    continue
                self._receiver.close(step.request)
                if not self._receiver.settled(step.request):
                    raise RuntimeError("still being written")
        inbox.clear()
