"""The connector's half beside a worker: copies final blocks out for the sender, has what the receiver got placed.

All methods but ``stop`` are called by the engine's own thread, in the order of a step:

    begin(orders) → save_layer per layer → start_loads → finish_saves → poll → report
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
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import memory
from xpyd_sidecar.engine.bounds import Budget, Staging, Tally
from xpyd_sidecar.engine.crew import Hand
from xpyd_sidecar.engine.loading import Loading
from xpyd_sidecar.engine.memory import Memory
from xpyd_sidecar.engine.nap import LOOK_S
from xpyd_sidecar.engine.notes import Forwards, packed, packed_first
from xpyd_sidecar.engine.place import place
from xpyd_sidecar.engine.pool import Piece, Pool
from xpyd_sidecar.engine.put import Put
from xpyd_sidecar.engine.receiver import Receiver
from xpyd_sidecar.engine.reports import Orders, RankAddress, Report, SendReport
from xpyd_sidecar.engine.sender import Kept, Sender
from xpyd_sidecar.engine.session import Me
from xpyd_sidecar.engine.settings import Settings
from xpyd_sidecar.engine.ways import choose
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.messages import Rank
from xpyd_sidecar.kv.offers import Push
from xpyd_sidecar.kv.receiving import Receiving
from xpyd_sidecar.kv.sending import Sending

logger = logging.getLogger(__name__)

STAGING_BYTES: Final = 64 << 20
BUFFER_MOST: Final = 1 << 30
"""Of a lookup buffer whose size nobody has chosen."""
RETRY_GRACE_S: Final = 1.0
"""How long a load whose source was lost waits for another try before decode computes the prompt itself."""


class WorkerSide:
    """One rank."""

    def __init__(self, settings: Settings, rank: int, caches: dict[str, torch.Tensor], num_blocks: int,
                 heads: Mapping[str, int] = MappingProxyType({}), *,
                 view: Callable[[dict[str, torch.Tensor], int], Memory] = Memory) -> None:
        """Start sender and receiver. ``heads``: KV heads over all ranks by layer, 0 where all ranks have the same.

        ``view``: makes what copies blocks out of the caches and into them.

        Raises:
            ConfigError: a cache of unknown shape, or an address that cannot be bound.
        """
        options = settings.options
        self._rank = rank
        self._advertised = _advertised(options.advertise_data, rank) if options.advertise_data else None
        self._memory = view(caches, num_blocks)
        me = Me(settings.instance, Incarnation(secrets.token_hex(16)), rank, keys.derive(settings.key, "data"))
        self._incarnation = me.incarnation
        self._arrays = self._memory.arrays(heads)
        regions, block_bytes = len(self._memory.regions), self._memory.total_block_bytes
        cover = options.checksum == "xxh3"
        send = Sending[Kept](keep_s=options.keep_ttl_s, send_s=options.load_timeout_s + options.peer_timeout_s,
                             regions=regions, block_bytes=block_bytes, cover=cover,
                             kinds=[one.kind for one in self._arrays],
                             limit_s=options.load_limit_s + options.peer_timeout_s)
        buffer = _buffer_bytes(options, block_bytes * num_blocks)
        keep = options.keep_bytes + options.host_pool_bytes + (buffer if options.mode == "get" else 0)
        ways, self._groups = choose(options, self._memory.device, self._memory.largest_frame)
        self._sender = Sender(me, send, host=settings.host, port=options.data_port + rank if options.data_port else 0,
                              ways=ways, keep_bytes=keep, peer_timeout_s=options.peer_timeout_s,
                              largest_frame=self._memory.largest_frame, grouping=self._groups)
        pinned = self._memory.device.type == "cuda"
        make = partial(memory.chunk, pinned=pinned)
        self._pool = Pool(memory.mapped_chunk if ways.host and not pinned else make, keep)
        if pinned:
            self._pool.prepare()
        staging = Staging(partial(memory.chunk, self._memory.largest_frame, pinned=pinned),
                          max(2, STAGING_BYTES // self._memory.largest_frame))
        self._receiver = Receiver(me, staging, block_bytes=self._memory.block_bytes,
                                  largest_frame=self._memory.largest_frame, cover=cover,
                                  peer_timeout_s=options.peer_timeout_s, ways=ways, caches=self._memory.caches(),
                                  make=make, buffer_bytes=buffer, pool_bytes=options.host_pool_bytes,
                                  claim_s=options.keep_ttl_s, grouping=self._groups)
        window = max(2, options.window_bytes // block_bytes) if options.mode == "get" else 0
        loads = Receiving(load_s=options.load_timeout_s, grace_s=min(RETRY_GRACE_S, options.peer_timeout_s),
                          regions=regions, cover=cover, window=window, limit_s=options.load_limit_s)
        self._put = Put(options.put_wait_s, options.peer_timeout_s) if options.mode == "put" else None
        self._counts: dict[str, float] = {}
        self._levels: dict[str, int] = {}
        self._settings = settings
        self._hand: Hand | None = None
        self._orders = Orders()
        self.calm = False
        """The engine takes naps."""
        self._saved: set[int] = set()
        self._indexes: list[torch.Tensor] = []
        self._overflowed: dict[Key, None] = {}
        self._forwards = Forwards()
        self._loading = Loading(rank, self._memory, self._receiver, loads, staging=staging, forwards=self._forwards)
        self._first_notes: list[tuple[Key, bytes]] = []

    @property
    def budget(self) -> Budget:
        """Bytes of copies."""
        return self._sender.budget

    @property
    def pool_made(self) -> bool:
        """Whether there is memory for copies."""
        return self._pool.made

    def rests(self, looked_s: float) -> bool:
        """Whether the next step, which was looked for so long, is waited for now."""
        return self.calm or looked_s > LOOK_S

    def address(self) -> RankAddress:
        """What the scheduler side needs to know of this rank."""
        return RankAddress(self._rank, Rank(self._advertised or self._sender.address, self._incarnation),
                           self._arrays, place())

    def begin(self, orders: Orders) -> None:
        """A step begins."""
        self._forwards.begin()
        self._orders = orders
        self.calm = orders.calm
        self._saved.clear()
        if orders.crew and self._hand is None:
            self._hand = Hand(orders.crew, self._rank, host=self._settings.host, key=self._settings.key,
                              let_go=self._sender.release, duty=self.duty)
        self._overflowed.clear()
        self._indexes = [self._memory.index(push.ids) for push in orders.pushes]
        if orders.worked:
            self._sender.progressed(orders.worked)
        for release in orders.releases:
            self._sender.release(release.key, release.outcome, release.reason)

    def duty(self, role: Role) -> dict[str, int]:
        """What this engine is for: memory of the other role goes back. Bytes that are held; on a thread of its own."""
        ahead = self._receiver.ahead
        assert ahead is not None
        if role is Role.PREFILL and self._memory.device.type == "cuda":
            self._pool.prepare()
        self._pool.spare(spare=role is Role.DECODE)
        ahead.spare(spare=role is Role.PREFILL)
        buffer, pool = ahead.used
        return {"kept": self._sender.budget.used, "buffer": buffer, "pool": pool}

    def save_layer(self, layer: str) -> None:
        """A layer's KV of this step is written."""
        if self._orders.pushes:
            for region in self._memory.of_layer.get(layer, ()):
                self._save(region)

    def finish_saves(self) -> None:
        """All layers are written: copy out what no layer hook has announced, and keep later steps from overwriting."""
        if self._orders.pushes:
            for region in range(len(self._memory.regions)):
                self._save(region)
            self._memory.fence()
        if self._put is not None:
            for name, amount in self._put.wait_left(self._orders.pushes).items():
                self._counts[name] = self._counts.get(name, 0) + amount
        if self._orders.tokens:
            forward = self._forwards.end(self._orders.tokens, [push.key for push in self._orders.pushes])
            if self._rank == 0:
                self._first_notes += [(key, packed_first(forward)) for key in self._orders.firsts]

    def _save(self, region: int) -> None:
        if region in self._saved:
            return
        self._saved.add(region)
        for push, index in zip(self._orders.pushes, self._indexes, strict=True):
            self._copy(region, push, index)

    def _copy(self, region: int, push: Push, index: torch.Tensor) -> None:
        if push.key in self._overflowed:
            return
        size = self._memory.block_bytes[region] * len(push.ids)
        if not self._sender.budget.reserve(size, push.holder):
            self._overflowed[push.key] = None
            budget = self._sender.budget
            reason = f"no room to keep {size} bytes more: {budget.used} of {budget.bound} are kept"
            self._sender.release(push.key, Outcome.OVERFLOW, reason)
            return
        piece = self._pool.take(size)  # None where what is free is in parts: then memory of its own, within the same bound
        tally = self._put.tally(push.key) if self._put is not None else None
        out = self._memory.copy_out(region, index, piece.chunk if piece is not None else None)
        kept = Kept(out.data, out.mark, push.holder, partial(self._let_go, piece, tally))
        self._sender.push(push.key, Copy(region, push.first, len(push.ids), kept))

    def _let_go(self, piece: Piece | None, tally: Tally | None) -> None:
        """A copy has left, or was dropped; on the sender's thread."""
        if piece is not None:
            self._pool.give(piece)
        if tally is not None:
            tally.down()

    def start_loads(self) -> None:
        """Begin the loads of this step."""
        orders = self._orders
        self._loading.start(orders)
        self._orders = Orders(pushes=orders.pushes, tokens=orders.tokens, firsts=orders.firsts)

    def poll(self) -> tuple[set[str], set[str]]:
        """Requests whose load is over, and those of them that failed."""
        return self._loading.poll(calm=self.calm)

    def _sent_notes(self) -> list[tuple[Key, bytes]]:
        out = []
        while self._sender.noted:
            noted = self._sender.noted.popleft()
            out.append((noted.key, packed(self._rank, noted, self._forwards.pushed(noted.key))))
        return out

    def report(self) -> Report | None:
        """What has ended since the last report."""
        sends = [SendReport(self._rank, *one) for one in self._sender.take_reports()]
        sent, first, loading = self._sent_notes(), self._first_notes, self._loading
        loaded, self._first_notes, loading.notes = loading.notes, [], []
        loads, loading.reports = loading.reports, []
        moved, loading.moved = loading.moved, {}
        counts, levels = self._counted(), self._leveled()
        if not (sends or loads or moved or counts or levels or sent or loaded or first):
            return None
        return Report(sends, loads, moved, counts, {self._rank: levels} if levels else {}, sent, loaded, first)

    def _counted(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        assert self._receiver.ahead is not None
        for counted in (self._sender.spilling.counted, self._receiver.ahead.counted):
            while counted:
                name, amount = counted.popleft()
                counts[name] = counts.get(name, 0) + amount
        return counts

    def _leveled(self) -> dict[str, int]:
        """Gauges, if one of them has changed."""
        assert self._receiver.ahead is not None
        buffer, pool = self._receiver.ahead.used
        levels = {metrics.KEPT_BYTES: self._sender.budget.used, metrics.BUFFER_USED: buffer, metrics.POOL_USED: pool}
        if self._groups is not None:
            usage = self._groups.usage
            levels |= {metrics.NCCL_GROUPS: usage.groups, metrics.NCCL_BYTES: usage.memory}
        if levels == self._levels:
            return {}
        self._levels = levels
        return levels

    def stop(self) -> None:
        """End the threads."""
        if self._hand is not None:
            self._hand.stop()
        self._receiver.stop()
        self._sender.stop()
        if self._groups is not None:
            self._groups.stop()


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
