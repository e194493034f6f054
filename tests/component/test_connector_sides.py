"""Both sides of the connector with vLLM's types but without its engine: hooks are called as it would call them.

Real threads and sockets between two engines of one or two ranks; the KV caches are small tensors whose contents name their
place.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import free_port
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput

from xpyd_sidecar.contract import keys, legs, metrics, record
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, ServiceName, TransferId
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.engine.scheduler_side import SchedulerSide
from xpyd_sidecar.engine.settings import Settings
from xpyd_sidecar.engine.stats import Stats
from xpyd_sidecar.engine.worker_side import WorkerSide
from xpyd_sidecar.errors import ConfigError

pytestmark = pytest.mark.timeout(120)
KEY = keys.ServiceKey(bytes(range(32)))
BLOCK, BLOCKS, LAYERS = 16, 32, 3


def vllm_config(tensor: int = 1, **model: Any) -> Any:
    hf = {"layers": LAYERS, **model}
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto", get_resolved_kv_cache_layout=lambda: "HND"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=1, data_parallel_size=1,
                                        data_parallel_index=0, rank=0),
        model_config=SimpleNamespace(dtype="torch.float32", model="org/tiny", revision="r1", max_model_len=512,
                                     quantization=None, hf_config=SimpleNamespace(to_dict=lambda: hf, _commit_hash="c1")),
        device_config=SimpleNamespace(device_type="cuda"), speculative_config=None,
        kv_transfer_config=SimpleNamespace(engine_id="e1"))


class Engine:
    """The two sides of one engine, stepped by hand."""

    def __init__(self, name: str, folder: Path, *, tensor: int = 1, recompute: bool = True,
                 model: dict[str, Any] | None = None, **options: Any) -> None:
        (folder / name).mkdir()
        self.folder = folder / name
        settings = Settings(KvOptions(**{"peer_timeout_s": 1.0, "load_timeout_s": 5.0, **options}), ServiceName("s"),
                            InstanceName(name), "127.0.0.1", KEY, self.folder)
        self.caches = [{f"layer{n}": torch.zeros(BLOCKS, 2, BLOCK, 4) for n in range(LAYERS)} for _ in range(tensor)]
        self.workers = [WorkerSide(settings, rank, caches, BLOCKS) for rank, caches in enumerate(self.caches)]
        self.scheduler = SchedulerSide(vllm_config(tensor, **(model or {})), settings, recompute=recompute)
        self.scheduler.workers_are(worker.address() for worker in reversed(self.workers))
        self.over: Counter[str] = Counter()  # by request: ranks that have reported its load
        self.recved: list[str] = []
        self.failed: list[str] = []
        self.counts: dict[str, float] = {}

    def peer(self) -> legs.Peer:
        known = record.read(self.folder, 0)
        assert known is not None
        return legs.Peer(InstanceName("d"), known.incarnation, known.control)

    def fill(self, ids: list[int], prompt: int) -> None:
        for rank, caches in enumerate(self.caches):
            for layer, cache in enumerate(caches.values()):
                for at, block in enumerate(ids):
                    cache[block] = prompt * 1000 + rank * 100 + layer * 20 + at

    def holds(self, ids: list[int], prompt: int, first: int) -> bool:
        return all(bool((cache[block] == prompt * 1000 + rank * 100 + layer * 20 + first + at).all())
                   for rank, caches in enumerate(self.caches) for layer, cache in enumerate(caches.values())
                   for at, block in enumerate(ids))

    def step(self, new: tuple[Any, ...] = (), cached: tuple[Any, ...] = (), *, hooks: bool = True) -> KVConnectorOutput:
        """One engine step: ``new`` and ``cached`` are (request, block ids, computed before, computed in this step)."""
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, block_ids=(ids,), num_computed_tokens=done)
                                for r, ids, done, _ in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, *_ in cached], resumed_req_ids=set(),
                new_block_ids=[(ids,) if ids else None for _, ids, *_ in cached],
                num_computed_tokens=[done for *_, done, _ in cached]),
            num_scheduled_tokens={r.request_id: n for r, _, _, n in (*new, *cached)})
        orders = self.scheduler.build_orders(output)
        together = KVConnectorOutput(finished_recving=set())
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.begin(orders)
            if hooks:
                for layer in caches:
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
        whole = {name for name, ranks in self.over.items() if ranks == len(self.workers)}
        together.finished_recving = whole - set(self.recved)
        self.scheduler.heard(together)
        self.recved += together.finished_recving or ()
        self.failed += together.failed_recving
        if (stats := self.scheduler.take_stats()) is not None:
            for name, value in stats.data.items():
                self.counts[name] = value if name.endswith("open") else self.counts.get(name, 0) + value
        return together

    def stop(self) -> None:
        self.scheduler.stop()
        for worker in self.workers:
            worker.stop()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def build(name: str, **options: Any) -> Engine:
        made.append(Engine(name, tmp_path, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("xpyd")]


def request(params: Any, tokens: int = 40, prompt: int = 1) -> Any:
    return SimpleNamespace(
        request_id=f"cmpl-{uuid.uuid4().hex}", kv_transfer_params=params, prompt_token_ids=[prompt] * tokens,
        prompt_embeds=None, num_prompt_tokens=tokens, mm_features=[], lora_request=None, cache_salt=None)


def decode_leg(transfer: str, *, attempt: int = 1, wait_s: float = 5.0) -> dict[str, Any]:
    return legs.encode(legs.Leg(1, Role.DECODE, TransferId(transfer), Attempt(attempt), wait_s))


def prefill_leg(transfer: str, d: Engine, *, attempt: int = 1) -> dict[str, Any]:
    return legs.encode(legs.Leg(1, Role.PREFILL, TransferId(transfer), Attempt(attempt), 5.0, d.peer()))


def until(condition: Callable[[], Any], *engines: Engine, deadline_s: float = 6.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        for engine in engines:
            engine.step()
        assert time.monotonic() < end, [engine.counts for engine in engines]
        time.sleep(0.002)


def idle(engine: Engine) -> bool:
    return not engine.scheduler.pending() and engine.counts.get(metrics.SENDS_OPEN, 0) == engine.counts.get(
        metrics.RECEIVES_OPEN, 0) == 0 and all(worker.budget.used == 0 for worker in engine.workers)


def prefill(p: Engine, leg: Any, ids: list[int]) -> None:
    """Two chunks of a 40-token prompt: 20 tokens, then the rest."""
    p.scheduler.new_request(leg)
    p.scheduler.allocated(leg, ids[:2], 0)
    p.step(new=((leg, ids[:2], 0, 20),))
    p.step(cached=((leg, ids[2:], 20, 20),))
    p.scheduler.ended(leg)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("hooks", [True, False], ids=["layer hooks", "whole graph"])
def test_blocks_go_from_rank_to_rank_into_their_places(make: Callable[..., Engine], tensor: int, hooks: bool) -> None:
    p, d = make("p", tensor=tensor), make("d", tensor=tensor)
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    assert d.scheduler.matched(ours, 16) == (None, False)
    p.fill([5, 9, 3], prompt=7)
    p.scheduler.new_request(theirs)
    p.scheduler.allocated(theirs, [5, 9, 3], 0)
    p.step(new=((theirs, [5, 9, 3], 0, 40),), hooks=hooks)
    p.scheduler.ended(theirs)
    until(lambda: d.scheduler.matched(ours, 16) == (24, True), d)
    d.scheduler.allocated(ours, [30, 11, 12, 13], 24)  # one block is there already, and one more than the prompt needs
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert d.holds([11, 12], prompt=7, first=1)
    assert not d.caches[0]["layer0"][13].any()
    assert d.scheduler.matched(ours, 0) == (0, False)
    until(lambda: idle(p) and idle(d), p, d)
    size = 2 * LAYERS * 2 * BLOCK * 4 * 4 * tensor
    assert p.counts[metrics.PUSHED_BYTES] == d.counts[metrics.LOADED_BYTES] == size
    assert (p.counts[metrics.PUSHED_TOKENS], d.counts[metrics.LOADED_TOKENS]) == (40, 24)
    assert (p.counts["send/ok"], d.counts["receive/ok"]) == (1, 1)


def test_chunks_and_a_preemption_between_them(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([1, 2, 3], prompt=4)
    p.scheduler.new_request(theirs)
    p.scheduler.allocated(theirs, [1, 2], 0)
    p.step(new=((theirs, [1, 2], 0, 20),))
    p.fill([1, 2], prompt=999)  # preempted: its blocks belong to somebody else now
    p.fill([20, 21, 22], prompt=4)
    p.scheduler.allocated(theirs, [20, 21, 22], 0)
    p.step(new=((theirs, [20, 21, 22], 0, 40),))
    until(lambda: d.scheduler.matched(ours, 0) == (40, True), d)
    d.scheduler.allocated(ours, [8, 7, 6], 40)
    until(lambda: d.recved, p, d)
    assert d.holds([8, 7, 6], prompt=4, first=0)


def test_different_fingerprints_are_named_and_decode_does_not_wait(make: Callable[..., Engine],
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p", model={"rope": 2}), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    prefill(p, theirs, [1, 2, 3])
    until(lambda: d.scheduler.matched(ours, 0) == (0, False), d, deadline_s=2)
    d.scheduler.allocated(ours, [1, 2, 3], 0)
    until(lambda: idle(p) and idle(d), p, d)
    assert "fingerprint: model: " in caplog.text
    assert p.counts["send/incompatible"] == d.counts["receive/incompatible"] == 1


def test_different_tensor_sizes_of_caches_that_cannot_be_cut_are_named(make: Callable[..., Engine],
                                                                       caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p", tensor=2), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    prefill(p, theirs, [1, 2, 3])
    until(lambda: d.scheduler.matched(ours, 0) == (0, False), d, deadline_s=2)
    assert "tensor sizes differ, and kv cache layer0 cannot be cut by heads" in caplog.text


def test_more_copies_than_the_bound_are_not_made_and_decode_is_told(make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=3 * 2 * BLOCK * 4 * 4), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    prefill(p, theirs, [1, 2, 3])
    assert p.workers[0].budget.used <= p.workers[0].budget.bound
    until(lambda: p.counts.get("send/overflow"), p)
    d.scheduler.new_request(ours)
    until(lambda: d.scheduler.matched(ours, 0) == (0, False), d, deadline_s=2)
    d.scheduler.allocated(ours, [1, 2, 3], 0)
    until(lambda: idle(p) and idle(d), p, d)
    assert d.counts["receive/overflow"] == 1


@pytest.mark.parametrize("mode", ["put", "get"])
def test_other_modes_bring_the_same_blocks(make: Callable[..., Engine], mode: str) -> None:
    p, d = make("p", mode=mode), make("d", mode=mode, window_bytes=1)  # a window is two blocks at least
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([5, 9, 3], prompt=7)
    prefill(p, theirs, [5, 9, 3])
    until(lambda: d.scheduler.matched(ours, 0) == (40, True), d)
    d.scheduler.allocated(ours, [8, 7, 6], 40)
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert d.holds([8, 7, 6], prompt=7, first=0)
    until(lambda: idle(p) and idle(d), p, d)
    if mode == "put":  # decode could not ask while prefill's step, on the same thread, was waiting: once, not twice
        assert p.counts[metrics.PUT_LATE] == 1
        assert p.counts[metrics.PUT_WAIT_SECONDS] > 0.2


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_prefill_cannot_keep_waits_in_decodes_buffer(make: Callable[..., Engine], tensor: int) -> None:
    block = 2 * BLOCK * 4 * 4
    p, d = make("p", tensor=tensor, keep_bytes=16 * block), make("d", tensor=tensor, buffer_bytes=1 << 20)
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([5, 9, 3], prompt=7)
    prefill(p, theirs, [5, 9, 3])  # 9 blocks a rank: one or more above half of what it may keep
    until(lambda: d.counts.get(metrics.BUFFERED_BYTES, 0) >= tensor * block, p, d)
    assert d.scheduler.matched(ours, 16) == (24, True)
    d.scheduler.allocated(ours, [30, 7, 6], 24)
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert d.holds([7, 6], prompt=7, first=1)
    until(lambda: idle(p) and idle(d), p, d)
    assert p.counts[metrics.AHEAD_BYTES] == d.counts[metrics.BUFFERED_BYTES]
    assert (p.counts["send/ok"], d.counts["receive/ok"]) == (1, 1)


def test_the_policy_fail_reports_the_smallest_load_as_failed(make: Callable[..., Engine]) -> None:
    d = make("d", recompute=False)
    ours = request(decode_leg(uuid.uuid4().hex, wait_s=0.1))
    d.scheduler.new_request(ours)
    until(lambda: d.scheduler.matched(ours, 32) == (1, True), d)
    d.scheduler.allocated(ours, [1, 2, 3], 1)
    until(lambda: d.recved, d)
    assert d.recved == d.failed == [ours.request_id]
    d.scheduler.ended(ours)
    until(lambda: idle(d), d)
    assert d.counts["receive/deadline"] == 1


def test_a_request_aborted_while_loading_is_reported_once_and_written_no_more(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([1, 2, 3], prompt=4)
    p.scheduler.new_request(theirs)
    p.scheduler.allocated(theirs, [1, 2], 0)
    until(lambda: d.scheduler.matched(ours, 0) == (40, True), d)
    d.scheduler.allocated(ours, [8, 7, 6], 40)
    d.step()
    d.scheduler.ended(ours)
    until(lambda: d.recved, d)
    p.step(new=((theirs, [1, 2, 3], 0, 40),))
    p.scheduler.ended(theirs)
    until(lambda: idle(p) and idle(d), p, d)
    assert d.recved == [ours.request_id]
    assert not d.caches[0]["layer0"].any()
    assert p.counts["send/aborted"] == d.counts["receive/aborted"] == 1


def test_a_rank_that_is_done_keeps_what_it_has_when_the_other_needs_another_try(make: Callable[..., Engine]) -> None:
    first, second, d = make("p", tensor=2), make("p2", tensor=2), make("d", tensor=2)
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    first.fill([1, 2, 3], prompt=4)
    second.fill([1, 2, 3], prompt=4)
    first.scheduler.new_request(theirs)
    first.scheduler.allocated(theirs, [1, 2, 3], 0)
    until(lambda: d.scheduler.matched(ours, 0) == (40, True), d)
    d.scheduler.allocated(ours, [8, 7, 6], 40)
    d.step()
    first.workers[1].stop()  # its rank 1 dies, and rank 0 delivers
    first.step(new=((theirs, [1, 2, 3], 0, 40),))
    until(lambda: d.over[ours.request_id] == 1, d)
    again = request(prefill_leg(transfer, d, attempt=2))
    prefill(second, again, [1, 2, 3])
    until(lambda: d.recved, second, d)
    assert d.failed == []
    assert d.holds([8, 7, 6], prompt=4, first=0)
    until(lambda: idle(second) and idle(d), second, d)
    assert d.over[ours.request_id] == 2
    assert (d.counts["receive/ok"], second.counts["send/stale"]) == (1, 1)


def test_the_ranks_of_an_engine_take_ports_in_a_row(make: Callable[..., Engine]) -> None:
    port = free_port()
    p = make("p", tensor=2, data_port=port)
    assert [worker.address().data.address for worker in p.workers] == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    p = make("behind", tensor=2, advertise_data="10.0.0.9:7000")
    assert [worker.address().data.address for worker in p.workers] == ["10.0.0.9:7000", "10.0.0.9:7001"]


@pytest.mark.parametrize(("options", "refused"), [
    ({"data_port": 65535}, "data_port: cannot listen on 127.0.0.1 port 65536"),
    ({"advertise_data": "10.0.0.9:65535"}, "advertise_data: 10.0.0.9:65535 leaves no port for rank 1")])
def test_a_port_row_beyond_the_last_port_is_refused(tmp_path: Path, options: dict[str, Any], refused: str) -> None:
    settings = Settings(KvOptions(**options), ServiceName("s"), InstanceName("p"), "127.0.0.1", KEY, tmp_path)
    with pytest.raises(ConfigError, match=refused):
        WorkerSide(settings, 1, {"layer0": torch.zeros(BLOCKS, 2, BLOCK, 4)}, BLOCKS)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("xpyd")]


def test_ids_that_vllm_does_not_wait_for_are_taken_out(make: Callable[..., Engine]) -> None:
    output = KVConnectorOutput(finished_recving={"never", "heard"}, finished_sending={"of"})
    make("d").scheduler.heard(output)
    assert not output.finished_recving
    assert not output.finished_sending


@pytest.mark.parametrize("params", [
    {"xpyd": 2, "role": "decode"}, {"do_remote_prefill": True}, {"xpyd": "1"}, {"xpyd": 1}, [1], "x"])
def test_parameters_that_are_not_understood_make_an_ordinary_request(make: Callable[..., Engine], params: Any,
                                                                     caplog: pytest.LogCaptureFixture) -> None:
    d = make("d")
    odd = request(params)
    d.scheduler.new_request(odd)
    assert d.scheduler.matched(odd, 0) == (0, False)
    d.scheduler.allocated(odd, [1, 2, 3], 0)
    d.scheduler.ended(odd)
    assert "is served as an ordinary one" in caplog.text


def test_prompts_given_as_embeddings_are_ordinary_requests(make: Callable[..., Engine]) -> None:
    d = make("d")
    odd = request(decode_leg(uuid.uuid4().hex))
    odd.prompt_token_ids = None
    d.scheduler.new_request(odd)
    assert d.scheduler.matched(odd, 0) == (0, False)


def test_a_decode_engine_that_is_not_there_is_given_up(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    leg = prefill_leg(uuid.uuid4().hex, d)
    d.scheduler.stop()
    prefill(p, request(leg), [1, 2, 3])
    assert p.scheduler.pending()
    until(lambda: idle(p), p)
    assert p.counts["send/peer_lost"] == 1


def test_statistics_add_up_over_intervals_and_pipes() -> None:
    one, two = Stats(), XpydConnector.build_kv_connector_stats({"send/ok": 2, metrics.SENDS_OPEN: 0})
    one.ended("send", "ok")
    one.data[metrics.SENDS_OPEN] = 5
    assert isinstance(one, KVConnectorStats)
    assert one.aggregate(two).to_dict() == {"send/ok": 3, metrics.SENDS_OPEN: 0}
    assert not one.is_empty()
    one.reset()
    assert one.is_empty()


def spec(kind: Any, **fields: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=kind(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, **fields))


@pytest.mark.parametrize(("groups", "changes", "text"), [
    ([spec(FullAttentionSpec), spec(FullAttentionSpec)], {}, "several KV cache groups"),
    ([spec(SlidingWindowSpec, sliding_window=64)], {}, "SlidingWindowSpec is not supported yet"),
    ([spec(FullAttentionSpec)], {"speculative_config": object()}, "speculative decoding"),
])
def test_models_that_cannot_be_moved_rightly_are_refused_by_name(groups: Any, changes: Any, text: str) -> None:
    config = vllm_config()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=text):
        compat.check_model(config, SimpleNamespace(kv_cache_groups=groups))


def test_one_group_of_full_attention_is_fine_and_another_vllm_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_model(vllm_config(), SimpleNamespace(kv_cache_groups=[spec(FullAttentionSpec)]))
    compat.check_version()
    monkeypatch.setattr(compat.vllm, "__version__", "0.33.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.1 is not supported by this xpyd; use 0\.32\.x"):
        compat.check_version()


def test_layer_hooks_are_never_captured_in_whole_graphs() -> None:
    assert XpydConnector.requires_piecewise_for_cudagraph({})
