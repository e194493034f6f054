"""What vLLM loads: ``XpydConnector``. Every hook goes to the scheduler side or the worker side; nothing is decided here."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from xpyd_sidecar.contract import launch
from xpyd_sidecar.engine import compat, settings
from xpyd_sidecar.engine.compat import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    drafting,
)
from xpyd_sidecar.engine.compat import device_room as compat_room
from xpyd_sidecar.engine.reports import Orders, RankAddress, StepReport
from xpyd_sidecar.engine.scheduler.scheduler_side import SchedulerSide
from xpyd_sidecar.engine.stats import PromMetrics, Stats, with_steps
from xpyd_sidecar.engine.worker import device_room
from xpyd_sidecar.engine.worker.memory_sizes import StepLoad
from xpyd_sidecar.engine.worker.worker_side import WorkerSide
from xpyd_sidecar.errors import ConfigError, OurFault
from xpyd_sidecar.process.resources import memory_bytes

logger = logging.getLogger(__name__)


class XpydConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one with the scheduler role in the engine core and one with the worker role per rank."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Check all settings and start the side of ``role``.

        Raises:
            ConfigError: names the setting, variable or feature, and what works.
        """
        compat.check_version()
        compat.log_like_vllm("xpyd_sidecar")
        super().__init__(vllm_config, role, kv_cache_config)
        compat.check_model(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings.read(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._introduced = False
        if role == KVConnectorRole.SCHEDULER:
            outer = compat.outer_transfer()
            recompute = (outer or transfer).kv_load_failure_policy == "recompute"
            self._scheduler = scheduler = SchedulerSide(vllm_config, self._settings, recompute=recompute,
                                                        blocks=kv_cache_config.num_blocks, beside=outer is not None,
                                                        groups=compat.cache_groups(kv_cache_config),
                                                        states=compat.states(kv_cache_config),
                                                        speculation=drafting.speculation_of(vllm_config, kv_cache_config),
                                                        weights=compat.weight_version())
            compat.rest_while(scheduler.rests)

    @property
    def scheduler(self) -> SchedulerSide:
        """The half beside the scheduler."""
        if self._scheduler is None:
            raise OurFault("a scheduler hook was called on a worker's connector")
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The half beside a worker."""
        if self._worker is None:
            raise OurFault("a worker hook was called before register_kv_caches, or on the scheduler's connector")
        return self._worker

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the worker side."""
        config = self._vllm_config
        heads = compat.kv_heads(config, self._kv_cache_config)
        self._worker = worker = WorkerSide(self._settings, compat.rank_of(config), kv_caches,
                                           self._kv_cache_config.num_blocks, heads,
                                           by_layer=not compat.micro_batches(config),
                                           groups=compat.layer_groups(self._kv_cache_config),
                                           drafts=drafting.layers(config, self._kv_cache_config), load=self._load())
        compat.rest_while(worker.rests)

    def _load(self) -> StepLoad:
        config = self._vllm_config
        room = max(0, compat_room.device_bytes_left() - device_room.extra_bytes(self._settings.options))
        return StepLoad(compat.step_tokens(config), compat.ranks_here(config), memory_bytes(), room)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 (vLLM's signature)
        """No (vLLM 0.33 asks): blocks would lose their memory while peers may still write into them."""
        return False

    def unregister_kv_caches(self) -> None:
        """Blocks are about to lose their memory (vLLM 0.33), which nobody may ask for here.

        Raises:
            ConfigError: always, before anything is lost.
        """
        raise ConfigError(compat.NO_SLEEP)

    def restore_kv_caches(self) -> None:
        """Nothing: nobody has unregistered any."""

    def get_handshake_metadata(self) -> RankAddress:
        """Where this rank listens, on its way to the scheduler side."""
        return self.worker.address()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self.worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        self.worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are complete before their request runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's KV of this step is written."""
        self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """All layers are written; nothing is saved where the forward has failed, and they are not.

        vLLM's V1 runner calls this in a ``finally`` (``kv_connector_model_runner_mixin``), so also then: what stands in the
        blocks is not of this request, and would arrive with right checksums.
        """
        failed = sys.exc_info()[1]
        if failed is None:
            self.worker.finish_saves()
        else:
            logger.error("xpyd: nothing of this step is sent, since its forward failed: %r", failed)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that are over, those of them that failed, and, beside other connectors, requests whose blocks may go."""
        over, failed = self.worker.poll()
        return KVConnectorTransferResults(finished_sending=self.worker.take_copied(), finished_recving=over,
                                          failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        """What has ended, on its way to the scheduler side."""
        return self.worker.report()

    # --- scheduler ---

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is copied out is safe, and a preemption is told to the workers, which let go of what is not."""
        return False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Data addresses of all ranks. vLLM 0.33 tells them again after each wake-up; they are as before."""
        if not self._introduced:
            self.scheduler.workers_are(metadata.values())
            self._introduced = True

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Where the cache of prefixes is."""
        self.scheduler.watch_cache(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many prompt tokens come from a prefill engine."""
        return self.scheduler.match_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks have been allocated."""
        self.scheduler.on_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups whose blocks a load fills: all that are moved, so that vLLM clears none of them meanwhile."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """Orders to the workers."""
        return self.scheduler.build_orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Reports of the workers."""
        self.scheduler.on_worker_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """``request_finished_all_groups`` where vLLM knows of one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...],
                                    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Sends are copies, so its blocks may go once they are made."""
        told = self.scheduler.answer(request)
        return self.scheduler.on_request_ended(request), told

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping."""
        return self.scheduler.pending()

    def reset_cache(self) -> bool:
        """Let go of all KV that is on its way, since it may be of other weights; False: some is being loaded."""
        return self.scheduler.reset()

    # --- both ---

    def get_kv_connector_stats(self) -> Stats | None:
        """What has been counted; only the scheduler side counts."""
        return with_steps(self._scheduler.take_stats()) if self._scheduler is not None else None

    def shutdown(self) -> None:
        """End every thread and socket."""
        if self._scheduler is not None:
            self._scheduler.stop()
        if self._worker is not None:
            self._worker.stop()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Statistics as they were on the other side of a pipe."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> PromMetrics:
        """The Prometheus side."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003 (vLLM's signature)
        """No, whatever the role is now: layers that a whole graph ran without their hooks leave at the end of the step."""
        return False


compat.make_known(launch.CONNECTOR_CLASS, launch.CONNECTOR_MODULE)
