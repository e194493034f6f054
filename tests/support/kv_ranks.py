"""One prefill and one decode rank without an engine: real threads and sockets, bytes for a KV cache.

    with PrefillRank() as p, DecodeRank() as d:
        p.copy(KEY, region=0, first=0, blocks=[b"…", b"…"])
        d.load("r", KEY, p, first=0, count=2)
        d.wait(lambda: d.finished)        polls as an engine's thread would
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Self

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import ArrayKind, Cut, PlacedCut
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import Finished, From, Instruction, Order, Receiving
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.marks import NOW, CopyMark
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.session.lookup_buffer import Expecting
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.session.receiver_events import Arrived
from xpyd_sidecar.session.sender import Kept, Sender, SendReport
from xpyd_sidecar.transport.gates import CacheArray
from xpyd_sidecar.transport.nixl.prefill import NixlReading
from xpyd_sidecar.transport.shm.prefill import SharedCopies

if TYPE_CHECKING:  # it needs torch
    from xpyd_sidecar.transport.nccl.decode import NcclGrouping

DATA_KEY = bytes(range(32))
BLOCK = 1000
REGIONS = 2
TIMEOUT_S = 1.5
"""Of tests that wait for somebody's silence."""
PATIENCE_S = 40.0
"""Of all others: on a full machine a thread may get nothing done for seconds."""
TCP = LinkOptions("tcp")
P_LIFE = Incarnation("1" * 32)
D_LIVES = count(1)


def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Wait without polling for a rank."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def key(letter: str = "a", attempt: int = 1) -> Key:
    return Key(TransferId(letter * 32), Attempt(attempt), 1)


def _bytes(chunk: Chunk) -> memoryview:
    """Memory of the host, or of what stands for a GPU."""
    return chunk.view if len(chunk.view) else memoryview(chunk.tensor.numpy())


def whole(regions: int, block_bytes: int) -> tuple[PlacedCut, ...]:
    """All of a source's arrays, as they are."""
    return (PlacedCut(Cut(0, regions, 0, 0, block_bytes), 0, 0),)


class PrefillRank:
    """A sender and what it has reported."""

    def __init__(self, *, data_key: bytes = DATA_KEY, keep_bytes: int = 1 << 20, keep_s: float = PATIENCE_S,
                 send_s: float = PATIENCE_S, cover: bool = True,
                 block: int = BLOCK, ways: LinkOptions = TCP, timeout_s: float = PATIENCE_S,
                 grouping: NcclGrouping | None = None, marks: Callable[[], CopyMark] = lambda: NOW,
                 reading: NixlReading | None = None, store: CopyStore | None = None,
                 sharing: SharedCopies | None = None, kinds: Sequence[ArrayKind] = ()) -> None:
        """``marks``: when a copy is complete; ``store``: where copies lie, if not in memory that this rank makes.

        ``kinds``: of each array, where its blocks may be cut.
        """
        self.block = block
        self.marks = marks
        self.sharing = sharing or (SharedCopies(keep_bytes) if ways.host and store is None else None)
        memory = self.sharing.copies if self.sharing is not None else memoryview(bytearray(keep_bytes))
        self.store = store or CopyStore(lambda size: Chunk(None, memory[:size]), keep_bytes, unit=1)
        self.completions = Completions()
        machine = Sending[Kept](keep_s=keep_s, send_s=send_s, regions=REGIONS, block_bytes=REGIONS * block, cover=cover,
                                kinds=kinds)
        me = LocalRank(InstanceName("p"), P_LIFE, 0, data_key, ways, timeout_s, max(block, 1 << 20), grouping, reading,
                       self.sharing)
        self.sender = Sender(me, machine, host="127.0.0.1", port=0, store=self.store)
        self.address = self.sender.address
        self.incarnation = P_LIFE
        self.reports: list[SendReport] = []

    def copy(self, which: Key, region: int, first: int, blocks: Sequence[bytes], *, holder: str = "",
             gone: Callable[[], None] | None = None) -> None:
        copies = self.made(region, first, blocks, holder, gone)
        self.completions.add(self.marks(), lambda: self.sender.push(which, copies))

    def made(self, region: int, first: int, blocks: Sequence[bytes], holder: str = "",
             gone: Callable[[], None] | None = None) -> list[Copy[Kept]]:
        """A copy in its store."""
        data = b"".join(blocks)
        lease = self.store.lease(len(data), holder)
        assert lease is not None, "no room to keep"
        lease.chunk.view[:] = data
        return [Copy(region, first, len(blocks), Kept(lease.chunk.view, lease, gone))]

    def wait_reports(self, count: int = 1, deadline_s: float = 60.0) -> list[SendReport]:
        end = time.monotonic() + deadline_s
        while len(self.reports) < count:
            self.reports += self.sender.take_reports()
            assert time.monotonic() < end, f"{len(self.reports)} reports"
            time.sleep(0.005)
        return self.reports

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.completions.stop()
        self.sender.stop()


class DecodeRank:
    """A receiver, its machine, and a cache of bytes by (region, block id)."""

    def __init__(self, *, data_key: bytes = DATA_KEY, chunks: int = 8, cover: bool = True, load_s: float = PATIENCE_S,
                 grace_s: float = 0.1, block: int = BLOCK, ways: LinkOptions = TCP, direct: bool = False,
                 buffer_bytes: int = 0, pool_bytes: int = 0, claim_s: float = PATIENCE_S, window: int = 0,
                 timeout_s: float = PATIENCE_S, grouping: NcclGrouping | None = None,
                 reading: NixlReading | None = None) -> None:
        """``direct``: blocks are received right into ``memory`` (by region, 256 blocks each)."""
        self.block = block
        self.memory = [bytearray(256 * block) for _ in range(REGIONS)] if direct else []
        caches = [CacheArray(view, block) for view in map(memoryview, self.memory)]
        self.moved: Counter[str] = Counter()
        most = max(block, 1 << 20)
        self.staging = Staging(lambda _: Chunk(None, memoryview(bytearray(most))), chunks)
        life = Incarnation(f"{next(D_LIVES):032x}")
        me = LocalRank(InstanceName("d"), life, 0, data_key, ways, timeout_s, most, grouping, reading)
        self.receiver = Receiver(me, self.staging, block_bytes=[block] * REGIONS, cover=cover, caches=caches,
                                 make=lambda size: Chunk(None, memoryview(bytearray(size))), buffer_bytes=buffer_bytes,
                                 pool_bytes=pool_bytes, claim_s=claim_s)
        self.machine = Receiving(load_s=load_s, grace_s=grace_s, regions=REGIONS, cover=cover, window=window)
        self.cache: dict[tuple[int, int], bytes] = {}
        self.finished: list[Finished] = []

    def load(self, request: str, which: Key, source: PrefillRank | HostPort, *, first: int, count: int,
             life: Incarnation = P_LIFE, identity: bytes = b"") -> None:
        address = source if isinstance(source, str) else source.address
        ids = tuple(range(100 + first, 100 + first + count))
        sources = (From(address, life, whole(REGIONS, self.block)),)
        order = Order(request, which, (TableSpan(first, ids),), sources, identity)
        self.carry_out(self.machine.load(order, time.monotonic()))

    def expect(self, which: Key, source: PrefillRank, *, blocks: int, identity: bytes = b"") -> None:
        self.receiver.carry_out(Expecting(source.address, P_LIFE, which, identity, blocks * REGIONS))

    def abandon(self, request: str) -> None:
        self.carry_out(self.machine.abandon(request))

    def poll(self) -> None:
        now = time.monotonic()
        for _ in range(len(self.receiver.inbox)):
            self.take_one(now)
        self.carry_out(self.machine.tick(now))

    def take_one(self, now: float) -> None:
        """The engine looks at one event."""
        event = self.receiver.inbox.popleft()
        if not isinstance(event, Arrived):
            self.carry_out(self.machine.broken(event.key, event.source, (event.outcome, event.reason), now,
                                              final=event.final))
            return
        place = self.machine.arrived(event.key, event.source, event.region, (event.first, event.blocks), event.size)
        if place is not None:
            self.moved[event.way] += event.size
            for at, block in enumerate(place.ids):
                source, start = (_bytes(event.chunk), at) if event.chunk else (self.memory[place.region], block)
                self.cache[place.region, block] = bytes(source[start * self.block:(start + 1) * self.block])
            self.carry_out(self.machine.placed(event.key))
        if event.chunk is not None:
            self.emptied(event.chunk)

    def emptied(self, chunk: Chunk) -> None:
        """What was in it is in its blocks."""
        self.staging.give(chunk)

    def wait(self, condition: Callable[[], object], deadline_s: float = 60.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            self.poll()
            assert time.monotonic() < end, f"finished: {self.finished}"
            time.sleep(0.005)

    def wait_outcomes(self, count: int = 1) -> list[Outcome]:
        self.wait(lambda: len(self.finished) >= count)
        return [one.outcome for one in self.finished]

    def carry_out(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            if isinstance(step, Finished):
                self.receiver.close(step.request)
                self.finished.append(step)
            else:
                self.receiver.carry_out(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.receiver.stop()


def content(region: int, block: int, size: int = BLOCK) -> bytes:
    """A block's bytes, different for every place."""
    start = (region * 97 + block * 31) % 251
    return (bytes(range(251)) * (size // 251 + 2))[start:start + size]


def push(p: PrefillRank, which: str = "a", first: int = 0, count: int = 4) -> None:
    """So many blocks of every array are computed."""
    for region in range(REGIONS):
        p.copy(key(which), region, first, [content(region, first + n, p.block) for n in range(count)])
