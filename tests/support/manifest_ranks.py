"""A rank of prefill and one of decode with real threads and sockets, and caches of numpy: no engine, no torch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import pytest

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer, BufferPlace
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.manifests import ALIGN
from xpyd_sidecar.kv.publishing import Publishing
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import WantTry
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.kv.session_bodies import Gpu
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.link_trial import Fetcher, FetchSettings
from xpyd_sidecar.session.publisher import Publisher, PublisherSettings, SendReport
from xpyd_sidecar.session.receiver import BrokenSource, FetchedBlocks, Receiver
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.transport import gates
from xpyd_sidecar.transport.landing import CacheArray, HostLanding
from xpyd_sidecar.transport.links import LinkServer
from xpyd_sidecar.transport.shm.serve import SharedCopies, ShmServer

HEADS: Final = 4
HEAD: Final = 256
LAYERS: Final = 3
HOST: Final = "this host"
COMPILED: Final = gates.COMPILED
SERVICE_KEY: Final = bytes(range(32))


def key(number: int = 1, generation: int = 1) -> Key:
    return Key(TransferId(f"{number:032x}"), Attempt(1), generation)


def wait_until(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.002)


def content(transfer: Key, region: int, block: int, head_bytes: int = HEAD) -> np.ndarray:
    """What prefill computes: all heads of one block."""
    seed = [int(transfer.transfer, 16) % (1 << 31), region, block]
    return np.random.default_rng(seed).integers(0, 256, (HEADS, head_bytes), np.uint8)


class RankPlace(Protocol):
    """A rank of prefill, wherever it is."""

    @property
    def place(self) -> tuple[HostPort, Incarnation]: ...


class Behind:
    """A rank of prefill behind another port of this host, or as another life of it."""

    def __init__(self, source: RankPlace, *, port: int | None = None, life: Incarnation | None = None) -> None:
        address, known = source.place
        self.place = (HostPort(f"127.0.0.1:{port}") if port else address), life or known


class At:
    """A rank of prefill of which that much is known."""

    def __init__(self, address: HostPort, life: Incarnation) -> None:
        self.place = address, life


class Rank:
    """Ends with its block."""

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class PrefillRank(Rank):
    """Copies are made when ``compute`` says so."""

    def __init__(self, *, transport: str = "auto", store_bytes: int = 1 << 20, data_key: bytes = SERVICE_KEY,
                 cover: bool = True, keep_s: float = 60.0, send_s: float = 30.0, grace_s: float = 2.0,
                 timeout_s: float = 5.0, servers: Callable[[PrefillRank], dict[str, LinkServer]] | None = None,
                 head_bytes: int = HEAD, folder: Path | None = None, encrypts: bool = False) -> None:
        self.head_bytes = head_bytes
        self.arrays = (ArrayLayout(HEADS, head_bytes, 1),) * LAYERS
        self.shared = SharedCopies(store_bytes)
        self.store = CopyStore(lambda size: Chunk(None, self.shared.copies), store_bytes)
        self.machine = Publishing[StoredCopy](keep_s=keep_s, send_s=send_s, grace_s=grace_s)
        self.me = OwnRank(InstanceName("p"), Incarnation(secrets.token_hex(16)), 0, data_key)
        self.shm = ShmServer(HOST, folder, insists=transport == "shm")
        self.shm.copies = self.shared
        self.reports: list[SendReport] = []
        made: dict[str, LinkServer] = servers(self) if servers is not None else {"shm": self.shm}
        settings = PublisherSettings("127.0.0.1", 0, transport, timeout_s, cover, encrypts)
        self.publisher = Publisher(self.me, settings, self.machine, store=self.store, servers=made)

    @property
    def place(self) -> tuple[HostPort, Incarnation]:
        """Where it listens, and its life."""
        return self.publisher.address, self.me.incarnation

    def compute(self, transfer: Key, first: int, count: int, *, layers: int = LAYERS, holder: str = "", hold: int = 0,
                gone: Callable[[], Callable[[], None]] | None = None) -> None:
        """Copy blocks of all layers out, so many layers in one copy. ``gone``: asked for what to call when one is freed."""
        size = HEADS * self.head_bytes
        for region in range(0, LAYERS, layers):
            regions = range(region, min(LAYERS, region + layers))
            each = round_up(count * size, ALIGN)
            lease = self.store.lease(each * len(regions), holder)
            assert lease is not None, "the store is full"
            view = np.frombuffer(lease.chunk.view, np.uint8)
            for nth, one in enumerate(regions):
                for block in range(count):
                    at = nth * each + block * size
                    view[at:at + size] = content(transfer, one, first + block, self.head_bytes).reshape(-1)
            self.publisher.push(transfer, [StoredCopy(lease, self.arrays, regions, (first, count),
                                                            gone=gone() if gone is not None else None)], hold)

    def reported(self, count: int = 1) -> list[SendReport]:
        """Transfers that have ended, once there are so many."""
        def enough() -> bool:
            self.reports += self.publisher.take_reports()
            return len(self.reports) >= count

        wait_until(enough)
        return self.reports

    def stop(self) -> None:
        self.publisher.stop()


class RingLanding(HostLanding):
    """Of a cache in host memory, with a ring as a device has one."""

    def __init__(self, caches: Sequence[CacheArray], buffers: BufferMemory, ring: memoryview, *, cover: bool) -> None:
        super().__init__(caches, buffers, cover=cover)
        self._ring = ring

    def _memory(self, at: int | BufferPlace) -> memoryview:
        return self._ring[at:] if isinstance(at, int) else super()._memory(at)


class DecodeRank(Rank):
    """Caches of so many blocks; head ``head`` and the next ones of the source are its own."""

    def __init__(self, *, transport: str = "auto", blocks: int = 64, head: int = 0, heads: int = HEADS, ring: int = 0,
                 buffer: int = 0, entries: int = 4096, data_key: bytes = SERVICE_KEY, cover: bool = True,
                 piece: int = 1 << 20, timeout_s: float = 5.0,
                 others: Callable[[DecodeRank], dict[Any, Any]] | None = None,
                 host: str = HOST, nixl: str = "", gpu: Gpu | None = None, head_bytes: int = HEAD,
                 folder: Path | None = None, claim_s: float = 60.0, pool: int = 0, encrypts: bool = False) -> None:
        if transport == "tcp" and not COMPILED:
            pytest.skip("the link tcp was not compiled here")
        self.head_bytes = head_bytes
        self.caches = [np.zeros((blocks, heads, head_bytes), np.uint8) for _ in range(LAYERS)]
        self.head, self.heads = head, heads
        memory = BufferMemory(_host_memory, (buffer, pool))
        lookup: Buffer[Any] = Buffer(Buddy(buffer), Buddy(pool), ttl_s=claim_s, most=entries, usable=memory.usable)
        self.machine = Fetching(Ring(ring), lookup, piece=piece, window=4 << 20, cover=cover)
        self.ring = np.zeros(max(ring, 1), np.uint8)
        caches = [CacheArray(one.reshape(-1).data, heads * head_bytes, head_bytes) for one in self.caches]
        self.landing = RingLanding(caches, memory, self.ring.data, cover=cover)
        self.me = OwnRank(InstanceName("d"), Incarnation(secrets.token_hex(16)), 0, data_key)
        self.receiver = Receiver(self.me, self.machine, self.landing, peer_timeout_s=timeout_s)
        self.arrived: dict[Key, set[tuple[int, int]]] = {}
        self.links: set[str] = set()
        self.broken: list[BrokenSource] = []
        name = host if transport in {"auto", "shm"} else ""
        settings = FetchSettings(transport, name, folder, nixl, gpu, cover, encrypts)
        tcp = {"tcp": self.receiver.over_tcp} if transport in {"auto", "tcp"} else {}
        made: dict[Any, Any] = tcp if others is None else others(self)
        self.receiver.start(Fetcher(settings, self.receiver, made))

    def want(self, transfer: Key, source: RankPlace, ids: tuple[int, ...] | None, *, first: int = 0, whole: int = 0,
             takers: int = 1, nothing: bool = False, ahead: bool = False) -> WantTry:
        """Take blocks ``first``.. of a prompt; ``ids`` None: there are no blocks yet. ``whole``: blocks of the prompt."""
        parts = {} if nothing else {at: ArrayPart(at, self.head, self.heads, 0) for at in range(LAYERS)}
        arrays = (ArrayLayout(HEADS, self.head_bytes, 1),) * LAYERS
        plan = FetchPlan(arrays, parts, takers, transfer.transfer.encode(), whole * len(parts), ahead)
        tables = (TableSpan(first, ids),) if ids is not None else None
        want = WantTry(f"r{transfer.transfer[-4:]}", transfer, 0, *source.place, plan, tables)
        self.receiver.carry_out(want)
        return want

    def hear(self) -> None:
        """Take what has come."""
        while self.receiver.inbox:
            event = self.receiver.inbox.popleft()
            if isinstance(event, FetchedBlocks):
                self.links.add(event.link)
                got = self.arrived.setdefault(event.key, set())
                for region, first, count in event.blocks:
                    got.update((region, block) for block in range(first, first + count))
            else:
                self.broken.append(event)

    def has(self, transfer: Key, first: int, count: int) -> bool:
        """Whether all blocks have come so far."""
        self.hear()
        return self.arrived.get(transfer, set()) >= {(region, block) for region in range(LAYERS)
                                                     for block in range(first, first + count)}

    def right(self, transfer: Key, first: int, ids: tuple[int, ...]) -> bool:
        """Whether they are prefill's bytes, in their places."""
        mine = slice(self.head, self.head + self.heads)
        return all((self.caches[region][block] == content(transfer, region, first + nth, self.head_bytes)[mine]).all()
                   for region in range(LAYERS) for nth, block in enumerate(ids))

    def outcomes(self) -> list[Outcome]:
        self.hear()
        return [one.outcome for one in self.broken]

    def broken_off(self, count: int = 1) -> list[Outcome]:
        """Why sources were lost, once so many are."""
        wait_until(lambda: len(self.outcomes()) >= count)
        return self.outcomes()

    def whole(self, transfer: Key, first: int, ids: tuple[int, ...]) -> None:
        """Wait for all blocks, which are prefill's."""
        wait_until(lambda: self.has(transfer, first, len(ids)) or self.broken)
        assert not self.broken, self.broken
        assert self.right(transfer, first, ids)

    def stop(self) -> None:
        self.receiver.stop()


def _host_memory(size: int) -> Chunk:
    memory = np.zeros(size, np.uint8)
    return Chunk(memory, memory.data)
