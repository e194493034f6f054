"""Prefill and decode engines of unequal tensor and pipeline sizes, without vLLM's engine: hooks are called as it would.

Every rank is a ``WorkerSide`` with real threads and sockets; both scheduler sides pair, exchange geometry and plan. The
caches are small tensors in which every head of every block of every layer has a value of its own.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import connector_sides
import pytest
import torch
from block_tables import BlockTables
from connector_sides import BLOCK, KEY, Runner, making, request, vllm_config
from copies import LAYER_S, Clock, Cpu, Gpu

from xpyd_sidecar.contract import legs, record
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.scheduler.scheduler_side import SchedulerSide
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.worker import kv_cache
from xpyd_sidecar.engine.worker.worker_side import WorkerSide
from xpyd_sidecar.kv.keys import Outcome

pytestmark = pytest.mark.timeout(300)
BLOCKS = 24
PATIENCE_S = 60.0


class Model(NamedTuple):
    """``heads``: KV heads of each layer over all ranks; 0: a latent that every rank has."""

    heads: tuple[int, ...]
    size: int = 4


def heads_of(total: int, tensor: int, t: int) -> list[int]:
    """Which heads tensor rank ``t`` has, as vLLM shards them."""
    if total == 0:
        return [0]
    if tensor >= total:
        return [t // (tensor // total)]
    return list(range(t * total // tensor, (t + 1) * total // tensor))


def value(prompt: int, layer: int, head: int, place: int) -> float:
    return prompt * 10000 + layer * 1000 + head * 50 + place + 1


class Engine:
    """One engine of ``tensor`` times ``pipeline`` ranks, stepped by hand."""

    def __init__(self, name: str, folder: Path, model: Model, tensor: int, pipeline: int, *,
                 clock: Clock | None = None, runner: Runner = "v1", split: int = 1, **options: Any) -> None:
        """``split``: how many blocks its kernels make of one."""
        (folder / name).mkdir()
        self.folder, self.model, self.tensor, self.pipeline = folder / name, model, tensor, pipeline
        self.split = split
        given = KvOptions(**{"peer_timeout_s": 20.0, "load_timeout_s": PATIENCE_S, **options})
        settings = ConnectorSettings(given, InstanceName(name), "127.0.0.1", KEY, self.folder)
        layers = len(model.heads)
        self.stages = [range(s * layers // pipeline, (s + 1) * layers // pipeline) for s in range(pipeline)]
        self.caches = [{f"layer{n}": self._cache(n) for n in stage} for stage in self.stages for _ in range(tensor)]
        totals = {f"layer{n}": total for n, total in enumerate(model.heads)}
        self.clock, self.runner = clock or Clock(), runner
        self.devices = [Cpu() if clock is None else Gpu(clock) for _ in self.caches]
        self.workers = [WorkerSide(settings, rank, caches, BLOCKS, totals, view=device.memory)
                        for rank, (caches, device) in enumerate(zip(self.caches, self.devices, strict=True))]
        self.scheduler = SchedulerSide(vllm_config(tensor, pipeline), settings, recompute=True)
        self.scheduler.workers_are(worker.address() for worker in self.workers)
        self.over: dict[str, int] = {}
        self._told: set[str] = set()
        self._unheard: list[SimpleNamespace] = []
        self.recved: set[str] = set()
        self.failed: set[str] = set()
        self.counts: dict[str, float] = {}
        self.tables = BlockTables()

    def _cache(self, layer: int) -> torch.Tensor:
        total, size = self.model.heads[layer], self.model.size
        blocks, tokens = BLOCKS * self.split, BLOCK // self.split
        if total == 0:
            return torch.zeros(blocks, tokens, size)
        return torch.zeros(blocks, len(heads_of(total, self.tensor, 0)), tokens, size)

    def peer(self) -> legs.Peer:
        known = record.read(self.folder, 0)
        assert known is not None
        return legs.Peer(InstanceName("d"), known.incarnation, known.control)

    def parts(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """(rank, layer, head, that head of all blocks) over all ranks."""
        for rank, caches in enumerate(self.caches):
            stage, t = divmod(rank, self.tensor)
            for layer, cache in zip(self.stages[stage], caches.values(), strict=True):
                blocks = cache.unflatten(0, (BLOCKS, self.split))
                for at, head in enumerate(heads_of(self.model.heads[layer], self.tensor, t)):
                    yield rank, layer, head, blocks[:, :, at] if self.model.heads[layer] else blocks

    def fill(self, ids: list[int], prompt: int) -> None:
        """A kernel writes a prompt's KV."""
        for rank, layer, head, cache in self.parts():
            for place, block in enumerate(ids):
                self.devices[rank].compute(0.0, partial(cache[block].fill_, value(prompt, layer, head, place)))

    def wrong(self, ids: list[int], prompt: int, first: int) -> list[tuple[int, int, int]]:
        return [(layer, head, place) for _, layer, head, cache in self.parts() for place, block in enumerate(ids)
                if place >= first and not bool((cache[block] == value(prompt, layer, head, place)).all())]

    def touched(self, but: set[int]) -> set[int]:
        """Blocks outside ``but`` that are not zero."""
        return {block for *_, cache in self.parts() for block in set(range(BLOCKS)) - but if bool(cache[block].any())}

    def step(self, *runs: tuple[Any, list[int], int, int]) -> None:
        """One step; ``runs``: (request, block ids, computed before, computed in this step), 0 before in the first."""
        new = [one for one in runs if one[2] == 0]
        old = [one for one in runs if one[2] > 0]
        orders = self.scheduler.build_orders(SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, num_computed_tokens=done) for r, _, done, _ in new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[r.request_id for r, *_ in old],
                                                  num_computed_tokens=[done for *_, done, _ in old]),
            kv_connector_block_state=self.tables.now(new, old),
            num_scheduled_tokens={r.request_id: n for r, _, _, n in runs}, preempted_req_ids=None))
        reports = []
        for worker, device in zip(self.workers, self.devices, strict=True):
            worker.begin(orders)
            if runs:
                device.compute(LAYER_S * len(self.model.heads))  # one graph: no hooks
            worker.start_loads()
            worker.finish_saves()
            over, failed = worker.poll()
            for name in over:
                self.over[name] = self.over.get(name, 0) + 1
            self.failed |= failed
            reports.append(worker.report())
            if runs and self.runner == "v1":
                device.wait()
        told = [one for one in reports if one is not None]
        for one in told[1:]:
            told[0] = told[0].aggregate(one)
        done = {name for name, ranks in self.over.items() if ranks == len(self.workers)} - self._told
        self._told |= done
        self._unheard.append(SimpleNamespace(finished_recving=done, finished_sending=None, failed_recving=set(),
                                             kv_connector_worker_meta=told[0] if told else None))
        if self.runner == "v1" or len(self._unheard) > 1:
            self._hear(self._unheard.pop(0))
        self.clock.step()

    def _hear(self, output: SimpleNamespace) -> None:
        self.scheduler.on_worker_output(output)
        self.recved |= output.finished_recving or set()
        stats = self.scheduler.take_stats()
        for name, amount in (stats.data if stats else {}).items():
            if "/" in name:
                self.counts[name] = self.counts.get(name, 0) + amount

    def idle(self) -> bool:
        unheard = any(one.kv_connector_worker_meta or one.finished_recving for one in self._unheard)
        return not (self.scheduler.pending() or unheard or any(worker.store.used_bytes for worker in self.workers))

    def stop(self) -> None:
        self.scheduler.stop()
        for worker in self.workers:
            worker.stop()


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    def engine(name: str, model: Model, tensor: int, pipeline: int = 1, **options: Any) -> Engine:
        return Engine(name, tmp_path, model, tensor, pipeline, **copies, **options)

    with making(engine) as build:
        yield build


def until(condition: Callable[[], Any], *engines: Engine) -> None:
    connector_sides.until(condition, *engines, deadline_s=PATIENCE_S)


class Run:
    """One request over both engines: decode's leg, and prefill's legs one after another."""

    def __init__(self, d: Engine, tokens: int, prompt: int, ids: list[int], first: int) -> None:
        self.d, self.tokens, self.prompt, self.ids, self.first = d, tokens, prompt, ids, first
        self.transfer = TransferId(uuid.uuid4().hex)
        self.ours = request(legs.encode(legs.Leg(1, Role.DECODE, self.transfer, Attempt(1), PATIENCE_S)), tokens, prompt)
        d.scheduler.new_request(self.ours)

    def prefill(self, p: Engine, ids: list[int], *, attempt: int = 1, chunk: int = 0, stop_at: int | None = None) -> None:
        """Compute the prompt in chunks; ``stop_at``: the leg is aborted when so many tokens are computed."""
        p.fill(ids, self.prompt)
        peer = self.d.peer()
        leg = request(legs.encode(legs.Leg(1, Role.PREFILL, self.transfer, Attempt(attempt), PATIENCE_S, peer)),
                      self.tokens, self.prompt)
        p.scheduler.new_request(leg)
        p.scheduler.on_allocated(leg, (ids,), 0)
        done = 0
        while done < (self.tokens if stop_at is None else stop_at):
            many = min(chunk or self.tokens, self.tokens - done)
            p.step((leg, ids if done == 0 else [], done, many))
            done += many
        p.scheduler.on_request_ended(leg)

    def allocate(self, *engines: Engine) -> None:
        held = self.first * BLOCK
        until(lambda: self.d.scheduler.match_tokens(self.ours, held) == (self.tokens - held, True), self.d, *engines)
        self.d.scheduler.on_allocated(self.ours, (self.ids,), self.tokens - held)

    def wait_over(self, *engines: Engine) -> None:
        until(lambda: self.ours.request_id in self.d.recved, self.d, *engines)

    @property
    def ok(self) -> bool:
        return self.ours.request_id not in self.d.failed

    def end(self) -> None:
        self.d.scheduler.on_request_ended(self.ours)


GQA, FEW, LATENT = Model((4, 4, 4, 4)), Model((2, 2)), Model((0, 0, 0))
PAIRS = [
    (GQA, (1, 1), (2, 1)), (GQA, (2, 1), (1, 1)), (GQA, (4, 1), (2, 1)), (GQA, (2, 1), (4, 1)), (GQA, (1, 2), (1, 1)),
    (GQA, (1, 1), (1, 2)), (GQA, (2, 2), (1, 1)), (GQA, (1, 1), (2, 2)), (GQA, (1, 2), (2, 1)),
    (Model((6,)), (2, 1), (3, 1)),
    (FEW, (1, 1), (4, 1)), (FEW, (4, 1), (1, 1)), (FEW, (4, 1), (2, 1)), (FEW, (2, 1), (4, 1)),
    (LATENT, (2, 1), (1, 1)), (LATENT, (1, 1), (2, 1)), (LATENT, (2, 1), (2, 1)), (Model((0,)), (2, 1), (1, 1)),
    (Model((4, 2, 0, 1)), (2, 2), (4, 1)),
]


def hand_over(prefill: Engine, decode: Engine) -> None:
    """A prompt in chunks, of which decode has the first block: the others come to their places, nothing else changes."""
    one = Run(decode, tokens=70, prompt=3, ids=[9, 2, 7, 8, 20], first=1)
    one.prefill(prefill, [4, 5, 6, 1, 11], chunk=25)
    one.allocate(prefill)
    one.wait_over(prefill)
    assert one.ok
    assert not decode.wrong(one.ids, 3, first=1)
    assert not decode.touched(set(one.ids[1:]))
    one.end()
    until(lambda: prefill.idle() and decode.idle(), prefill, decode)


@pytest.mark.parametrize(("model", "p", "d"), PAIRS, ids=str)
def test_every_head_of_every_layer_comes_to_its_place_and_nothing_else_is_touched(
        make: Callable[..., Engine], model: Model, p: tuple[int, int], d: tuple[int, int]) -> None:
    prefill, decode = make("p", model, *p), make("d", model, *d)
    hand_over(prefill, decode)
    assert (prefill.counts["send/ok"], decode.counts["receive/ok"]) == (1, 1)


SPLIT_PAIRS = [(GQA, (1, 1), (2, 1)), (GQA, (4, 1), (2, 1)), (FEW, (1, 1), (4, 1)), (LATENT, (1, 1), (2, 1)),
               (Model((4, 2, 0, 1)), (2, 2), (4, 1))]


@pytest.mark.parametrize("split", [(2, 2), (2, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("sizes", SPLIT_PAIRS, ids=str)
@pytest.mark.parametrize("copies", ["late"], indirect=True)
def test_blocks_that_kernels_split_are_cut_like_others(
        make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, sizes: tuple[Model, tuple[int, int], tuple[int, int]],
        split: tuple[int, int]) -> None:
    model, p, d = sizes
    monkeypatch.setattr(kv_cache, "logical", lambda _: True)  # as a device is
    prefill, decode = make("p", model, *p, split=split[0]), make("d", model, *d, split=split[1])
    hand_over(prefill, decode)
    assert (prefill.counts["send/ok"], decode.counts["receive/ok"]) == (1, 1)


def test_other_splits_of_what_may_be_packed_inside_are_refused_by_their_shape(
        make: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = make("p", GQA, 1, split=2), make("d", GQA, 2)
    one = Run(decode, tokens=40, prompt=3, ids=[9, 2, 7], first=0)
    one.prefill(prefill, [4, 5, 6])
    until(lambda: decode.scheduler.match_tokens(one.ours, 0) == (0, False), decode)
    assert "kv cache layer0, dims: (16, 4) in decode, (4, 2, 8, 4) in prefill" in caplog.text
    one.end()
    until(lambda: prefill.idle() and decode.idle(), prefill, decode)


@pytest.mark.parametrize("mode", ["put", "get"])
@pytest.mark.parametrize(("p", "d"), [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((1, 2), (2, 1))], ids=str)
def test_other_modes_move_cuts_as_well(make: Callable[..., Engine], mode: str, p: tuple[int, int],
                                       d: tuple[int, int]) -> None:
    prefill, decode = make("p", GQA, *p, mode=mode), make("d", GQA, *d, mode=mode, window_bytes=1)
    hand_over(prefill, decode)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_many_random_transfers_with_retries_aborts_and_broken_links(make: Callable[..., Engine], transport: str) -> None:
    """Answers are right or the load is failed; afterwards nothing is held anywhere."""
    model = Model((4, 2, 4))
    source = random.Random(7)
    prefills = [make("p2", model, 2, transport=transport), make("p13", model, 1, 3, transport=transport)]
    decode = make("d4", model, 4, transport=transport)
    engines = (*prefills, decode)
    loaded = failed = 0
    for round_ in range(12):
        tokens, prompt = source.randrange(1, 80), 1 + round_ % 5
        count = -(-tokens // BLOCK)
        ids = source.sample(range(BLOCKS), count)
        for *_, cache in decode.parts():
            cache.zero_()
        one = Run(decode, tokens, prompt, ids, first=source.randrange(count))
        fault = source.choice(["none", "none", "retry", "abort", "cut", "none"])
        first, other = source.sample(prefills, 2)
        where = source.sample(range(BLOCKS), count)
        if fault == "retry":
            one.prefill(first, where, chunk=8, stop_at=max(1, tokens // 2))
            one.prefill(other, where, attempt=2, chunk=source.randrange(1, 40))
            one.allocate(*prefills)
        else:
            one.prefill(first, where, chunk=source.randrange(1, 40))
            one.allocate(*prefills)
            if fault == "cut":
                cut(source.choice(decode.workers))
            elif fault == "abort":
                decode.step()
                one.end()
        one.wait_over(*prefills)
        if fault != "abort":
            assert fault == "cut" or one.ok, fault
            if one.ok:
                loaded += 1
                assert not decode.wrong(ids, prompt, one.first), fault
            else:
                failed += 1
            assert not decode.touched(set(ids[one.first:])), fault
            one.end()
        until(lambda: all(engine.idle() for engine in engines), *engines)
    assert loaded >= 5


def cut(worker: WorkerSide) -> None:
    """Shut the sockets of all links of one decode rank."""
    receiver = worker._receiver
    done = threading.Event()

    def shut() -> None:
        for source in list(receiver._sources.values()):
            source.link._sock.shutdown(2)
        done.set()

    receiver._loop.post(shut)
    assert done.wait(PATIENCE_S)


def test_a_newer_try_from_an_engine_of_other_sizes_takes_the_place_of_an_older_one(make: Callable[..., Engine]) -> None:
    one_rank, two_ranks, decode = make("p1", GQA, 1), make("p2", GQA, 2), make("d", GQA, 4)
    run = Run(decode, tokens=40, prompt=2, ids=[3, 5, 7], first=0)
    run.prefill(one_rank, [1, 2, 3], chunk=16, stop_at=16)
    run.prefill(two_ranks, [8, 9, 10], attempt=2)
    run.allocate(one_rank, two_ranks)
    run.wait_over(one_rank, two_ranks)
    assert run.ok
    assert not decode.wrong(run.ids, 2, first=0)
    run.end()
    until(lambda: one_rank.idle() and two_ranks.idle() and decode.idle(), one_rank, two_ranks, decode)


def test_a_rank_that_is_done_keeps_no_other_from_a_source_that_both_take_from(make: Callable[..., Engine]) -> None:
    two_ranks, one_rank, decode = make("p2", GQA, 2), make("p1", GQA, 1), make("d", GQA, 2)
    run = Run(decode, tokens=40, prompt=2, ids=[3, 5, 7], first=0)
    two_ranks.fill([1, 2, 3], 2)
    leg = request(legs.encode(legs.Leg(1, Role.PREFILL, run.transfer, Attempt(1), PATIENCE_S, decode.peer())), 40, 2)
    two_ranks.scheduler.new_request(leg)
    two_ranks.scheduler.on_allocated(leg, ([1, 2, 3],), 0)
    run.allocate()
    decode.step()
    two_ranks.workers[1].stop()  # its rank 1 dies, and rank 0 delivers
    two_ranks.step((leg, [1, 2, 3], 0, 40))
    until(lambda: decode.over.get(run.ours.request_id) == 1, decode)
    run.prefill(one_rank, [8, 9, 10], attempt=2)
    run.wait_over(one_rank)
    assert run.ok
    assert not decode.wrong(run.ids, 2, first=0)
    run.end()
    until(lambda: one_rank.idle() and decode.idle(), one_rank, decode)


def test_a_prefill_rank_that_ends_in_the_middle_fails_the_load_and_nothing_hangs(make: Callable[..., Engine]) -> None:
    prefill, decode = make("p", GQA, 2), make("d", GQA, 1, peer_timeout_s=2.0)
    run = Run(decode, tokens=60, prompt=2, ids=[3, 5, 7, 9], first=0)
    prefill.fill([1, 2, 3, 4], 2)
    leg = request(legs.encode(legs.Leg(1, Role.PREFILL, run.transfer, Attempt(1), PATIENCE_S, decode.peer())), 60, 2)
    prefill.scheduler.new_request(leg)
    prefill.scheduler.on_allocated(leg, ([1, 2, 3, 4],), 0)
    prefill.step((leg, [1, 2, 3, 4], 0, 30))
    run.allocate(prefill)
    for _ in range(20):
        decode.step()
        time.sleep(0.01)
    prefill.workers[1].stop()
    run.wait_over()
    assert not run.ok
    run.end()
    until(decode.idle, decode)
    assert decode.counts[f"receive/{Outcome.PEER_LOST}"] == 1


@pytest.mark.parametrize(("other", "text"), [
    (Model((8, 4, 4, 4)), "kv cache layer0, total: 4 in decode, 8 in prefill"),
    (Model((4, 4, 4, 4), size=8), "kv cache layer0, dims: (16, 4) in decode, (16, 8) in prefill"),
    (Model((4, 4, 4)), "kv cache layer3: only decode has it"),
])
def test_what_cannot_be_mapped_is_refused_at_once_with_the_field(
        make: Callable[..., Engine], other: Model, text: str, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = make("p", other, 2), make("d", GQA, 1)
    run = Run(decode, tokens=40, prompt=2, ids=[3, 5, 7], first=0)
    run.prefill(prefill, [1, 2, 3])
    until(lambda: decode.scheduler.match_tokens(run.ours, 0) == (0, False), decode, prefill)
    assert text in caplog.text
    decode.scheduler.on_allocated(run.ours, (run.ids,), 0)
    run.end()
    until(lambda: prefill.idle() and decode.idle(), prefill, decode)
    assert prefill.counts[f"send/{Outcome.INCOMPATIBLE}"] == 1
