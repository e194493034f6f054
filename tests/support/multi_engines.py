"""Engines stepped by hand (``connector_sides``) whose connector is vLLM's MultiConnector, with ours and a host store in it.

    p, d = MultiEngine("p", folder, order="ours first"), MultiEngine("d", folder, order="store first", late=True)

vLLM's own class passes every hook on, as in an engine: its scheduler half once, its worker half for each rank. What vLLM's
scheduler would do is done by tests: ask ``match_tokens``, give blocks (``on_allocated``), run steps, end a request.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from connector_sides import BLOCK, Engine, forward
from copies import Clock
from host_store import HostStore
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.engine.scheduler.multi_connector import MultiConnectorReports
from xpyd_sidecar.engine.scheduler.scheduler_side import SchedulerSide
from xpyd_sidecar.engine.worker.worker_side import WorkerSide

Order = Literal["ours first", "store first"]


def _ours(scheduler: SchedulerSide | None, worker: WorkerSide | None) -> XpydConnector:
    made = XpydConnector.__new__(XpydConnector)
    made._scheduler, made._worker, made._connector_metadata = scheduler, worker, None
    return made


def _store(*, late: bool) -> HostStore:
    made = HostStore.__new__(HostStore)
    made._connector_metadata = None
    made.prepare(BLOCK, late=late)
    return made


def _multi(*children: KVConnectorBase_V1) -> MultiConnector:
    made = MultiConnector.__new__(MultiConnector)
    made._connectors, made._requests_to_connector, made._extra_async_saves = list(children), {}, {}
    made._all_support_hma, made._connector_metadata = False, None
    return made


class MultiEngine(Engine):
    """One engine."""

    def __init__(self, name: str, folder: Path, clock: Clock | None = None, *, order: Order = "ours first",
                 late: bool = False, tensor: int = 1, **options: Any) -> None:
        """``late``: see ``host_store``."""
        super().__init__(name, folder, clock, tensor=tensor, runner="v1", **options)
        self.scheduler._siblings = MultiConnectorReports(tensor)
        self.store = _store(late=late)
        ours = _ours(self.scheduler, None)
        self.multi = _multi(*((ours, self.store) if order == "ours first" else (self.store, ours)))
        self._store_at = self.multi._connectors.index(self.store)
        self.ranks = []
        self.stores: list[HostStore] = []
        """By rank."""
        for worker, caches in zip(self.workers, self.caches, strict=True):
            store = _store(late=late)
            store.register_kv_caches(caches)
            self.stores.append(store)
            mine = _ours(None, worker)
            self.ranks.append(_multi(*((mine, store) if order == "ours first" else (store, mine))))
        self.freed: list[str] = []
        """Requests that have ended and whose blocks may go, as the scheduler hears of them."""
        self.tables: dict[str, list[int]] = {}
        self._late = late
        self.behind = 0
        """Outputs of so many steps are not heard yet when the next one begins, as with vLLM's asynchronous scheduler."""
        self._at_once = False
        """Requests of the next step have blocks that are filled within it."""
        self._counts: dict[tuple[str, str], int] = {}

    def match_tokens(self, request: Any, computed: int = 0) -> tuple[int | None, bool]:
        return self.multi.get_num_new_matched_tokens(request, computed)

    def on_allocated(self, request: Any, ids: list[int], external: int) -> None:
        self.tables[request.request_id] = ids
        self._at_once |= external > 0 and self.multi._requests_to_connector[request.request_id] == self._store_at \
            and not self._late
        self.multi.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids,)), external)

    def on_request_ended(self, request: Any) -> bool:
        """Whether its blocks are still needed."""
        return self.multi.request_finished(request, self.tables[request.request_id])[0]

    def step(self, new: tuple[Any, ...] = (), cached: tuple[Any, ...] = (), **_: Any) -> None:
        """One engine step: ``new`` and ``cached`` are (request, computed before, computed in this step)."""
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, block_ids=(self.tables[r.request_id],),
                                                num_computed_tokens=done) for r, done, _ in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, *_ in cached], resumed_req_ids=set(), new_block_ids=[None for _ in cached],
                num_computed_tokens=[done for _, done, _ in cached]),
            num_scheduled_tokens={r.request_id: n for r, _, n in (*new, *cached)}, preempted_req_ids=None,
            has_sync_kv_loads=self._at_once,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (self.tables[name],)))
        self._at_once = False
        orders = self.multi.build_connector_meta(output)
        together = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        for multi, caches, device in zip(self.ranks, self.caches, self.devices, strict=True):
            multi.bind_connector_metadata(orders)
            multi.start_load_kv(None)
            if new or cached:
                forward(device, list(caches), lambda layer, one=multi: one.save_kv_layer(layer, None, None))
            multi.wait_for_save()
            results = multi.get_transfer_results(set())
            for kind in ("finished_sending", "finished_recving"):
                for name in getattr(results, kind):
                    self._counts[kind, name] = self._counts.get((kind, name), 0) + 1
                    if self._counts[kind, name] == len(self.ranks):  # as vLLM's KVOutputAggregator
                        del self._counts[kind, name]
                        getattr(together, kind).add(name)
            together.failed_recving |= results.failed_recving
            together.invalid_block_ids |= multi.get_block_ids_with_load_errors()
            report = multi.build_connector_worker_meta()
            if report is not None:
                known = together.kv_connector_worker_meta
                together.kv_connector_worker_meta = known.aggregate(report) if known else report
            multi.clear_connector_metadata()
            if new or cached:
                device.wait()
        self._unheard.append(together)
        while len(self._unheard) > self.behind:
            self._hear(self._unheard.pop(0))
        self.clock.step()

    def _hear(self, together: KVConnectorOutput) -> None:
        self.multi.update_connector_output(together)
        self.recved += together.finished_recving or ()
        self.freed += together.finished_sending or ()
        self.failed += together.failed_recving
        if (stats := self.multi.get_kv_connector_stats()) is not None:
            for name, value in stats.data["XpydConnector"].data.items():
                self.counts[name] = value if name.endswith("open") else self.counts.get(name, 0) + value
