"""What moves the KV of one rank: memory for copies, a publisher for prefill, a receiver for decode, and their links.

    cache ─▶ store ─▶ publisher ═ shm, NIXL, NCCL, TCP ═▶ receiver ─▶ (ring | lookup buffer) ─▶ cache

Belongs here: how large what is, and what is given to whom, once, when an engine starts. Does not belong here: steps
(``worker_side``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.worker import nixl_setup
from xpyd_sidecar.engine.worker.device_landing import THROUGH_BYTES, DeviceLanding
from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.engine.worker.links_setup import check_encryption, fetcher, shared_server
from xpyd_sidecar.engine.worker.memory_sizes import StepLoad, describe, memory_sizes
from xpyd_sidecar.engine.worker.nccl_setup import nccl_links
from xpyd_sidecar.engine.worker.shm_setup import StoreMemory
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.fetch_state import BufferedPiece
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.publishing import Publishing
from xpyd_sidecar.kv.ring import SHARE, Ring
from xpyd_sidecar.memory.allocation import Allocation, at_once
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.mapped_store import Registrar
from xpyd_sidecar.memory.node_binding import UNBOUND, NodeBinding
from xpyd_sidecar.memory.registration import host_memory
from xpyd_sidecar.memory.store import UNIT, CopyStore
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.publisher import Publisher, PublisherSettings
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.threads.calls import CallThread
from xpyd_sidecar.threads.commands import CommandThread
from xpyd_sidecar.transport.landing import HostLanding
from xpyd_sidecar.transport.links import LinkServer, StoreReader

logger = logging.getLogger(__name__)

LEAST_BLOCKS: Final = 4
"""That there is always room for: of fewer, no holder's share would have one."""
PIECE_BYTES: Final = 2 << 20
"""That are fetched at once on a host; other sessions have their turn between two."""
BUFFER_MOST: Final = 1 << 30
"""Of a lookup buffer whose size nobody has chosen."""
PlaneThread = Completions | Receiver | CallThread | Publisher | CommandThread
"""What has a thread that a rank cannot do without."""


class PlaneSizes(NamedTuple):
    """Bytes of one rank."""

    store: int
    buffer: int
    pool: int
    """Of the lookup buffer's second tier."""
    slab: int
    """Of device memory that copies out pass through; the others of a device are 0 on a host, too."""
    ring: int
    through: int
    """Of device memory that what leaves the lookup buffer passes through."""
    piece: int
    """That is fetched at once."""


def plane_sizes(options: KvOptions, memory: KvCache, num_blocks: int, load: StepLoad, rank: int) -> PlaneSizes:
    """What a rank takes.

    Raises:
        ConfigError: as of ``memory_sizes``.
    """
    pinned = memory.device.type == "cuda"
    buffer, pool = _buffer_bytes(options, memory.cache_block_bytes * num_blocks), options.host_pool_bytes
    sizes = memory_sizes(options.keep_bytes, memory.token_bytes, load, device=pinned, pool=pool)
    store = max(sizes.keep + pool + (buffer if options.mode == "get" else 0),
                LEAST_BLOCKS * sum(round_up(size, UNIT) for size in memory.block_bytes))
    if pinned:
        logger.info("%s", describe(sizes._replace(keep=store), rank))
    if memory.at_once:
        return PlaneSizes(store, buffer, pool, 0, 0, 0, PIECE_BYTES)
    least = 2 * memory.total_block_bytes
    ring = round_up(max(sizes.ring or SHARE * least, least), UNIT)
    piece = ring // (2 * SHARE)
    return PlaneSizes(store, buffer, pool, max(sizes.slab, least), ring, max(THROUGH_BYTES, least, piece), piece)


class DataPlane:
    """Saving, loading and their threads, of one rank."""

    def __init__(self, settings: ConnectorSettings, memory: KvCache, sizes: PlaneSizes, me: OwnRank,
                 heads: Mapping[str, int], *, binding: NodeBinding = UNBOUND) -> None:
        """Take memory and start its threads. ``heads``: KV heads over all ranks by layer, 0 where all ranks have the same.

        ``binding``: says at which NUMA node both are.

        Raises:
            ConfigError: an address that cannot be bound, or a link that was asked for and cannot be had.
        """
        options, pinned = settings.options, memory.device.type == "cuda"
        check_encryption(options)
        shared = shared_server(options)
        shown = StoreMemory(shared, sizes.store, pinned=pinned, insists=options.transport == "shm", binding=binding)
        memory_of = partial(host_memory, pinned=pinned, binding=binding)
        order = max(sizes.piece, *memory.block_bytes)
        nixl = nixl_setup.prepare(options, nixl_setup.NixlMemorySizes(sizes.store, order, sizes.ring), shown.make,
                                  held=lambda: self.store.used_bytes > 0)
        self.lacks = (nixl.lacks,) if nixl.lacks else ()
        """What this rank's links could have and have not, in words."""
        self._nccl = nccl_links(options, memory.device, memory.layouts(heads))
        self._taking = None if memory.at_once else CallThread("xpyd-memory")
        later = self._taking.tell if self._taking is not None else at_once
        self.store = CopyStore(nixl.store, sizes.store, emptied=shown.release if nixl.hub is None else lambda: None,
                               later=later)
        """Copies of blocks, for decode to take."""
        if self._taking is not None:
            self.store.prepare()
        memory.prepare(sizes.slab, sizes.ring + sizes.through, heads)
        servers: dict[str, LinkServer] = {**nixl.servers, **({"shm": shared} if shared is not None else {})}
        if self._nccl is not None:
            servers["nccl"] = self._nccl.server(lambda: self.publisher.tcp)
        self.publisher = _publisher(settings, me, self.store, servers)
        shown.given_up = partial(self.publisher.end_sessions, "shm", "the memory of copies is given up")

        cover = options.checksum == "enabled"
        ahead = BufferMemory(memory_of, (sizes.buffer, sizes.pool), later)
        lookup = Buffer[BufferedPiece](Buddy(sizes.buffer), Buddy(sizes.pool), ttl_s=options.keep_ttl_s,
                                       usable=ahead.usable)
        piece = sizes.piece if self._nccl is None else min(sizes.piece, self._nccl.gpu.piece)
        made = partial(Fetching, buffer=lookup, piece=piece, window=options.window_bytes, cover=cover)
        gpu, threads = None, list[PlaneThread]()
        reader: Callable[[memoryview], StoreReader] | None = None
        if memory.copies is None:
            host = HostLanding(memory.caches(heads), ahead, cover=cover)
            self.receiver = Receiver(me, made(Ring(0)), host, peer_timeout_s=options.peer_timeout_s)
            others = nixl.link_sides(None)
        else:
            registrar = Registrar(memory.copies)
            host_ring = Allocation(memory_of, sizes.ring, later)
            device = DeviceLanding(memory, registrar, host_ring, ahead, through=(sizes.ring, sizes.through), cover=cover)
            self.receiver = Receiver(me, made(Ring(sizes.ring, device.free)), device, peer_timeout_s=options.peer_timeout_s)
            others, threads = nixl.link_sides(host_ring), [device.completions, registrar]
            reader = device.reader
            if self._nccl is not None:
                gpu, others["nccl"] = self._nccl.gpu, self._nccl.fetching(device, self.receiver.over_tcp)
        if self._taking is not None:
            self._taking.start()
            threads.append(self._taking)
        self.receiver.start(fetcher(options, self.receiver, others, reader, nixl=nixl.version, gpu=gpu))
        hubs = [hub for hub in (nixl.hub, self._nccl.hub if self._nccl is not None else None) if hub is not None]
        self.threads: Sequence[PlaneThread] = [self.receiver, *threads, self.publisher, *hubs]
        """In the order in which they end."""
        for one in self.threads:
            binding.thread(one.thread)

    def serve(self, role: Role) -> dict[str, int]:
        """What this engine is for: memory of the other role goes back. Bytes that are held; on a thread that may wait."""
        self.store.spare(spare=role is Role.DECODE)
        if role is Role.PREFILL and self._taking is not None:
            self.store.ready()
        self.receiver.spare(spare=role is Role.PREFILL)
        buffer, pool = self.receiver.buffered_bytes
        return {"kept": self.store.used_bytes, "buffer": buffer, "pool": pool}

    def levels(self) -> dict[str, int]:
        """Gauges by metric name."""
        buffer, pool = self.receiver.buffered_bytes
        found = {metrics.KEPT_BYTES: self.store.used_bytes, metrics.BUFFER_USED: buffer, metrics.POOL_USED: pool}
        if self._nccl is not None:
            usage = self._nccl.hub.usage
            found |= {metrics.NCCL_GROUPS: usage.groups, metrics.NCCL_BYTES: usage.memory}
        return found


def _publisher(settings: ConnectorSettings, me: OwnRank, store: CopyStore, servers: Mapping[str, LinkServer]) -> Publisher:
    options = settings.options
    publishing = Publishing[StoredCopy](keep_s=options.keep_ttl_s, grace_s=options.peer_timeout_s,
                                        send_s=options.load_timeout_s + options.peer_timeout_s,
                                        limit_s=options.load_limit_s + options.peer_timeout_s)
    port = options.data_port + me.rank if options.data_port else 0
    own = PublisherSettings(settings.host, port, options.transport, options.peer_timeout_s,
                            cover=options.checksum == "enabled", encrypts=options.encryption == "enabled")
    return Publisher(me, own, publishing, store=store, servers=servers)


def _buffer_bytes(options: KvOptions, cache_bytes: int) -> int:
    """Of the lookup buffer, next to a KV cache of so many bytes."""
    if options.buffer_bytes is not None:
        return options.buffer_bytes
    if options.buffer_share is not None:
        return int(options.buffer_share * cache_bytes)
    return min(cache_bytes // 10, BUFFER_MOST)
