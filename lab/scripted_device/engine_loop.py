"""An engine core of vLLM's with its own scheduler and busy loop, and a model runner that only takes its time.

    step of prefill   ▸ connector's hooks before ▸ Python of 36 layers, a hook after each ▸ sampling enqueued
                      ▸ hooks after, which enqueue copies ▸ the core waits for the device where it has nothing else to plan

The order is that of Runner V2 (``v1/worker/gpu/model_runner.py``), whose own ``ActiveKVConnector`` calls the hooks; the
core is ``EngineCoreProc`` with asynchronous scheduling, without sockets and without a worker.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from lab.scripted_device import parameters
from lab.scripted_device.counting import Counters
from lab.scripted_device.device import ScriptedDevice
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.compat import KVConnectorRole
from xpyd_sidecar.engine.connector import XpydConnector

BLOCKS = parameters.CACHE_BYTES // (parameters.TOKEN_BYTES * parameters.BLOCK_TOKENS)
TOKEN = 7
"""Whatever is sampled."""
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": parameters.HEAD_SIZE,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "num_attention_heads": 32, "num_hidden_layers": parameters.LAYERS, "num_key_value_heads": parameters.HEADS,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": False, "dtype": "bfloat16", "vocab_size": 512}
"""Of the model `big`."""


def vllm_config(model: str, options: KvOptions) -> VllmConfig:
    """As of the model ``big``. ``model``: a folder with HF_CONFIG as its ``config.json``."""
    config: VllmConfig = EngineArgs(
        model=model, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True,
        max_model_len=parameters.MODEL_LEN, max_num_batched_tokens=parameters.CHUNK_TOKENS, enable_prefix_caching=False,
        kv_transfer_config=launch.kv_transfer_config(options, "recompute")).create_engine_config()
    config.cache_config.block_size = parameters.BLOCK_TOKENS
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.kv_cache_layout = "LBHNC"
    config.scheduler_config.async_scheduling = True
    config.scheduler_config.max_num_batched_tokens = parameters.CHUNK_TOKENS
    return config


class Runner:
    """The executor, its worker and the model runner in one."""

    is_sleeping = False

    def __init__(self, config: VllmConfig, connector: XpydConnector, device: ScriptedDevice, counters: Counters) -> None:
        self._device = device
        self._counters = counters
        self._connector = connector
        hooks = self._hooks = ActiveKVConnector.__new__(ActiveKVConnector)  # its __init__ wants vLLM's globals
        hooks.vllm_config, hooks.kv_connector, hooks._pending_load_kwargs, hooks._disabled = config, connector, None, False
        self._layers = [f"layer{n}" for n in range(parameters.LAYERS)]
        self._prompts: dict[str, int] = {}
        """Their tokens, by request."""
        self._sampled: list[list[int]] = []
        self._plan: Any = None
        self._mark: Any = None

    def execute_model(self, plan: Any, non_block: bool = False) -> Any:
        """A step, up to sampling."""
        del non_block
        done: Future[Any] = Future()
        if not plan.total_num_scheduled_tokens:
            self._counters.add("steps empty")
            done.set_result(self._hooks.no_forward(plan))
            return done
        self._counters.add("steps")
        for name in plan.finished_req_ids:
            self._prompts.pop(name, None)
        self._prompts |= {one.req_id: len(one.prompt_token_ids) for one in plan.scheduled_new_reqs}
        before = {one.req_id: one.num_computed_tokens for one in plan.scheduled_new_reqs}
        before |= dict(zip(plan.scheduled_cached_reqs.req_ids, plan.scheduled_cached_reqs.num_computed_tokens, strict=True))
        chunks = [(before[name], count) for name, count in plan.num_scheduled_tokens.items()]
        self._counters.add("prompt tokens", sum(count for _, count in chunks if count > 1))
        self._sampled = [[TOKEN] if before[name] + count >= self._prompts[name] else []
                         for name, count in plan.num_scheduled_tokens.items()]
        self._hooks.pre_forward(plan)
        seconds = parameters.forward_s(chunks)
        if all(tokens == 1 for _, tokens in chunks):
            self._mark = self._enqueued(parameters.GRAPH_STEP_S, seconds)  # one graph: no hooks
        else:
            for layer in self._layers:
                self._mark = self._enqueued(parameters.EAGER_STEP_S / parameters.LAYERS, seconds / parameters.LAYERS)
                self._connector.save_kv_layer(layer, None, None)  # only its name counts
        self._hooks.finish_forward()
        self._plan = plan
        done.set_result(None)
        return done

    def _enqueued(self, host_s: float, device_s: float) -> Any:
        """Some of a step is enqueued: the device begins with its first kernel."""
        began = time.monotonic()
        self._device.hold(host_s, "runner")
        return self._device.forward(device_s, began)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        """The rest of it."""
        del grammar, non_block
        plan, mark = self._plan, self._mark
        names = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, self._sampled)
        output.kv_connector_output = self._hooks.post_forward(plan.finished_req_ids)
        return AsyncOutputFuture(_Sampled(output, mark), single_value=True)

    def collective_rpc(self, *_: Any, **__: Any) -> list[None]:
        """There is no worker to be called."""
        return [None]

    def shutdown(self) -> None:
        """As an executor's."""
        self._connector.shutdown()


class _Sampled:
    """``AsyncOutput``: tokens are known when the device has come to them."""

    def __init__(self, output: ModelRunnerOutput, mark: Any) -> None:
        self._output = output
        self._mark = mark

    def get_output(self) -> ModelRunnerOutput:
        while not self._mark.wait(1.0):
            pass
        return self._output


def engine_core(config: VllmConfig, device: ScriptedDevice, counters: Counters) -> EngineCoreProc:
    """A core with what its ``__init__`` would have made, but for sockets, ready to run its busy loop."""
    spec = FullAttentionSpec(block_size=parameters.BLOCK_TOKENS, num_kv_heads=parameters.HEADS,
                             head_size=parameters.HEAD_SIZE, dtype=torch.bfloat16)
    names = [f"layer{n}" for n in range(parameters.LAYERS)]
    kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)], kv_cache_layout="LBHNC",
                             hash_block_size=parameters.BLOCK_TOKENS)
    kv_cache.cache_hit_alignment_tokens = parameters.BLOCK_TOKENS
    worker = XpydConnector(config, KVConnectorRole.WORKER, kv_cache)
    shape = BLOCKS, parameters.BLOCK_TOKENS, parameters.HEADS, 2 * parameters.HEAD_SIZE
    worker.register_kv_caches({name: torch.empty(shape, dtype=torch.bfloat16).transpose(1, 2) for name in names})
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.vllm_config = config
    core.model_executor = Runner(config, worker, device, counters)
    core.structured_output_manager = StructuredOutputManager(config)
    core.scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config, kv_cache_config=kv_cache, structured_output_manager=core.structured_output_manager,
        include_finished_set=False, log_stats=True, block_size=parameters.BLOCK_TOKENS,
        hash_block_size=parameters.BLOCK_TOKENS)
    connector = core.scheduler.get_kv_connector()
    assert isinstance(connector, XpydConnector)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_of)
    core.request_block_hasher = get_request_block_hasher(parameters.BLOCK_TOKENS, hash_of)
    core.input_queue, core.output_queue, core.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
    core.batch_queue_size = config.max_concurrent_batches
    core.batch_queue = deque(maxlen=core.batch_queue_size)
    core.step_fn = core.step_with_batch_queue
    core.shutdown_state = EngineShutdownState.RUNNING
    core._idle_state_callbacks = []
    core.mm_receiver_cache = None
    core.process_input_queue_block = core.log_stats = core.async_scheduling = True
    core.publish_dp_lb_stats = core.engines_running = core.check_for_draft_tokens = core.use_spec_decode = False
    core.is_mm_encoder_only = core.is_pooling_model = core.has_coordinator = core.enable_fault_tolerance = False
    core._weight_version = "default"
    core.engine_index = 0
    core.last_counts = (0, 0)
    return core
