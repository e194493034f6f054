"""Ranks of prefill and decode under ``held_session``, whose engines do one thing at a time, and laws of what they do.

Held at every step of a rank of decode (docs/decisions/0065): a range of the ring is only for a try that has blocks, and a
session has an eighth of it at most, or one fetch; what goes into blocks directly is of a try that has some, and into the
buffer of one that has none; TAKEN is said once for a manifest in a session, and when nothing of it is still to come. Bytes
of copies that were freed mean nothing from then on, and so does what an unstoppable read fills until it has ended.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from held_links import GARBAGE, LateLanding, LateLink, LateRead, LateServeLink, LateServer, WatchedLanding

from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName
from xpyd_sidecar.kv import fetch_steps
from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer, BufferPlace
from xpyd_sidecar.kv.fetch_state import BufferedPiece
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import ManifestTaken
from xpyd_sidecar.kv.mapping import ArrayKind
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.kv.publishing import Publishing
from xpyd_sidecar.kv.receiving import Instruction, LoadFinished, Order, Receiving, WantTry
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.store import CopyStore, StoreLease
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.link_trial import Fetcher, FetchSettings
from xpyd_sidecar.session.publisher import Publisher, PublisherSettings, SendReport
from xpyd_sidecar.session.receiver import BrokenSource, FetchedBlocks, Receiver
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.transport.landing import CacheArray
from xpyd_sidecar.transport.links import FetchLink, FetchOwner, LinkServer, Session
from xpyd_sidecar.transport.shm.serve import SharedCopies, ShmServer

KEY = bytes(32)
STORE_BYTES = 64 << 10
FREE = 0x55
"""What a block holds that nobody has."""
NEVER_S = 1e6


class LinkKind(NamedTuple):
    """Over what a world's ranks fetch."""

    transport: str
    """``kv.transport`` of both."""
    host: str = ""
    """What both take for their host."""


TCP, SHM, AUTO, LATE = LinkKind("tcp"), LinkKind("shm", "host"), LinkKind("auto", "host"), LinkKind("rdma")


class FreedStore(CopyStore):
    """What is given back means nothing."""

    def give(self, lease: StoreLease) -> None:
        lease.chunk.view[:] = bytes([GARBAGE]) * len(lease.chunk.view)
        super().give(lease)


class HeldCopy(StoredCopy):
    """``held_for``: the step that must be proved before anybody is told of it."""

    held_for = 0


class HeldPrefill:
    """Whose copies are made when ``copy`` is called."""

    def __init__(self, layouts: Sequence[ArrayLayout], *, link: LinkKind, late: dict[str, LateServeLink], cover: bool,
                 timeout_s: float) -> None:
        self.layouts = tuple(layouts)
        shared = SharedCopies(STORE_BYTES)
        memory = Chunk(None, shared.copies)
        self.store = FreedStore(lambda _: memory, STORE_BYTES)
        self.me = OwnRank(InstanceName("p"), Incarnation(secrets.token_hex(16)), 0, KEY)
        servers: dict[str, LinkServer] = {}
        if link.host:
            servers["shm"] = shm = ShmServer(link.host, None, insists=link.transport == "shm")
            shm.copies = shared
        if link is LATE:
            servers["nixl"] = LateServer(shared.copies, late)
        self.machine = Publishing[StoredCopy](keep_s=NEVER_S, send_s=NEVER_S, grace_s=timeout_s)
        settings = PublisherSettings("127.0.0.1", 0, link.transport, timeout_s, cover)
        self.publisher = Publisher(self.me, settings, self.machine, store=self.store, servers=servers)
        self.proved = 0
        self.unfreed: Counter[Key] = Counter()
        """Copies of each try that are not freed."""
        self.ended: Counter[Key] = Counter()
        self.reports: list[SendReport] = []
        tell = self.publisher._tell

        def told(session: Any, step: Any) -> None:
            copy = self.publisher._copies[step.key, step.manifest.number]
            assert isinstance(copy, HeldCopy)
            assert copy.held_for <= self.proved, "told of what is held for a step"
            assert not copy.freed, "told of what is freed"
            tell(session, step)

        self.publisher._tell = told  # type: ignore[method-assign]

    @property
    def place(self) -> tuple[HostPort, Incarnation]:
        return self.publisher.address, self.me.incarnation

    def room(self, regions: range, blocks: int) -> bool:
        return self.store.bound - self.store.used_bytes >= self._size(regions, blocks)

    def _size(self, regions: range, blocks: int) -> int:
        layouts = self.layouts[regions.start:regions.stop]
        return sum(self.store.round_up(blocks * one.heads * one.head_bytes) for one in layouts)

    def copy(self, key: Key, regions: range, first: int, content: Callable[[int, int, int], np.ndarray], blocks: int, *,
             hold: int = 0) -> None:
        """Blocks of arrays; ``content``: of (array, block, head). Nobody hears of it before step ``hold`` is proved."""
        lease = self.store.lease(self._size(regions, blocks))
        assert lease is not None, "there was room"
        copy = HeldCopy(lease, self.layouts, regions, (first, blocks), gone=partial(self._gone, key))
        copy.held_for = hold
        self.unfreed[key] += 1
        view, at = np.frombuffer(lease.chunk.view, np.uint8), 0
        for region in regions:
            one = self.layouts[region]
            packed = PackedArray(first, blocks, one.heads, one.head_bytes, one.run)
            for block in range(first, first + blocks):
                for head in range(one.heads):
                    begin = at + packed.place(block, head)
                    view[begin:begin + one.head_bytes] = content(region, block, head)
            at += self.store.round_up(packed.size)
        self.publisher.push(key, [copy], hold)

    def _gone(self, key: Key) -> None:
        self.unfreed[key] -= 1

    def prove(self, step: int) -> None:
        self.proved = max(self.proved, step)
        self.publisher.on_copies_proved(step)

    def summed(self) -> list[HeldCopy]:
        """Copies whose sums are told, or may be."""
        return [one for one in self.publisher._copies.values() if isinstance(one, HeldCopy) and one.sums and not one.freed]

    def hear(self) -> None:
        """What has ended."""
        for one in self.publisher.take_reports():
            self.reports.append(one)
            self.ended[one.key] += 1
            assert self.ended[one.key] == 1, f"{one.key} has ended twice"

    def due(self) -> list[tuple[str, Callable[[], object]]]:
        return []

    def left(self) -> dict[str, int]:
        """What it still holds, by name."""
        self.hear()
        publisher, machine = self.publisher, self.machine
        return {"used": self.store.used_bytes, "open": machine.open, "early": len(machine._early),
                "leaving": len(machine._leaving), "pressed": machine.pressed_bytes,
                "copies": len(publisher._copies), "held": len(publisher._held), "unsummed": len(publisher._unsummed),
                "began": len(publisher._began), "sizes": len(publisher._sizes), "unfreed": self.unfreed.total()}

    def stop(self) -> None:
        self.publisher.stop()


class HeldDecode:
    """Whose engine looks at one event at a time."""

    def __init__(self, kinds: Sequence[ArrayKind], groups: Sequence[int], slots: int, *, link: LinkKind,
                 late: dict[str, LateServeLink], ring: int, tiers: tuple[int, int], most: int, piece: int, window: int,
                 cover: bool, grace_s: float, ttl_s: float, timeout_s: float, rank: int = 0) -> None:
        """``groups``: of which of a request's tables each array's blocks are; ``slots``: blocks of a group."""
        self.groups = tuple(groups)
        self.cover = cover
        self.caches = [np.full((slots, one.heads, one.head_bytes), FREE, np.uint8) for one in kinds]
        ahead = BufferMemory(_memory, tiers)
        pools = Buddy(tiers[0], 64), Buddy(tiers[1], 64)
        buffer = Buffer[BufferedPiece](*pools, ttl_s=ttl_s, most=most, usable=ahead.usable)
        self.fetching = Fetching(Ring(ring), buffer, piece=piece, window=window, cover=cover)
        caches = [CacheArray(one.reshape(-1).data, kind.block_bytes, kind.head_bytes)
                  for one, kind in zip(self.caches, kinds, strict=True)]
        self.landing = (LateLanding if ring else WatchedLanding)(caches, ahead, cover=cover)
        if isinstance(self.landing, LateLanding):
            self.landing.caches, self.landing.ring = self.caches, _memory(ring).view
        self.me = OwnRank(InstanceName("d"), Incarnation(secrets.token_hex(16)), rank, KEY)
        self.receiver = Receiver(self.me, self.fetching, self.landing, peer_timeout_s=timeout_s)
        self.machine = Receiving(load_s=NEVER_S, grace_s=grace_s)
        self.finished: list[LoadFinished] = []
        self.reads: list[LateRead] = []
        self.said: set[tuple[int, Key, int]] = set()
        """TAKEN: session, try and number of the manifest."""
        self.wrong: list[Key] = []
        """Tries of which a sum was wrong."""
        self._late = late
        others: dict[Any, Any] = {"tcp": self.receiver.over_tcp} if link.transport in {"auto", "tcp"} else {}
        others |= {"nixl": self._make_late} if link is LATE else {}
        settings = FetchSettings(link.transport, link.host, nixl="late" if link is LATE else "", sums=cover)
        self.receiver.start(Fetcher(settings, self.receiver, others))
        carry_out = self.receiver._carry_out

        def watched(steps: Sequence[fetch_steps.Step]) -> None:
            for step in steps:
                self._look(step)
            carry_out(steps)

        self.receiver._carry_out = watched  # type: ignore[method-assign]

    def _make_late(self, session: Session, owner: FetchOwner, welcome: Any,
                   settled: Callable[[FetchLink | None, str], None]) -> bool:
        settled(LateLink(session, owner, self._late[welcome.nixl.agent], self.landing, self.reads), "")
        return False

    def _look(self, step: fetch_steps.Step) -> None:
        """A step keeps the laws."""
        machine = self.fetching
        if isinstance(step, fetch_steps.Fetch):
            one = machine._tries[step.key, step.source]
            if isinstance(step.at, BufferPlace):
                assert one.tables is None, "into the buffer, of a try that has blocks"
                return
            assert one.tables is not None, "into the ring or into blocks, of a try that has none"
            assert (step.at is None) == (not machine.ring.size)
            mine = [flight.size for flight in machine._flights.values()
                    if flight.link == step.link and not isinstance(flight.at, BufferPlace)]
            most = machine.ring.session_bytes_max if machine.ring.size else machine._flights.window
            assert len(mine) == 1 or sum(mine) <= max(most, 1), "more in flight than a session may have"
        elif isinstance(step, fetch_steps.SayFrame) and isinstance(step.body, ManifestTaken):
            said = step.link, step.key, step.body.number
            assert said not in self.said, "TAKEN was said twice"
            self.said.add(said)
            for flight in machine._flights.values():
                coming = flight.owner is not None and flight.owner[0] == step.key and not flight.here
                assert not (coming and (flight.link, flight.manifest) == (step.link, step.body.number)), "not all is here"
        elif isinstance(step, fetch_steps.WrongSum):
            self.wrong.append(step.key)

    # --- what its engine does ---

    def want(self, want: WantTry) -> None:
        self.receiver.carry_out(want)

    def load(self, order: Order, now: float) -> None:
        self.carry_out(self.machine.load(order, now))

    def carry_out(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            if isinstance(step, LoadFinished):
                self.receiver.close(step.request)
                self.finished.append(step)
            else:
                self.receiver.carry_out(step)

    def take_one(self, now: float) -> None:
        """One event of those that have come."""
        event = self.receiver.inbox.popleft()
        if isinstance(event, FetchedBlocks):
            self.carry_out(self.machine.on_arrived(event.key, event.source, event.blocks, event.size))
        else:
            assert isinstance(event, BrokenSource)
            why = event.outcome, event.reason
            self.carry_out(self.machine.on_source_lost(event.key, event.source, why, now, final=event.final))

    def plan(self, source: Any, identity: bytes) -> FetchPlan:
        """What it takes of a source (``mapping.Source``), with its own tables."""
        parts = {region: part._replace(table=self.groups[part.into]) for region, part in source.parts}
        return FetchPlan(source.arrays, parts, source.takers, identity)

    def read(self, at: int) -> None:
        """The link goes on with a read."""
        if self.reads[at].go():
            del self.reads[at]

    def due(self) -> list[tuple[str, Callable[[], object]]]:
        found: list[tuple[str, Callable[[], object]]] = [
            (f"read {at}", partial(self.read, at)) for at in range(len(self.reads))][:1]
        if (give := self.landing.due()) is not None:
            found.append(("kernel", give))
        return found

    def left(self) -> dict[str, int]:
        """What it still holds, by name."""
        receiver, machine = self.receiver, self.fetching
        return {"buffer": sum(machine.buffer.bytes_in_use), "entries": len(machine.buffer), "ring": machine.ring.used_bytes,
                "stuck": machine.ring.stuck_bytes, "tries": len(machine._tries), "flights": len(machine._flights),
                "queued": sum(map(len, machine._queues.values())), "loads": self.machine.open,
                "gates": len(receiver._gates), "wants": len(receiver._wants), "targets": len(receiver._targets),
                "sources": len(receiver._sources), "again": len(receiver._again), "reads": len(self.reads)}

    def stop(self) -> None:
        self.receiver.stop()


def _memory(size: int) -> Chunk:
    memory = np.zeros(size, np.uint8)
    return Chunk(memory, memory.data)
