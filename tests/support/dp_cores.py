"""Data-parallel engine cores of vLLM under the rules: its classes and its scheduler, a model that only counts, no devices.

Runs with the Python sources of any version. Each rank is a thread; a forward ends when all ranks are in theirs, as those do
that share experts.

    with cores(monkeypatch, "rpc") as (one, other):
        answer = one.ask([1, 2, 3], 5)              a request of 5 tokens, as the front end's message
        one.call("pause_generation", "wait")        a utility, as the front end's message; its result, or what it raised
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dp_ranks import Lockstep, Store
from scheduled_engines import BLOCK, BLOCKS, hash_of, vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from xpyd_sidecar.engine.dp_plugin import compat, patch
from xpyd_sidecar.engine.dp_plugin.settings import Mode, StepSyncSettings

WAIT_S = 60.0


class Executor:
    """A model whose forward is the collective of all ranks."""

    is_sleeping = False

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self.forwards: list[str] = []
        """Of this rank, in turn: real or dummy."""

    def execute_model(self, plan: Any, non_block: bool = False) -> Any:
        done: Future[Any] = Future()
        names = list(plan.num_scheduled_tokens)
        if names:
            self._forward("real")
        done.set_result(ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, [[7] for _ in names]))
        return done

    def execute_dummy_batch(self) -> None:
        self._forward("dummy")

    def _forward(self, kind: str) -> None:
        self._lockstep.forward()
        self.forwards.append(kind)

    def collective_rpc(self, method: str, *_: Any, **__: Any) -> list[None]:
        return [None]

    def reset_encoder_cache(self) -> None:
        """There is none."""


class Core:
    """One rank: a ``DPEngineCoreProc`` with what its ``__init__`` would have made, but for sockets and devices."""

    def __init__(self, rank: int, size: int, store: Any, lockstep: Lockstep) -> None:
        self.rank = rank
        self.executor = Executor(lockstep)
        self.told: list[Any] = []
        """What it has sent, by message."""
        self.error: BaseException | None = None
        self._calls = itertools.count()
        config = vllm_config(kv_transfer=False)
        config.shutdown_timeout = 0
        parallel = SimpleNamespace(data_parallel_master_ip="127.0.0.1", data_parallel_size_local=size,
                                   data_parallel_size=size)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
        kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer0"], spec)], hash_block_size=BLOCK)
        kv_cache.cache_hit_alignment_tokens = BLOCK
        engine = self.engine = compat.DPEngineCoreProc.__new__(compat.DPEngineCoreProc)
        engine.vllm_config = SimpleNamespace(parallel_config=parallel, shutdown_timeout=0,
                                             observability_config=config.observability_config)
        engine.scheduler = Scheduler(config, kv_cache, StructuredOutputManager(config), BLOCK)
        engine.model_executor = self.executor
        engine.step_fn = engine.step
        engine.input_queue, engine.output_queue, engine.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        engine.shutdown_state = EngineShutdownState.RUNNING
        engine._idle_state_callbacks = []
        engine.batch_queue = engine.mm_receiver_cache = engine.eep_scaling_state = None
        engine.process_input_queue_block = engine.has_coordinator = True
        engine.publish_dp_lb_stats = engine.log_stats = engine.reject_new_requests = engine.pending_pause = False
        engine.check_for_draft_tokens = engine.async_scheduling = engine.ignore_start_dp_wave = False
        engine._weight_version = "0"
        engine.last_counts, engine.current_wave, engine.step_counter = (0, 0), 0, 0
        engine.prefill_schedule_interval = engine.dp_sync_interval = 1
        engine.engine_index = engine.dp_rank = rank
        engine.dp_size, engine.dp_store = size, store
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(BLOCK, hash_of)
        self._thread = threading.Thread(target=self._run, name=f"core-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self.engine.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:
            self.error = error
            raise

    def send(self, kind: EngineCoreRequestType, message: Any) -> None:
        self.engine.input_queue.put_nowait((kind, message))

    def ask(self, prompt: list[int], most: int) -> str:
        """The request's name."""
        name = f"{self.rank}-{next(self._calls)}"
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        request = Request(name, prompt, params, None, block_hasher=self._hasher)
        self.send(EngineCoreRequestType.ADD, (request, 0))
        return name

    def begin(self, method: str, *args: Any) -> int:
        """Call a utility; the number of the call."""
        number = next(self._calls)
        self.send(EngineCoreRequestType.UTILITY, (0, number, method, args))
        return number

    def result(self, number: int) -> Any:
        """Wait for what a utility gives. Raises RuntimeError with what it raised."""
        found: list[Any] = []

        def come() -> bool:
            found[:] = [one.utility_output for one in self.outputs()
                        if one.utility_output is not None and one.utility_output.call_id == number]
            return bool(found)

        wait(come, f"call {number} of rank {self.rank}")
        if found[0].failure_message is not None:
            raise RuntimeError(found[0].failure_message)
        return found[0].result

    def outputs(self) -> list[Any]:
        """Everything that it has sent."""
        while not self.engine.output_queue.empty():
            self.told.append(self.engine.output_queue.get_nowait()[1])
        return self.told

    def tokens(self, name: str) -> int:
        return sum(len(one.new_token_ids) for said in self.outputs() for one in said.outputs if one.request_id == name)

    def reason(self, name: str) -> str:
        """Why a request has ended; empty: it has not."""
        return next((str(one.finish_reason) for said in self.outputs() for one in said.outputs
                     if one.request_id == name and one.finish_reason is not None), "")

    def leave(self) -> None:
        self.engine.shutdown_state = EngineShutdownState.REQUESTED
        self.send(EngineCoreRequestType.WAKEUP, None)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"rank {self.rank} has not left"
        assert self.error is None, self.error


def wait(condition: Callable[[], Any], what: str, deadline_s: float = WAIT_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.002)


@contextmanager
def cores(monkeypatch: pytest.MonkeyPatch, mode: Mode, size: int = 2) -> Iterator[list[Core]]:
    """Ranks that run until the end of the block, and must leave then; vLLM's classes are its own afterwards."""
    kind, stock = compat.DPEngineCoreProc, dict(vars(compat.DPEngineCoreProc))
    settings = StepSyncSettings(mode)
    compat.check_sources()  # as ``prepare`` does, once: several threads at a time cannot parse (CPython 3.11)
    patch.install(settings)
    try:
        store, lockstep = Store(), Lockstep(size)
        made = [Core(rank, size, store, lockstep) for rank in range(size)]
        for one in made:
            one.start()
        yield made
        for one in made:
            one.leave()
        for one in made:
            one.join()
    finally:
        for name in set(vars(kind)) - set(stock):
            delattr(kind, name)
        for name, value in stock.items():
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)
