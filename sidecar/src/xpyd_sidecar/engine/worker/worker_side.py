"""The connector's half beside a worker: final blocks are copied out for the publisher, the receiver fetches those of loads.

All methods but ``stop`` are called by the engine's own thread, in the order of a step:

    begin(orders) → save_layer per layer → start_loads → finish_saves → poll → report

``saving`` is prefill's half, ``loading`` decode's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from xpyd_sidecar.contract import keys, metrics
from xpyd_sidecar.contract.ids import HostPort, Incarnation, join_host_port, split_host_port
from xpyd_sidecar.engine.reports import CopiedReport, Orders, RankAddress, StepReport
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.worker.data_plane import DataPlane, PlaneThread, plane_sizes
from xpyd_sidecar.engine.worker.draft_hooks import DraftHooks
from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.engine.worker.loading import BlockLoader
from xpyd_sidecar.engine.worker.memory_sizes import StepLoad
from xpyd_sidecar.engine.worker.numa_setup import node_binding
from xpyd_sidecar.engine.worker.pulse import PulseThread
from xpyd_sidecar.engine.worker.put_mode import PutMode
from xpyd_sidecar.engine.worker.saving import BlockSaver
from xpyd_sidecar.engine.worker_rpc import WorkerRpcServer
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.messages import ListeningRank
from xpyd_sidecar.kv.reach import LayerGroup
from xpyd_sidecar.kv.receiving import Receiving
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.process.host_identity import place
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.transfer_trace import Forwards, pack_first, pack_note
from xpyd_sidecar.threads import watched
from xpyd_sidecar.threads.idle_polling import LOOK_S

logger = logging.getLogger(__name__)

RETRY_GRACE_S: Final = 1.0
"""How long a load whose source was lost waits for another try before decode computes the prompt itself."""

class WorkerSide:
    """The connector on one worker: one rank's saving, loading and threads."""

    def __init__(self, settings: ConnectorSettings, rank: int, caches: dict[str, torch.Tensor], num_blocks: int,
                 heads: Mapping[str, int] = MappingProxyType({}), *, by_layer: bool = True,
                 groups: Mapping[str, LayerGroup] = MappingProxyType({}), drafts: frozenset[str] = frozenset(),
                 load: StepLoad = StepLoad(),  # noqa: B008 (immutable)
                 view: Callable[[dict[str, torch.Tensor], int, Mapping[str, LayerGroup]], KvCache] = KvCache) -> None:
        """Start publisher and receiver. ``heads``: KV heads over all ranks by layer, 0 where all ranks have the same.

        ``groups``: of layers that share a table of blocks, by layer; empty: there is one. ``by_layer``: a layer's hook says
        that all of the layer is written; else layers leave at the end of the step. ``drafts``: layers of a model that
        drafts. ``load``: what a step brings.
        ``view``: makes what copies blocks out of the caches and into them.

        Raises:
            ConfigError: a cache of unknown shape, or an address that cannot be bound.
        """
        options = settings.options
        self._rank = rank
        self._advertised = _advertised(options.advertise_data, rank) if options.advertise_data else None
        self._memory = view(caches, num_blocks, groups)
        self._arrays = self._memory.arrays(heads)
        self._incarnation = Incarnation(secrets.token_hex(16))
        me = OwnRank(settings.instance, self._incarnation, rank, keys.derive(settings.key, "data"))
        sizes = plane_sizes(options, self._memory, num_blocks, load, rank)
        self._binding = node_binding(self._memory.device, rank)
        self._plane = DataPlane(settings, self._memory, sizes, me, heads, binding=self._binding)
        self.store, self._publisher, self._receiver = self._plane.store, self._plane.publisher, self._plane.receiver
        loads = Receiving(load_s=options.load_timeout_s, grace_s=min(RETRY_GRACE_S, options.peer_timeout_s),
                          limit_s=options.load_limit_s)
        self._put = PutMode(options.put_wait_s, options.peer_timeout_s) if options.mode == "put" else None
        self._completions = Completions()
        self._binding.thread(self._completions.thread)
        self._saving = BlockSaver(self._memory, self._memory.layouts(heads), self.store, self._publisher,
                              completions=self._completions, wait_s=options.keep_ttl_s, put=self._put,
                              layers=self._memory.of_layer if by_layer else {})
        self._levels: dict[str, int] = {}
        self._links: tuple[str, ...] = ()
        self._settings = settings
        self._drafts = DraftHooks(drafts)
        self._hand: WorkerRpcServer | None = None
        self._parts: list[PlaneThread | WorkerRpcServer] = [self._completions, *self._plane.threads]
        """What has a thread that a rank cannot do without, in the order in which they end."""
        self._orders = Orders()
        self._copied: set[str] = set()
        self._moment: CopyMark | None = None
        """When blocks of this step's loads were allotted, in the order of a device's compute stream."""
        self.calm = False
        """The engine takes naps."""
        self._forwards = Forwards()
        self._loading = BlockLoader(rank, self._memory, self._receiver, loads, ahead=options.mode != "get",
                                forwards=self._forwards)
        self._pulse: PulseThread | None = None
        if settings.life and settings.run_dir is not None:
            self._pulse = PulseThread(settings.run_dir, settings.life)

    def rests(self, looked_s: float) -> bool:
        """Whether the next step, which was looked for so long, is waited for now."""
        return self.calm or looked_s > LOOK_S

    def address(self) -> RankAddress:
        """What the scheduler side needs to know of this rank."""
        return RankAddress(self._rank, ListeningRank(self._advertised or self._publisher.address, self._incarnation),
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
                                         let_go=self._publisher.release, duty=self._plane.serve,
                                         abandon=watched.end_process if self._settings.life else None)
            self._binding.thread(self._hand.thread)
            self._parts.insert(0, self._hand)
        if orders.worked:
            self._publisher.on_progress(orders.worked)
        for release in orders.releases:
            self._saving.forget(release.key)
            self._publisher.release(release.key, release.outcome, release.reason)
        if orders.proved:
            self._publisher.on_copies_proved(orders.proved)
        for key in orders.reclaims:
            self._saving.reclaim(key)
        self._moment = self._memory.moment() if orders.loads else None  # behind what still leaves reclaimed blocks
        if orders.forget:
            self._receiver.reset()
        for unclaimed in orders.unclaimed:
            self._receiver.drop_try(*unclaimed)
        self._drafts.begin()
        self._saving.begin(orders.pushes, orders.hold)
        self._copied.update(orders.copied)

    def save_layer(self, layer: str) -> None:
        """A layer's KV of this step is written, or enqueued."""
        self._drafts.on_layer(layer)
        self._saving.layer(layer)

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
                self._loading.report.first_notes += [(key, pack_first(forward)) for key in self._orders.firsts]

    def start_loads(self) -> None:
        """Begin the loads of this step."""
        orders = self._orders
        self._loading.start(orders, self._moment)
        self._moment = None
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
        report.sends = self._publisher.take_reports()
        for send in report.sends:
            self._saving.forget(send.key)
        while self._saving.copied:
            report.copied.append(CopiedReport(self._rank, *self._saving.copied.popleft()))
        while self._publisher.noted:
            noted = self._publisher.noted.popleft()
            report.sent_notes.append((noted.key,
                                      pack_note(self._rank, noted, self._forwards.take_pushing_spans(noted.key))))
        for counted in (self._publisher.counted, self._receiver.counted):
            for name, amount in counted.take().items():
                report.count(name, amount)
        while self._receiver.refused:
            report.refused.append(self._receiver.refused.popleft())
        if (links := (*self._plane.lacks, *self._receiver.links.words)) != self._links:
            self._links = report.links[self._rank] = links
        if levels := self._leveled():
            report.levels[self._rank] = levels
        return None if report == StepReport() else report

    def _leveled(self) -> dict[str, int]:
        """Gauges, if one of them has changed."""
        levels = self._plane.levels() | {metrics.BLOCKS_WAITING: self._saving.waiting}
        if levels == self._levels:
            return {}
        self._levels = levels
        return levels

    def stop(self) -> None:
        """End the threads of the worker side."""
        if self._pulse is not None:
            self._pulse.stop()
        for one in self._parts:
            one.stop()


def _advertised(first: HostPort, rank: int) -> HostPort:
    """Where peers reach this rank, if ``first`` is where they reach rank 0: ports count up as those of ``data_port`` do."""
    host, port = split_host_port(first)
    if port + rank > 65535:
        raise ConfigError(f"advertise_data: {first} leaves no port for rank {rank}")
    return join_host_port(host, port + rank)
