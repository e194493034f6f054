"""The connector's half beside a worker: copies final blocks out for the sender, has what the receiver got placed.

All methods but ``stop`` are called by the engine's own thread, in the order of a step:

    begin(orders) → save_layer per layer → start_loads → finish_saves → poll → report

``saving`` is prefill's half, ``loading`` decode's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import torch

from xpyd_sidecar.contract import keys, metrics
from xpyd_sidecar.contract.ids import HostPort, Incarnation, Role, join_host_port, split_host_port
from xpyd_sidecar.contract.launch import KvOptions, pinned_bytes
from xpyd_sidecar.engine import kv_cache, nixl_setup
from xpyd_sidecar.engine.draft_hooks import DraftHooks
from xpyd_sidecar.engine.kv_cache import KvCache
from xpyd_sidecar.engine.loading import Loading
from xpyd_sidecar.engine.memory_sizes import StepLoad, memory_sizes, told
from xpyd_sidecar.engine.nccl_setup import choose
from xpyd_sidecar.engine.pulse import PulseThread
from xpyd_sidecar.engine.put_mode import PutMode
from xpyd_sidecar.engine.reports import CopiedReport, Orders, RankAddress, StepReport
from xpyd_sidecar.engine.saving import Saving
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.shm_setup import StoreMemory
from xpyd_sidecar.engine.worker_rpc import WorkerRpcServer
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.host_identity import place
from xpyd_sidecar.kv.extents import rounded
from xpyd_sidecar.kv.messages import ListeningRank
from xpyd_sidecar.kv.reach import LayerGroup
from xpyd_sidecar.kv.receiving import Receiving
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.memory.store import UNIT, Allocation, CopyStore
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.session.sender import Kept, Sender
from xpyd_sidecar.session.transfer_trace import Forwards, packed, packed_first
from xpyd_sidecar.threads import watched
from xpyd_sidecar.threads.commands import CommandThread
from xpyd_sidecar.threads.idle_polling import LOOK_S

logger = logging.getLogger(__name__)

LEAST_BLOCKS: Final = 4
"""That there is always room for: of fewer, no holder's share would have one."""
BUFFER_MOST: Final = 1 << 30
"""Of a lookup buffer whose size nobody has chosen."""
RETRY_GRACE_S: Final = 1.0
"""How long a load whose source was lost waits for another try before decode computes the prompt itself."""
RankThread = Completions | Receiver | Sender | CommandThread | WorkerRpcServer
"""What has a thread that a rank cannot do without."""


class WorkerSide:
    """One rank."""

    def __init__(self, settings: ConnectorSettings, rank: int, caches: dict[str, torch.Tensor], num_blocks: int,
                 heads: Mapping[str, int] = MappingProxyType({}), *, by_layer: bool = True,
                 groups: Mapping[str, LayerGroup] = MappingProxyType({}), drafts: frozenset[str] = frozenset(),
                 load: StepLoad = StepLoad(),  # noqa: B008 (immutable)
                 view: Callable[[dict[str, torch.Tensor], int, Mapping[str, LayerGroup]], KvCache] = KvCache) -> None:
        """Start sender and receiver. ``heads``: KV heads over all ranks by layer, 0 where all ranks have the same.

        ``groups``: of layers that share a table of blocks, by layer; empty: there is one. ``by_layer``: a layer's hook says
        that all of the layer is written; else layers leave at the end of the step. ``drafts``: layers of a model that
        drafts. ``load``: what a step brings.
        ``view``: makes what copies blocks out of the caches and into them.

        Raises:
            ConfigError: a cache of unknown shape, an address that cannot be bound, or mode get with several groups.
        """
        options = settings.options
        self._rank = rank
        self._advertised = _advertised(options.advertise_data, rank) if options.advertise_data else None
        self._memory = view(caches, num_blocks, groups)
        several = len({one.group for one in groups.values()}) > 1
        if several and options.mode == "get":
            raise ConfigError("kv connector: mode get pulls blocks in their order, which a model of several KV cache "
                              "groups does not have; use put_async")
        self._arrays = self._memory.arrays(heads)
        regions, block_bytes = len(self._memory.regions), self._memory.total_block_bytes
        cover = options.checksum == "xxh3"
        send = Sending[Kept](keep_s=options.keep_ttl_s, send_s=options.load_timeout_s + options.peer_timeout_s,
                             regions=regions, block_bytes=block_bytes, cover=cover,
                             kinds=[one.kind for one in self._arrays],
                             limit_s=options.load_limit_s + options.peer_timeout_s)
        buffer = _buffer_bytes(options, self._memory.cache_block_bytes * num_blocks)
        pinned = self._memory.device.type == "cuda"
        sizes = memory_sizes(options.keep_bytes, self._memory.token_bytes, load, device=pinned)
        keep = sizes.keep + options.host_pool_bytes + (buffer if options.mode == "get" else 0)
        ways, self._groups = choose(options, self._memory.device, self._memory.largest_frame)
        make = partial(kv_cache.chunk, pinned=pinned)
        bound = max(keep, LEAST_BLOCKS * sum(rounded(size, UNIT) for size in self._memory.block_bytes))
        if pinned:
            bound = pinned_bytes(bound)
            logger.info("%s", told(sizes._replace(keep=bound), rank))
        memory = StoreMemory(ways, bound, pinned=pinned)
        ways, self._reading, copies = nixl_setup.prepare(options, ways, self._memory.largest_frame, bound, memory.make)
        kept = self._reading is not None  # what peers read over NIXL stays where it is
        self.store = CopyStore(copies, bound, emptied=(lambda: None) if kept else memory.emptied)
        """Copies of blocks, for decode to take."""
        if pinned:
            self.store.prepare()
        self._memory.prepare(max(sizes.slab, 2 * block_bytes))
        me = LocalRank(settings.instance, Incarnation(secrets.token_hex(16)), rank, keys.derive(settings.key, "data"), ways,
                       options.peer_timeout_s, self._memory.largest_frame, self._groups, self._reading, memory.sharing)
        self._incarnation = me.incarnation
        self._sender = Sender(me, send, host=settings.host, port=options.data_port + rank if options.data_port else 0,
                              store=self.store)
        largest = max(me.largest_frame, self._reading.piece if self._reading is not None else 0)
        staging = staging_of(sizes.staging, largest, make, prepare=pinned)
        self._receiver = Receiver(me, staging, block_bytes=self._memory.block_bytes, cover=cover, make=make,
                                  caches=self._memory.caches(), buffer_bytes=buffer, pool_bytes=options.host_pool_bytes,
                                  claim_s=options.keep_ttl_s)
        window = max(2, options.window_bytes // block_bytes) if options.mode == "get" else 0
        loads = Receiving(load_s=options.load_timeout_s, grace_s=min(RETRY_GRACE_S, options.peer_timeout_s),
                          regions=regions, cover=cover, window=window, limit_s=options.load_limit_s,
                          groups=self._memory.groups if several else ())
        self._put = PutMode(options.put_wait_s, options.peer_timeout_s) if options.mode == "put" else None
        self._completions = Completions()
        self._saving = Saving(self._memory, self.store, self._sender, self._completions,
                              wait_s=options.keep_ttl_s, put=self._put)
        self._levels: dict[str, int] = {}
        self._settings = settings
        self._by_layer = by_layer
        self._drafts = DraftHooks(drafts)
        self._hand: WorkerRpcServer | None = None
        self._parts: list[RankThread] = [self._completions, self._receiver, self._sender]
        self._parts += [one.hub for one in (self._groups, self._reading) if one is not None]
        """In the order in which they end."""
        self._orders = Orders()
        self._copied: set[str] = set()
        self.calm = False
        """The engine takes naps."""
        self._forwards = Forwards()
        self._loading = Loading(rank, self._memory, self._receiver, loads, staging=staging, forwards=self._forwards,
                                completions=self._completions)
        self._pulse: PulseThread | None = None
        if settings.life and settings.run_dir is not None:
            self._pulse = PulseThread(settings.run_dir, settings.life)

    def rests(self, looked_s: float) -> bool:
        """Whether the next step, which was looked for so long, is waited for now."""
        return self.calm or looked_s > LOOK_S

    def address(self) -> RankAddress:
        """What the scheduler side needs to know of this rank."""
        return RankAddress(self._rank, ListeningRank(self._advertised or self._sender.address, self._incarnation),
                           self._arrays, place())

    def begin(self, orders: Orders) -> None:
        """A step begins."""
        if self._pulse is not None:
            self._pulse.begins()
        self._forwards.begin()
        self._orders = orders
        self.calm = orders.calm
        if orders.crew and self._hand is None:
            self._hand = WorkerRpcServer(orders.crew, self._rank, host=self._settings.host, key=self._settings.key,
                                         let_go=self._sender.release, duty=self.duty,
                                         abandon=watched.end_process if self._settings.life else None)
            self._parts.insert(0, self._hand)
        if orders.worked:
            self._sender.progressed(orders.worked)
        for release in orders.releases:
            self._saving.forget(release.key)
            self._sender.release(release.key, release.outcome, release.reason)
        if orders.proved:
            self._sender.proved(orders.proved)
        for key in orders.reclaims:
            self._saving.reclaim(key)
        if orders.forget:
            self._receiver.ahead.reset()
        for key in orders.unclaimed:
            self._receiver.ahead.unwanted(key)
        self._drafts.begin()
        self._saving.begin(orders.pushes, orders.hold)
        self._copied.update(orders.copied)

    def duty(self, role: Role) -> dict[str, int]:
        """What this engine is for: memory of the other role goes back. Bytes that are held; on a thread of its own."""
        ahead = self._receiver.ahead
        if role is Role.PREFILL and self._memory.device.type == "cuda":
            self.store.prepare()
        self.store.spare(spare=role is Role.DECODE)
        ahead.spare(spare=role is Role.PREFILL)
        kv_cache.give_back_pinned()
        buffer, pool = ahead.used
        return {"kept": self.store.used, "buffer": buffer, "pool": pool}

    def save_layer(self, layer: str) -> None:
        """A layer's KV of this step is written, or enqueued."""
        self._drafts.called(layer)
        if self._by_layer:
            self._saving.layer(self._memory.of_layer.get(layer, ()))

    def finish_saves(self) -> None:
        """All layers are written, or enqueued."""
        self._drafts.finish(pushes=bool(self._orders.pushes))
        self._saving.finish()
        if self._put is not None:
            for name, amount in self._put.wait_left(() if self._orders.hold else self._orders.pushes).items():
                self._loading.report.count(name, amount)
        if self._orders.tokens:
            forward = self._forwards.end(self._orders.tokens, [*dict.fromkeys(push.key for push in self._orders.pushes)])
            if self._rank == 0:
                self._loading.report.first_notes += [(key, packed_first(forward)) for key in self._orders.firsts]

    def start_loads(self) -> None:
        """Begin the loads of this step."""
        orders = self._orders
        self._loading.start(orders)
        self._orders = Orders(pushes=orders.pushes, tokens=orders.tokens, firsts=orders.firsts, hold=orders.hold)

    def poll(self) -> tuple[set[str], set[str]]:
        """Requests whose load is over, and those of them that failed.

        Raises:
            ThreadEnded: a thread that this rank cannot do without has died.
        """
        watched.check(*(one.thread for one in self._parts))
        return self._loading.poll(calm=self.calm)

    def take_copied(self) -> set[str]:
        """Requests whose blocks may go, as the scheduler side has said, since the last call."""
        copied, self._copied = self._copied, set()
        return copied

    def report(self) -> StepReport | None:
        """What has ended since the last report."""
        if self._pulse is not None:
            self._pulse.ends()
        report, self._loading.report = self._loading.report, StepReport()
        report.proves = self._orders.hold
        report.sends = self._sender.take_reports()
        for send in report.sends:
            self._saving.forget(send.key)
        while self._saving.copied:
            report.copied.append(CopiedReport(self._rank, *self._saving.copied.popleft()))
        while self._sender.noted:
            noted = self._sender.noted.popleft()
            report.sent_notes.append((noted.key, packed(self._rank, noted, self._forwards.pushed(noted.key))))
        for counted in (self._sender.spilling.counted, self._receiver.ahead.counted):
            for name, amount in counted.take().items():
                report.count(name, amount)
        if levels := self._leveled():
            report.levels[self._rank] = levels
        return None if report == StepReport() else report

    def _leveled(self) -> dict[str, int]:
        """Gauges, if one of them has changed."""
        buffer, pool = self._receiver.ahead.used
        levels = {metrics.KEPT_BYTES: self.store.used, metrics.BLOCKS_WAITING: self._saving.waiting,
                  metrics.BUFFER_USED: buffer, metrics.POOL_USED: pool}
        if self._groups is not None:
            usage = self._groups.usage
            levels |= {metrics.NCCL_GROUPS: usage.groups, metrics.NCCL_BYTES: usage.memory}
        if levels == self._levels:
            return {}
        self._levels = levels
        return levels

    def stop(self) -> None:
        """End the threads."""
        if self._pulse is not None:
            self._pulse.stop()
        for one in self._parts:
            one.stop()


def staging_of(size: int, frame: int, make: Callable[[int], Chunk], *, prepare: bool = False) -> Staging:
    """Chunks of a frame, or a piece, each in one allocation of ``size`` bytes, two at least; ``prepare``: made now."""
    arena = Allocation(make, max(2, size // frame) * frame)
    if prepare:
        arena.prepare()
    return Staging(lambda number: arena.at(number * frame, frame), arena.size // frame)


def _buffer_bytes(options: KvOptions, cache_bytes: int) -> int:
    """Of the lookup buffer, next to a KV cache of so many bytes."""
    if options.buffer_bytes is not None:
        return options.buffer_bytes
    if options.buffer_share is not None:
        return int(options.buffer_share * cache_bytes)
    return min(cache_bytes // 10, BUFFER_MOST)


def _advertised(first: HostPort, rank: int) -> HostPort:
    """Where peers reach this rank, if ``first`` is where they reach rank 0: ports count up as those of ``data_port`` do."""
    host, port = split_host_port(first)
    if port + rank > 65535:
        raise ConfigError(f"advertise_data: {first} leaves no port for rank {rank}")
    return join_host_port(host, port + rank)
