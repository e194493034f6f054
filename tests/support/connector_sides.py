"""Both sides of the connector with vLLM's types but without its engine: hooks are called as it would call them.

Real threads and sockets between engines of one or more ranks; the KV caches are small tensors whose contents name their
place.

    p, d = Engine("p", folder), Engine("d", folder)            on CPUs: copies are complete at once
    p, d = Engine("p", folder, clock), Engine("d", folder, clock)      on scripted GPUs: later (``copies``)
    d.scheduler.new_request(request(decode_leg(transfer)))
    prefill(p, request(prefill_leg(transfer, d)), [1, 2, 3])
    until(lambda: idle(p) and idle(d), p, d)

Model runner V1 and the synchronous scheduler, as vLLM has them on CPUs, and V2 and the asynchronous one, as on GPUs:

    V1   begin ▸ forward with hooks ▸ start_loads ▸ finish_saves ▸ poll ▸ report ▸ sampling, waits for the GPU ▸ heard
    V2   begin ▸ forward with hooks ▸ sampling enqueued ▸ start_loads ▸ finish_saves ▸ poll ▸ report ▸ heard a step later
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar

import torch
from block_tables import BlockTables
from copies import LAYER_S, Clock, Cpu, Gpu
from running_threads import until_none_runs
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import KVConnectorOutput

from xpyd_sidecar.contract import keys, legs, metrics, record
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.scheduler.scheduler_side import SchedulerSide
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.worker.worker_side import WorkerSide

KEY = keys.ServiceKey(bytes(range(32)))
BLOCK, BLOCKS, LAYERS = 16, 32, 3
PATIENCE_S = 40.0
"""Of all deadlines that are not the point of a test: on a full machine a thread may get nothing done for seconds."""
NO_HEADS: Mapping[str, int] = {}
Hooks = Literal["layers", "graph", "capturing"]
"""Of a forward: one after each layer; none, since one graph holds all layers; or one after each while that graph is
recorded, which runs nothing, and none when it is replayed.
"""
Runner = Literal["v1", "v2"]


def vllm_config(tensor: int = 1, pipeline: int = 1, *, layout: str = "HND", **model: Any) -> Any:
    hf = {"layers": LAYERS, **model}
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto", get_resolved_kv_cache_layout=lambda: layout),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=1,
                                        data_parallel_index=0, rank=0),
        model_config=SimpleNamespace(dtype="torch.float32", use_mla=False, model="org/tiny", revision="r1",
                                     max_model_len=512, quantization=None, get_diff_sampling_param=lambda: {"top_k": 20},
                                     logits_processors=None, tokenizer_mode="auto", generation_config="auto",
                                     override_generation_config={},
                                     hf_config=SimpleNamespace(to_dict=lambda: hf, _commit_hash="c1")),
        device_config=SimpleNamespace(device_type="cuda"), speculative_config=None, num_prefill_lookahead_tokens=0,
        kv_transfer_config=SimpleNamespace(engine_id="e1"))


class ByHand(Protocol):
    """An engine that is stepped by hand."""

    counts: dict[str, float]

    def step(self) -> Any: ...

    def stop(self) -> None: ...


E = TypeVar("E", bound=ByHand)


@contextmanager
def making(make: Callable[..., E]) -> Iterator[Callable[..., E]]:
    """``make``, of which every engine is stopped in the end; no thread of the connector may be left then."""
    made: list[E] = []

    def build(*args: Any, **options: Any) -> E:
        made.append(make(*args, **options))
        return made[-1]

    try:
        yield build
    finally:
        for engine in made:
            engine.stop()
    until_none_runs("xpyd")


def cache(layout: str, blocks: int = BLOCKS) -> torch.Tensor:
    """One layer's, as vLLM gives it: (blocks, heads, tokens, values) of the memory's order."""
    return torch.zeros(blocks, 2, BLOCK, 4) if layout == "HND" else torch.zeros(blocks, BLOCK, 2, 4).transpose(1, 2)


class Engine:
    """The two sides of one engine, stepped by hand."""

    def __init__(self, name: str, folder: Path, clock: Clock | None = None, *, runner: Runner | None = None,
                 tensor: int = 1, recompute: bool = True, model: dict[str, Any] | None = None, layout: str = "HND",
                 by_layer: bool = True, blocks: int = BLOCKS, described: Any = None, heads: Mapping[str, int] = NO_HEADS,
                 make_caches: Callable[[], dict[str, torch.Tensor]] | None = None, speculation: Speculation | None = None,
                 data: tuple[int, int] = (0, 1), **options: Any) -> None:
        """``clock``: that of a GPU for each rank; None: on a CPU. ``runner``: V1 on a CPU, V2 on a GPU, if not given.

        ``layout``: heads or tokens first in memory. ``by_layer``: as ``WorkerSide`` has it. ``described``, ``make_caches``:
        what vLLM says of a model of several groups, and its memory. ``heads``: by layer, KV heads over all ranks, which are
        shared out; without, each rank's are its own. ``speculation``: its layers come after the others, and call their
        hooks once for each draft. ``data``: its data-parallel rank, of how many.
        """
        self.data_rank, ranks = data
        self.folder = folder / (name if ranks == 1 else f"{name}-{self.data_rank}")
        self.folder.mkdir()
        kv = KvOptions(**{"peer_timeout_s": PATIENCE_S, "load_timeout_s": PATIENCE_S, "claim_s": PATIENCE_S, **options})
        settings = ConnectorSettings(kv, InstanceName(name), "127.0.0.1", KEY, self.folder)
        drafts = speculation or Speculation()
        names = [*(f"layer{n}" for n in range(LAYERS)), *drafts.layers]
        make_caches = make_caches or (lambda: {name: cache(layout, blocks) for name in names})
        self.caches = [make_caches() for _ in range(tensor)]
        groups = compat.layer_groups(described) if described else {}
        self.hooked = [name for name in self.caches[0] if name not in groups or not groups[name].state]
        """Layers that say when they are written: those of attention."""
        self._again = list(drafts.layers) * max(0, drafts.num_speculative_tokens - 1)
        """Hooks that are called again in a step, when the draft has written past the prompt."""
        self.lookahead: int | None = None
        """The block that drafts write to then."""
        self.clock = clock or Clock()
        self.clocked = clock is not None
        """Copies are complete later than the step that makes them."""
        self.runner = runner or ("v1" if clock is None else "v2")
        self.devices = [Cpu() if clock is None else Gpu(clock) for _ in range(tensor)]
        self.workers = [WorkerSide(settings, rank, caches, blocks, heads, by_layer=by_layer, groups=groups,
                                   view=device.memory, drafts=frozenset(drafts.layers))
                        for rank, (caches, device) in enumerate(zip(self.caches, self.devices, strict=True))]
        config = vllm_config(tensor, layout=layout, **(model or {}))
        config.parallel_config.data_parallel_index, config.parallel_config.data_parallel_size = data
        if ranks > 1:
            config.kv_transfer_config.engine_id = f"{name}_dp{self.data_rank}"
        self.scheduler = SchedulerSide(config, settings,
                                       recompute=recompute, blocks=blocks, speculation=speculation,
                                       groups=compat.cache_groups(described) if described else None,
                                       states=compat.states(described) if described else "")
        self.scheduler.workers_are(worker.address() for worker in reversed(self.workers))
        self.tables = BlockTables()
        self.over: Counter[str] = Counter()  # by request: ranks that have reported its load
        self._told: set[str] = set()
        self._unheard: list[KVConnectorOutput] = []
        self.recved: list[str] = []
        self.sent: set[str] = set()
        """Requests that have ended and whose blocks may go, by a report of their own."""
        self.failed: list[str] = []
        self.counts: dict[str, float] = {}

    def peer(self, instance: str = "d") -> legs.Peer:
        known = record.read(self.folder, self.data_rank)
        assert known is not None
        return legs.Peer(InstanceName(instance), known.incarnation, known.control)

    def fill(self, ids: list[int], prompt: int) -> None:
        """A kernel writes a prompt's KV."""
        for rank, (caches, device) in enumerate(zip(self.caches, self.devices, strict=True)):
            for layer, cache in enumerate(caches.values()):
                for at, block in enumerate(ids):
                    device.compute(0.0, partial(cache[block].fill_, prompt * 1000 + rank * 100 + layer * 20 + at))

    def holds(self, ids: list[int], prompt: int, first: int, layers: int | None = None) -> bool:
        """Whether the first so many layers (None: all) hold what a kernel wrote for a prompt's blocks from ``first`` on."""
        return all(bool((cache[block] == prompt * 1000 + rank * 100 + layer * 20 + first + at).all())
                   for rank, caches in enumerate(self.caches) for layer, cache in enumerate([*caches.values()][:layers])
                   for at, block in enumerate(ids))

    def step(self, new: tuple[Any, ...] = (), cached: tuple[Any, ...] = (), *, hooks: Hooks = "layers",
             preempted: tuple[Any, ...] = (), writes: tuple[list[int], int] | None = None) -> None:
        """One engine step: ``new`` and ``cached`` are (request, block ids, computed before, computed in this step).

        ``preempted``: requests whose blocks were taken for this step; ``writes``: what others' prompts write, as ``fill``.
        """
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, num_computed_tokens=done) for r, _, done, _ in new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[r.request_id for r, *_ in cached],
                                                  num_computed_tokens=[done for *_, done, _ in cached]),
            kv_connector_block_state=self.tables.now(new, cached),
            num_scheduled_tokens={r.request_id: n for r, _, _, n in (*new, *cached)},
            preempted_req_ids={one.request_id for one in preempted} or None)
        orders = self.scheduler.build_orders(output)
        together = KVConnectorOutput(finished_recving=set())
        for worker, caches, device in zip(self.workers, self.caches, self.devices, strict=True):
            worker.begin(orders)
            if writes is not None:
                self.fill(*writes)
            if new or cached:
                forward(device, self.hooked, worker.save_layer, hooks)
                for layer in self._again:
                    if self.lookahead is not None:
                        device.compute(0.0, partial(caches[layer][self.lookahead].fill_, -1))
                    if hooks == "layers":
                        worker.save_layer(layer)
            worker.start_loads()
            worker.finish_saves()
            over, failed = worker.poll()
            self.over.update(over)
            together.failed_recving |= failed
            report = worker.report()
            if report is not None:
                known = together.kv_connector_worker_meta
                together.kv_connector_worker_meta = known.aggregate(report) if known else report
            if self.runner == "v1" and (new or cached):
                device.wait()
        whole = {name for name, ranks in self.over.items() if ranks == len(self.workers)}
        together.finished_recving = whole - self._told
        self._told |= whole
        self._unheard.append(together)
        if self.runner == "v1" or len(self._unheard) > 1:
            self._hear(self._unheard.pop(0))
        self.clock.step()

    def _hear(self, output: KVConnectorOutput) -> None:
        self.scheduler.on_worker_output(output)
        self.recved += output.finished_recving or ()
        self.sent |= output.finished_sending or set()
        self.failed += output.failed_recving
        if (stats := self.scheduler.take_stats()) is not None:
            for name, value in stats.data.items():
                self.counts[name] = value if name.endswith("open") else self.counts.get(name, 0) + value

    @property
    def unheard(self) -> bool:
        """Whether workers have said what the scheduler has not heard."""
        return any(one.kv_connector_worker_meta or one.finished_recving for one in self._unheard)

    def stop(self) -> None:
        self.scheduler.stop()
        for worker in self.workers:
            worker.stop()


def forward(device: Cpu | Gpu, layers: list[str], hook: Callable[[str], None], hooks: Hooks = "layers") -> None:
    """The host's half of a forward: it enqueues every layer, and waits for none."""
    if hooks == "capturing":
        assert isinstance(device, Gpu), "a CPU records no graphs"
        with device.capture():
            for layer in layers:
                hook(layer)
    for layer in layers:
        device.compute(LAYER_S)
        if hooks == "layers":
            hook(layer)


def request(params: Any, tokens: int = 40, prompt: int = 1) -> Any:
    """Of a prompt of which so many tokens are handed over: decode computes one more itself."""
    ids = [prompt] * (tokens + 1)
    return SimpleNamespace(
        request_id=f"cmpl-{uuid.uuid4().hex}", kv_transfer_params=params, prompt_token_ids=ids, _all_token_ids=[*ids],
        prompt_embeds=None, num_prompt_tokens=tokens + 1, max_tokens=1, mm_features=[], lora_request=None, cache_salt=None,
        prefill_stats=PrefillStats(), get_skip_reading_prefix_cache=lambda: False)


def decode_leg(transfer: str, *, attempt: int = 1, wait_s: float = PATIENCE_S,
               limit_s: float | None = None) -> dict[str, Any]:
    return legs.encode(legs.Leg(1, Role.DECODE, TransferId(transfer), Attempt(attempt), wait_s, limit_s=limit_s))


def prefill_leg(transfer: str, d: Engine, *, attempt: int = 1, instance: str = "d") -> dict[str, Any]:
    return legs.encode(legs.Leg(1, Role.PREFILL, TransferId(transfer), Attempt(attempt), PATIENCE_S, d.peer(instance)))


def until(condition: Callable[[], Any], *engines: ByHand, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        for engine in engines:
            engine.step()
        assert time.monotonic() < end, [engine.counts for engine in engines]
        time.sleep(0.002)


def idle(engine: Engine) -> bool:
    still = engine.counts.get(metrics.SENDS_OPEN, 0) == engine.counts.get(metrics.RECEIVES_OPEN, 0) == 0
    return still and not (engine.scheduler.pending() or engine.unheard
                          or any(worker.store.used_bytes for worker in engine.workers))


def prefill(p: Engine, leg: Any, ids: list[int], *, held: bool | None = None) -> None:
    """Two chunks of a 40-token prompt: 20 tokens, then the rest. ``held``: whether its blocks must still be needed then."""
    p.scheduler.new_request(leg)
    p.scheduler.on_allocated(leg, (ids[:2],), 0)
    p.step(new=((leg, ids[:2], 0, 20),))
    p.step(cached=((leg, ids[2:], 20, 20),))
    holds = p.scheduler.on_request_ended(leg)
    assert held is None or holds == (held or p.clocked)
