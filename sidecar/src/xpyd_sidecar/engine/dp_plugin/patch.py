"""Replaces methods of vLLM's data-parallel engine core, so that its ranks are kept in step by the rules of ``dp`` instead
of vLLM's waves (docs/protocols/dp-step.md).

    vLLM's waves                                 rules
    all-reduce every 16 steps: anybody busy?     a rank runs steps while local < granted
    front end starts a wave                      a rank announces a forward beyond granted; START_DP_WAVE is dropped
    pause: all-reduce                            ranks vote
    resume: all-reduce                           each rank for itself

vLLM chooses the class before plugins load, so its methods are replaced and not the class, once it is known that this
engine can be kept in step. ``local`` counts the forwards that a rank has begun, each when it is handed to the executor and
nowhere else; ``granted`` is the last one that all ranks must run.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Final

from xpyd_sidecar.dp.rank import Rank
from xpyd_sidecar.engine import compat as vllm_compat
from xpyd_sidecar.engine.dp_plugin import compat, meeting
from xpyd_sidecar.engine.dp_plugin.compat import DPEngineCoreProc, EngineCore, EngineCoreProc, EngineCoreRequestType
from xpyd_sidecar.engine.dp_plugin.settings import StepSyncSettings
from xpyd_sidecar.engine.dp_plugin.steps import Steps
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process.host_identity import place

logger = logging.getLogger(__name__)

ASLEEP_S: Final = 0.001
_PREPARED = "_xpyd_prepared"


def prepare(settings: StepSyncSettings) -> None:
    """Have each engine core of this process decide, before it makes its KV cache, whether the rules are used for it
    (``decide``). A second call does nothing.

    Raises:
        ConfigError: the sources of this vLLM are not those that the rules were written for.
    """
    if getattr(EngineCore, _PREPARED, False):
        return
    vllm_compat.log_like_vllm("xpyd_sidecar")
    compat.check_sources()
    stock = EngineCore._initialize_kv_caches

    def initialize(self: Any, config: Any) -> Any:
        if decide(self, config, settings):
            install(settings)
        return stock(self, config)

    EngineCore._initialize_kv_caches = initialize
    setattr(EngineCore, _PREPARED, True)


def decide(engine: Any, config: Any, settings: StepSyncSettings) -> bool:
    """Whether the ranks of an engine are kept in step by the rules; where not, the reason is logged. ``config``: vLLM's.

    Raises:
        ConfigError: ``XPYD_DP_SYNC`` asks for ``rpc`` or ``shm`` and the rules cannot be used, or this vLLM cannot run
            data-parallel ranks that share experts at all.
    """
    nothing, reason = compat.unusable(engine, config), ""
    if not nothing:
        if never := compat.impossible(config):
            raise ConfigError(f"data_parallel_size {config.parallel_config.data_parallel_size}: {never}")
        reason = compat.refusal(engine, config)
    if not nothing and not reason:
        return True
    if settings.mode != "auto":
        raise ConfigError(f"XPYD_DP_SYNC={settings.mode}: {nothing or reason}; set it to auto or disabled")
    log = logger.info if nothing else logger.warning
    log("xpyd: no step sync: %s", nothing or reason)
    return False


def join(engine: Any, settings: StepSyncSettings) -> Steps:
    """Wait until all data-parallel ranks of the engine have met, and count the forwards of this one from now on.

    Raises:
        ConfigError: a rank does not come in time, or has other settings; the message names it.
    """
    parallel = engine.vllm_config.parallel_config
    site = meeting.Site(
        engine.dp_store, engine.dp_rank, engine.dp_size, parallel.data_parallel_master_ip,
        parallel.data_parallel_size_local == parallel.data_parallel_size,
        (vllm_compat.version(), *compat.sources().values()), place())

    def wake() -> None:
        engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def abandon(error: Exception) -> None:
        logger.critical("xpyd: DP rank %d is stuck in a step and ends: %s", engine.dp_rank, error)
        engine._send_engine_dead()
        os._exit(1)

    def make(rank: Rank) -> Steps:
        return Steps(rank, wake, abandon, settings.timeout_s)

    steps = meeting.meet(site, settings, make)
    _count(engine, steps)
    return steps


def _count(engine: Any, steps: Steps) -> None:
    executor = engine.model_executor
    execute_model, execute_dummy_batch = executor.execute_model, executor.execute_dummy_batch

    def counted_model(plan: Any, *args: Any, **kwargs: Any) -> Any:
        if plan.total_num_scheduled_tokens > 0:
            steps.begin(budget(engine.scheduler.running))
        return execute_model(plan, *args, **kwargs)

    def counted_dummy() -> Any:
        steps.dummy()
        return execute_dummy_batch()

    executor.execute_model, executor.execute_dummy_batch = counted_model, counted_dummy


def budget(running: Any) -> int:
    """The most tokens that any of the running requests may still generate: ``max_tokens`` less those that it has, and
    those that vLLM has scheduled ahead (``num_output_placeholders``); at least 1.
    """
    left = (request.max_tokens - request.num_output_tokens - request.num_output_placeholders for request in running)
    return max(1, max(left, default=1))


def install(settings: StepSyncSettings) -> None:
    """Replace methods of vLLM's ``DPEngineCoreProc`` by ones that follow the rules, in all engine cores of this process."""
    stock_queue = DPEngineCoreProc._process_input_queue
    stock_idle = EngineCoreProc._notify_idle_state_callbacks
    stock_shutdown = EngineCoreProc._handle_shutdown
    stock_resume = EngineCoreProc.resume_scheduler  # of 0.33: it lets in again what a pause turned away

    def engines_running(self: Any) -> bool:
        steps: Steps | None = self.__dict__.get("_xpyd_steps")
        return steps is not None and steps.busy()

    def set_engines_running(self: Any, value: bool) -> None:
        """Ignore what vLLM's code for waves writes: ``Steps`` alone knows whether a step is due."""

    def run_busy_loop(self: Any) -> None:
        steps = self._xpyd_steps = join(self, settings)
        try:
            while self._handle_shutdown():
                self._process_input_queue()
                steps.check()
                self._maybe_publish_request_counts()
                executed = self._process_engine_step()
                self._maybe_publish_request_counts()
                if not executed and steps.state.is_behind:
                    if self.model_executor.is_sleeping:
                        time.sleep(ASLEEP_S)  # the others wait until this rank is woken
                    else:
                        self.execute_dummy_batch()
        finally:
            steps.close()
        raise SystemExit

    def process_input_queue(self: Any) -> None:
        if self.has_work():
            stock_queue(self)
            return
        link = self._xpyd_steps.link
        link.park(parked=True)
        try:
            stock_queue(self)
        finally:
            link.park(parked=False)

    def notify_idle(self: Any) -> None:
        if self._xpyd_steps.idle():
            self.pending_pause = False
            stock_idle(self)

    def pause_complete(self: Any) -> bool:
        self.pending_pause = True
        self._xpyd_steps.pause()
        return False

    def resume_scheduler(self: Any) -> None:
        if self._xpyd_steps.pausing:
            raise RuntimeError("resume_scheduler called while a pause is under way; wait for it first")
        stock_resume(self)

    def handle_shutdown(self: Any) -> bool:
        return bool(stock_shutdown(self)) or not self._xpyd_steps.may_leave()

    def handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if request_type != EngineCoreRequestType.START_DP_WAVE:
            EngineCoreProc._handle_client_request(self, request_type, request)

    def throttle_prefills(self: Any) -> bool:
        interval = self.prefill_schedule_interval
        return interval > 1 and self.engines_running and (self._xpyd_steps.state.local + 1) % interval != 0

    def reinitialize(self: Any, request: Any) -> None:  # noqa: ARG001 (vLLM's signature)
        raise ConfigError("elastic EP cannot be used with XPYD_DP_SYNC; set it to disabled")

    patches: dict[str, Any] = {
        "engines_running": property(engines_running, set_engines_running),
        "run_busy_loop": run_busy_loop,
        "_process_input_queue": process_input_queue,
        "_notify_idle_state_callbacks": notify_idle,
        "_pause_complete": pause_complete,
        "resume_scheduler": resume_scheduler,
        "_handle_shutdown": handle_shutdown,
        "_handle_client_request": handle_client_request,
        "_should_throttle_prefills": throttle_prefills,
        "add_request": EngineCoreProc.add_request,
        "_maybe_publish_request_counts": EngineCoreProc._maybe_publish_request_counts,
        "reinitialize_distributed": reinitialize,
    }
    for name, value in patches.items():
        setattr(DPEngineCoreProc, name, value)
