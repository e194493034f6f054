"""Our links: publisher and receiver with their threads and machines, as in an engine; the main thread is the engine's.

Names: ours_tcp; ours_shm (decode maps prefill's store); ours_nixl, over UCX's TCP. The cache has 16 arrays, as a model of
so many layers would, and a transfer is one manifest of all of them.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import Any, Final

import numpy as np
from peer import PARTS

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.launch import NIXL_SLOT_BYTES, KvOptions
from xpyd_sidecar.engine.worker.data_plane import PIECE_BYTES
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.publishing import Publishing
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.reads import ReadLimits
from xpyd_sidecar.kv.receiving import LoadFinished, LoadSource, Order, Receiving
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.process.host_identity import host
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.link_trial import Fetcher, FetchSettings, OtherLink
from xpyd_sidecar.session.publisher import Publisher, PublisherSettings
from xpyd_sidecar.session.receiver import BrokenSource, FetchedBlocks, Receiver
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.threads import idle_polling
from xpyd_sidecar.transport.landing import CacheArray, HostLanding
from xpyd_sidecar.transport.links import LinkServer
from xpyd_sidecar.transport.nixl import driver as nixl_driver
from xpyd_sidecar.transport.nixl.fetch import NixlFetcher
from xpyd_sidecar.transport.nixl.serve import NixlServer
from xpyd_sidecar.transport.nixl.thread import NixlThread
from xpyd_sidecar.transport.shm.serve import SharedCopies, ShmServer

WAIT_S: Final = 60.0
TIMEOUT_S: Final = 30.0
PREFILL_STEP_S: Final = 0.002
KEY: Final = bytes(32)
TRANSPORTS: Final = {"ours_tcp": "tcp", "ours_shm": "shm", "ours_nixl": "rdma"}
LATE: Final = 2
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def nixl() -> NixlThread:
    """The thread that owns NIXL's agents of this process."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    driver, reason = nixl_driver.load()
    if driver is None:
        raise RuntimeError(reason)
    return NixlThread(driver, ReadLimits(open_s=TIMEOUT_S / 2, silence_s=TIMEOUT_S), NIXL_SLOT_BYTES)


def shape(size: int, block: int) -> tuple[int, int]:
    """Arrays, and blocks of each."""
    arrays = min(PARTS, size // block)
    return arrays, size // block // arrays


def layouts(size: int, block: int) -> tuple[ArrayLayout, ...]:
    """How blocks of each array are packed: one head, one block to a run, as on a host."""
    return (ArrayLayout(1, block, 1),) * shape(size, block)[0]


class Inbox(idle_polling.Inbox[FetchedBlocks | BrokenSource]):
    """Tells when all blocks are there, so that looking for them costs the link nothing. An engine looks once in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.all = threading.Event()
        self.missing = 0

    def append(self, event: FetchedBlocks | BrokenSource) -> None:
        """Also from another thread."""
        super().append(event)
        self.missing -= sum(count for *_, count in event.blocks) if isinstance(event, FetchedBlocks) else self.missing
        if not self.missing:
            self.all.set()


class Prefill:
    """A publisher that makes sums when a copy is made, and one that makes them when a decode has been told of it."""

    def __init__(self, name: str, memory: Bytes) -> None:
        shared = SharedCopies(len(memory))
        shared.copies[:] = memory.data
        store = Chunk(None, shared.copies)
        self._size = len(memory)
        self._store = CopyStore(lambda _: store, len(memory))
        self._life = Incarnation(secrets.token_hex(16))
        self._count = 0
        servers: dict[str, LinkServer] = {}
        if name == "ours_nixl":
            hub = nixl()
            hub.held = lambda: self._store.used_bytes > 0
            servers["nixl"] = NixlServer(hub, store, timeout_s=TIMEOUT_S)
        elif name == "ours_shm":
            servers["shm"] = shm = ShmServer(host(), None, insists=True)
            shm.copies = shared
        self._publishers = {
            early: Publisher(OwnRank(InstanceName("p"), self._life, 0, KEY),
                             PublisherSettings("127.0.0.1", 0, TRANSPORTS[name], TIMEOUT_S, cover=early),
                             Publishing[StoredCopy](keep_s=600, send_s=600, grace_s=1), store=self._store, servers=servers)
            for early in (False, True)}

    def hello(self) -> dict[str, Any]:
        return {"life": self._life, "at": {str(int(early)): one.address for early, one in self._publishers.items()}}

    def meet(self, other: dict[str, Any]) -> None:
        del other

    def ready(self, block: int, *, cover: int) -> None:
        self._publisher = self._publishers[cover not in {0, LATE}]
        arrays, blocks = shape(self._size, block)
        lease = self._store.lease(self._size)
        if lease is None:
            raise RuntimeError("the copy of the last transfer was not freed")
        copy = StoredCopy(lease, layouts(self._size, block), range(arrays), (0, blocks))
        self._publisher.push(Key(TransferId(f"{self._count:032x}"), Attempt(1), 1), [copy])
        self._count += 1
        time.sleep(0.05)  # prefill has copies before anybody asks for them, and makes their sums

    def move(self, block: int) -> None:
        while not (reports := self._publisher.take_reports()):
            time.sleep(PREFILL_STEP_S)
        if reports[0].outcome is not Outcome.OK:
            raise RuntimeError(reports[0].reason)
        while self._store.used_bytes:
            time.sleep(PREFILL_STEP_S)


class Decode:
    """A new receiver for each block size and with sums or without, since these belong to the machine."""

    def __init__(self, name: str, memory: Bytes) -> None:
        self._hub = nixl() if name == "ours_nixl" else None
        self._name = name
        self._memory = memory
        self._made: dict[tuple[int, bool], tuple[Receiver, Receiving]] = {}
        self._count = 0

    def hello(self) -> dict[str, Any]:
        return {}

    def meet(self, other: dict[str, Any]) -> None:
        self._peer = other

    def ready(self, block: int, *, cover: int) -> None:
        if (block, bool(cover)) not in self._made:
            self._made[block, bool(cover)] = self._receiver_of(block, cover=bool(cover)), Receiving(load_s=600, grace_s=1)
        self._receiver, self._machine = self._made[block, bool(cover)]
        arrays, blocks = shape(len(self._memory), block)
        address = HostPort(self._peer["at"][str(int(cover not in {0, LATE}))])
        parts = {at: ArrayPart(at, 0, 1, 0) for at in range(arrays)}
        plan = FetchPlan(layouts(len(self._memory), block), parts, 1, b"prompt")
        ids = tuple(n * 7919 % blocks for n in range(blocks))
        key = Key(TransferId(f"{self._count:032x}"), Attempt(1), 1)
        self._order = Order(str(self._count), key, (TableSpan(0, ids),),
                            (LoadSource(address, Incarnation(self._peer["life"]), plan),))
        self._count += 1

    def _receiver_of(self, block: int, *, cover: bool) -> Receiver:
        """With the piece and the window of an engine on a host."""
        arrays, blocks = shape(len(self._memory), block)
        view, each = memoryview(self._memory), blocks * block
        caches = [CacheArray(view[n * each:(n + 1) * each], block, block) for n in range(arrays)]
        buffers = BufferMemory(lambda size: Chunk(None, memoryview(bytearray(size))), (0, 0))
        landing = HostLanding(caches, buffers, cover=cover)
        fetching = Fetching(Ring(0), Buffer(Buddy(0), Buddy(0), ttl_s=60), piece=PIECE_BYTES,
                            window=KvOptions().window_bytes, cover=cover)
        receiver = Receiver(OwnRank(InstanceName("d"), Incarnation(secrets.token_hex(16)), 0, KEY), fetching, landing,
                            peer_timeout_s=TIMEOUT_S)
        receiver.inbox = Inbox()
        transport = TRANSPORTS[self._name]
        others: dict[Any, OtherLink] = {"tcp": receiver.over_tcp} if transport == "tcp" else {}
        if self._hub is not None:
            others["nixl"] = NixlFetcher(self._hub, insists=True)
        settings = FetchSettings(transport, host() if transport == "shm" else "",
                                 nixl=self._hub.version if self._hub is not None else "", sums=cover)
        receiver.start(Fetcher(settings, receiver, others))
        return receiver

    def move(self, block: int) -> None:
        inbox = self._receiver.inbox
        assert isinstance(inbox, Inbox)
        arrays, blocks = shape(len(self._memory), block)
        inbox.missing = arrays * blocks
        inbox.all.clear()
        for step in self._machine.load(self._order, time.monotonic()):
            assert not isinstance(step, LoadFinished)
            self._receiver.carry_out(step)
        if not inbox.all.wait(WAIT_S):
            raise RuntimeError("nothing comes")
        finished = False
        while inbox:
            event = inbox.popleft()
            if not isinstance(event, FetchedBlocks) or event.link != self._name.removeprefix("ours_"):
                raise RuntimeError(f"not what is measured: {event}")
            for step in self._machine.on_arrived(event.key, event.source, event.blocks, event.size):
                if not isinstance(step, LoadFinished):
                    self._receiver.carry_out(step)
                    continue
                finished = True
                self._receiver.close(step.request)
                if not self._receiver.is_settled(step.request):
                    raise RuntimeError("still being written")
        if not finished:
            raise RuntimeError("all blocks have come, and the load is not committed")
