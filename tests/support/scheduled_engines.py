"""Engines of vLLM's own scheduler and our connector, both roles, with a model that writes down what it reads.

Nothing of vLLM that is compiled is needed, so this runs with the Python sources of any version. The worker is stepped by
hand, in the order of vLLM's runner: a token's KV is its id and its layer, at its place. So a cache that holds anything else
than what the tokens say is wrong, and one can say where.

    p, d = Scheduled("p", folder), Scheduled("d", folder)
    answer = d.ask(tokens, decode_leg(transfer))          p.ask(tokens, prefill_leg(transfer, d.known()), most=1)
    until(lambda: answer.over, p, d)                      answer.wrong == 0

    runner "v1"        bind ▸ loads ▸ forward with hooks ▸ finish_saves ▸ results ▸ reports
    runner "deferred"  bind ▸ loads ▸ forward with hooks ▸ results ▸ reports ▸ finish_saves
                       as Runner V2 of 0.33 with a draft has it
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from make_model import ensure_model
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from xpyd_sidecar.contract import keys, launch, legs, record
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import KVConnectorRole
from xpyd_sidecar.engine.connector import XpydConnector

Runner = Literal["v1", "deferred"]
BLOCK, BLOCKS, LAYERS, HEADS, SIZE = 32, 64, 2, 2, 8
LAYOUT = "LBHNC"
KEY = bytes(range(32))
PATIENCE_S = 60.0
"""Of an engine with its peer: a full machine may keep either waiting."""


def hash_of(value: Any) -> bytes:
    return repr(value).encode()


def vllm_config(*, kv_transfer: bool = True, load_timeout_s: float = PATIENCE_S) -> VllmConfig:
    """Of the tiny model; ``kv_transfer``: with our connector."""
    transfer = launch.kv_transfer_config(KvOptions(peer_timeout_s=10.0, load_timeout_s=load_timeout_s), "recompute")
    config: VllmConfig = EngineArgs(
        model=str(ensure_model()), enforce_eager=True, dtype="float32", max_model_len=1024, block_size=BLOCK,
        max_num_batched_tokens=128, kv_transfer_config=transfer if kv_transfer else None).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.kv_cache_layout = LAYOUT
    return config


class Answer:
    """A request, and what became of it."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.over = False
        self.wrong: int | None = None
        """Values of its prompt's KV that were not what the tokens say, when the first token was made."""
        self.computed = 0
        """Tokens of the prompt that this engine computed itself."""


class Core(EngineCore):
    """Of vLLM's engine core that it makes the scheduler, and knows how the weights are called."""

    def __init__(self, make: Callable[[], Scheduler]) -> None:
        self._weight_version = "default"
        self.scheduler = make()


class Scheduled:
    """One engine."""

    def __init__(self, name: str, folder: Path, *, runner: Runner = "v1", load_timeout_s: float = PATIENCE_S) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        keys.write(self.folder / "key", keys.ServiceKey(KEY))
        self.runner = runner
        self.counts: dict[str, float] = {}
        self.answers: dict[str, Answer] = {}
        self.config = vllm_config(load_timeout_s=load_timeout_s)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
        names = [f"layer{n}" for n in range(LAYERS)]
        kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)], kv_cache_layout=LAYOUT, hash_block_size=BLOCK)
        kv_cache.cache_hit_alignment_tokens = BLOCK
        self.caches = {one: torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE) for one in names}
        environ = {launch.ENV_RUN_DIR: str(self.folder), launch.ENV_KEY_FILE: str(self.folder / "key"),
                   launch.ENV_HOST: "127.0.0.1", launch.ENV_INSTANCE: name}
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(BLOCK, hash_of)
        with mock.patch.dict(os.environ, environ), mock.patch.object(compat, "rest_while"):
            self.core = Core(lambda: Scheduler(self.config, kv_cache, StructuredOutputManager(self.config), BLOCK))
            self.scheduler = self.core.scheduler
            self.worker = XpydConnector(self.config, KVConnectorRole.WORKER, kv_cache)
            self.worker.register_kv_caches(self.caches)
        connector = self.scheduler.get_kv_connector()
        assert isinstance(connector, XpydConnector)
        self.connector = connector
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self._tables: dict[str, list[int]] = {}

    def known(self, instance: str = "d") -> legs.Peer:
        known = record.read(self.folder, 0)
        assert known is not None
        return legs.Peer(InstanceName(instance), known.incarnation, known.control)

    def ask(self, tokens: list[int], leg: dict[str, Any] | None, *, most: int = 4) -> Answer:
        params = SamplingParams(max_tokens=most, ignore_eos=True, extra_args=leg and {"kv_transfer_params": leg})
        request = Request(f"r{len(self.answers)}", tokens, params, None, block_hasher=self._hasher)
        answer = self.answers[request.request_id] = Answer(request)
        self.scheduler.add_request(request)
        return answer

    # --- a step ---

    def step(self) -> None:
        if not self.scheduler.has_requests():
            return
        output = self.scheduler.schedule()
        for one in output.scheduled_new_reqs:
            self._tables[one.req_id] = list(one.block_ids[0])
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            new = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                self._tables[name] = []
            self._tables[name] += new[0] if new else ()
        worker = self.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        done = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            self._write(self.answers[name], done[name], count)
        if output.total_num_scheduled_tokens:
            for layer, cache in self.caches.items():
                worker.save_kv_layer(layer, cache, None)
        if self.runner == "v1":
            worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=results.finished_sending or None, finished_recving=results.finished_recving or None,
            kv_connector_worker_meta=worker.build_connector_worker_meta())
        said.failed_recving |= results.failed_recving
        if self.runner == "deferred":
            worker.wait_for_save()
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(self.answers[name], done[name] + output.num_scheduled_tokens[name]) for name in names]
        made = self.scheduler.update_from_output(output, ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=said))
        for group in made.values():
            for one in group.outputs:
                answer = self.answers[one.request_id]
                answer.tokens += one.new_token_ids
                answer.over |= one.finish_reason is not None
        stats = self.connector.get_kv_connector_stats()
        for kind, value in (stats.data if stats is not None else {}).items():
            self.counts[kind] = value if kind.endswith("open") else self.counts.get(kind, 0) + value

    def _write(self, answer: Answer, first: int, count: int) -> None:
        request, table = answer.request, self._tables[answer.request.request_id]
        answer.computed += max(0, min(request.num_prompt_tokens, first + count) - first)
        for at in range(first, first + count):
            for layer, cache in enumerate(self.caches.values()):
                cache[table[at // BLOCK], :, at % BLOCK] = request.all_token_ids[at] * 10 + layer

    def _sample(self, answer: Answer, after: int) -> list[int]:
        request = answer.request
        if after < request.num_tokens:
            return []
        if answer.wrong is None:
            answer.wrong = self._wrong(request)
        return [sum(request.all_token_ids) % 500]

    def _wrong(self, request: Any) -> int:
        table = self._tables[request.request_id]
        return sum(int((cache[table[at // BLOCK], :, at % BLOCK] != token * 10 + layer).sum())
                   for layer, cache in enumerate(self.caches.values())
                   for at, token in enumerate(request.prompt_token_ids))

    def stop(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def decode_leg(transfer: str) -> dict[str, Any]:
    return legs.encode(legs.Leg(1, Role.DECODE, TransferId(transfer), Attempt(1), PATIENCE_S))


def prefill_leg(transfer: str, decode: legs.Peer) -> dict[str, Any]:
    return legs.encode(legs.Leg(1, Role.PREFILL, TransferId(transfer), Attempt(1), PATIENCE_S, decode))


def until(condition: Callable[[], Any], *engines: Scheduled, deadline_s: float = 120.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        for engine in engines:
            engine.step()
        assert time.monotonic() < end, [engine.counts for engine in engines]
        time.sleep(0.001)
