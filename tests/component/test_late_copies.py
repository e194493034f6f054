"""What a GPU shows and a CPU does not: copies that are complete later, hosts that run ahead, steps that last.

Every test says what is right. Those that fail today have the row of docs/development/late-copies.md that says why, and
``tests/workshop/test_late_list.py`` counts them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm
import zmq
from connector_sides import (
    BLOCK,
    LAYERS,
    Engine,
    decode_leg,
    idle,
    making,
    prefill,
    prefill_leg,
    request,
    until,
)
from copies import LAYER_S, Clock, Gpu
from nccl_fake import FakeNccl, HostDevice, World

from xpyd_sidecar.broadcast.rpc import WorkerGroup
from xpyd_sidecar.broadcast.worker import Worker
from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine import compat, worker_rpc
from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.engine.worker import data_plane
from xpyd_sidecar.engine.worker.kv_cache import CacheRows
from xpyd_sidecar.engine.worker.memory_sizes import MemorySizes
from xpyd_sidecar.engine.worker.nccl_setup import NcclLinks
from xpyd_sidecar.engine.worker.worker_side import WorkerSide
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.packing import PackedArray, sum_of
from xpyd_sidecar.kv.session_bodies import Gpu as NcclGpu
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.device import PackedRows
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.threads import termination_log
from xpyd_sidecar.threads.watched import ThreadEnded
from xpyd_sidecar.transport.nccl.driver import Driver
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread

pytestmark = pytest.mark.timeout(300)
LAYER_BLOCK = 2 * BLOCK * 4 * 4
"""Bytes of a block of one layer."""
late = pytest.mark.parametrize("copies", ["late"], indirect=True)


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    with making(lambda name, **options: Engine(name, tmp_path, **copies, **options)) as build:
        yield build


class Transfer:
    """A prompt's request at decode, and its request at prefill, which is not computed yet."""

    def __init__(self, p: Engine, d: Engine, tokens: int = 40, prompt: int = 7) -> None:
        self.p, self.d, self.tokens, self.prompt = p, d, tokens, prompt
        transfer = uuid.uuid4().hex
        count = -(-tokens // BLOCK)
        self.source, self.target = list(range(1, count + 1)), list(range(20, 20 + count))
        self.ours = request(decode_leg(transfer, wait_s=60.0), tokens)
        self.theirs = request(prefill_leg(transfer, d), tokens)
        d.scheduler.new_request(self.ours)
        p.scheduler.new_request(self.theirs)
        p.scheduler.on_allocated(self.theirs, (self.source,), 0)

    def ask(self) -> None:
        """Decode has blocks, and has asked prefill before it has computed anything."""
        until(lambda: self.d.scheduler.match_tokens(self.ours, 0) == (self.tokens, True), self.d)
        self.d.scheduler.on_allocated(self.ours, (self.target,), self.tokens)
        self.d.step()
        until(lambda: self.p.workers[0]._publisher._machine._early, self.d)

    def compute(self, **more: Any) -> None:
        """The whole prompt in one step."""
        self.p.fill(self.source, self.prompt)
        self.p.step(new=((self.theirs, self.source, 0, self.tokens),), **more)
        self.p.scheduler.on_request_ended(self.theirs)

    def ask_late(self) -> None:
        """Decode has blocks when all is computed."""
        until(lambda: self.d.scheduler.match_tokens(self.ours, 0)[0] is not None, self.p, self.d)
        assert self.d.scheduler.match_tokens(self.ours, 0) == (self.tokens, True)
        self.d.scheduler.on_allocated(self.ours, (self.target,), self.tokens)

    def wait_loaded(self) -> None:
        until(lambda: self.ours.request_id in self.d.recved, self.p, self.d)
        assert self.d.failed == []
        assert self.d.holds(self.target, self.prompt, first=0)


# --- the scripted GPU itself ---


def test_what_is_enqueued_is_done_in_the_order_of_its_streams() -> None:
    clock, seen = Clock(), []
    gpu = Gpu(clock)
    gpu.compute(1.0, partial(seen.append, "layer 0"))
    first = gpu.side(1.0, partial(seen.append, "copy 0"))
    gpu.compute(2.5, partial(seen.append, "layer 1"))
    gpu.fence(first)
    gpu.compute(0.0, partial(seen.append, "next"))
    second = gpu.side(1.0, partial(seen.append, "copy 1"))
    assert not seen
    assert not first.done()
    clock.advance(2.0)
    assert (seen, first.done(), second.done()) == (["layer 0", "copy 0"], True, False)
    gpu.wait()
    assert seen == ["layer 0", "copy 0", "layer 1", "next"]
    clock.advance(1.0)
    assert second.done()


@late
def test_a_copy_is_garbage_until_it_is_complete_and_has_what_was_enqueued_before_it(make: Callable[..., Engine]) -> None:
    p = make("p")
    memory = p.workers[0]._memory
    p.fill([3], prompt=2)
    out = torch.empty(LAYER_BLOCK, dtype=torch.uint8)
    packed = PackedArray(0, 1, *memory.layouts({})[0])
    assert memory.copies is not None
    rows = memory.rows([CacheRows([0], [(packed, 0)], np.array([3]))])
    mark, sums = memory.copies.gather(PackedRows(rows, [(packed, 0)], LAYER_BLOCK), [(out, 0)])
    memory.fence()
    p.fill([3], prompt=5)
    assert set(out.tolist()) == {0xA5}
    p.clock.advance(1.0)
    assert mark.done()
    assert out.view(torch.float32).tolist() == [2000.0] * (LAYER_BLOCK // 4)
    assert sums.read().tolist() == [sum_of(out.numpy())]
    assert p.holds([3], prompt=5, first=0)


# --- A: what stops a GPU ---


def test_a_prompt_whose_chunks_keep_coming_may_take_longer_than_one_load_timeout(
        skip: Callable[[float], None], make: Callable[..., Engine]) -> None:
    p, d = make("p", load_timeout_s=60.0, peer_timeout_s=60.0), make("d", load_timeout_s=4.0, peer_timeout_s=60.0)
    one = Transfer(p, d, tokens=6 * BLOCK)
    one.ask()
    p.fill(one.source, one.prompt)
    for at in range(6):
        run = (one.theirs, one.source if at == 0 else [], at * BLOCK, BLOCK)
        p.step(new=(run,) if at == 0 else (), cached=(run,) if at else ())
        until(lambda upto=at + 1: d.recved or d.holds(one.target[:upto], one.prompt, first=0), p, d)
        skip(1.5)
    p.scheduler.on_request_ended(one.theirs)
    one.wait_loaded()


def test_blocks_of_a_transfer_that_has_ended_are_nobody_elses_before_its_ranks_have_let_go(
        make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control has lost decode, and the link of data has not: workers hear late that nothing is to be sent any more."""
    p, d = make("p", keep_bytes=2 * LAYERS * LAYER_BLOCK), make("d")
    one = Transfer(p, d, tokens=12 * BLOCK)
    one.ask()
    told: list[Any] = []
    monkeypatch.setattr(p.scheduler._carrying.crew, "let_go", lambda release: told.append(release) or True)
    one.compute()
    assert p.workers[0]._saving.waiting, "no block waits for room"
    p.scheduler._hearing.decode_lost(d.peer(), Outcome.PEER_LOST, "it is silent")
    end = time.monotonic() + 2.0
    while not d.recved and time.monotonic() < end:
        p.step(writes=(one.source, 9) if one.theirs.request_id in p.sent else None)
        d.step()
    assert not d.recved or d.holds(one.target, one.prompt, first=0), "KV of another request, with right checksums"
    (release,) = told
    p.workers[0]._publisher.release(release.key, release.outcome, release.reason)
    until(lambda: one.theirs.request_id in p.sent, p, d)


@late
def test_a_step_may_bring_more_than_keep_bytes_while_decode_takes_it(make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=2 * 3 * LAYER_BLOCK), make("d")
    one = Transfer(p, d)
    one.ask()
    one.compute()
    one.wait_loaded()


def test_decode_takes_in_all_of_a_load_while_it_makes_no_step(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    one = Transfer(p, d)
    one.ask()
    one.compute()
    until(lambda: d.holds(one.target, one.prompt, first=0), p)
    one.wait_loaded()


@pytest.mark.parametrize("copies", ["at once"], indirect=True)
@pytest.mark.usefixtures("copies")
def test_whole_graphs_are_not_forbidden() -> None:
    assert not XpydConnector.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize("copies", ["late", "late v1"], indirect=True)
def test_a_hook_that_sees_a_capturing_stream_leaves_its_layer_to_the_end_of_the_step(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    one = Transfer(p, d)
    one.compute(hooks="capturing")
    one.ask_late()
    one.wait_loaded()


@pytest.mark.parametrize("hooks", ["layers", "graph"])
def test_micro_batches_come_whole(make: Callable[..., Engine], hooks: str) -> None:
    """Two of them, in turn: each writes its part of a layer and calls the layer's hook."""
    p, d = make("p", by_layer=False), make("d")
    one = Transfer(p, d)
    worker, hook = p.workers[0], p.workers[0].save_layer

    def twice(layer: str) -> None:
        for blocks in (one.source[:1], one.source[1:]):
            for block in blocks:
                p.devices[0].compute(LAYER_S, partial(p.caches[0][layer][block].fill_, 7.0))
            if hooks == "layers":
                hook(layer)

    worker.save_layer = twice  # type: ignore[method-assign]
    p.step(new=((one.theirs, one.source, 0, one.tokens),))
    p.scheduler.on_request_ended(one.theirs)
    one.ask_late()
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert all(bool((cache[one.target] == 7.0).all()) for cache in d.caches[0].values())


@late
def test_a_step_is_one_gather_and_a_prompt_one_scatter_whatever_its_layers_and_blocks(
        make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "memory_sizes", lambda *_, **__: MemorySizes(1 << 20, 1 << 20, 1 << 16, ""))
    p, d = make("p", tensor=2), make("d", tensor=2)
    transfers = [Transfer(p, d, tokens=16 * (n + 1), prompt=n) for n in range(4)]
    runs = []
    for at, one in enumerate(transfers):
        one.source, one.target = [at * 5 + n + 1 for n in range(at + 1)], [31 - at * 5 - n for n in range(at + 1)]
        p.fill(one.source, one.prompt)
        runs.append((one.theirs, one.source, 0, one.tokens))
    p.step(new=tuple(runs))
    assert [copies_of(worker).gathers for worker in p.workers] == [1, 1]
    for one in transfers:
        p.scheduler.on_request_ended(one.theirs)
    for one in transfers:
        one.ask_late()
        one.wait_loaded()
    assert [copies_of(worker).scatters for worker in d.workers] == [len(transfers)] * 2


def copies_of(worker: WorkerSide) -> Any:
    """What copies of a scripted GPU were enqueued."""
    return worker._memory.copies


# --- B: anywhere ---


def test_copies_are_where_they_are_counted(make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=3 * 4096), make("d")
    store, views = p.workers[0].store, []
    push = p.workers[0]._publisher.push

    def pushed(key: Key, made: Iterable[StoredCopy], hold: int = 0) -> None:
        copies = list(made)
        views.extend(copy.view for copy in copies)
        push(key, copies, hold)

    p.workers[0]._publisher.push = pushed  # type: ignore[method-assign]
    for _ in range(2):
        prefill(p, request(prefill_leg(uuid.uuid4().hex, d)), [1, 2, 3])
    until(lambda: views, p.clock)
    start = address_of(store._arena.chunk_at(0, store.bound).view)
    assert all(start <= address_of(view) <= start + store.bound - len(view) for view in views)
    assert 0 < store.used_bytes <= store.bound


def one_engine_over_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """With a communicator thread, and a scripted NCCL."""
    def scripted(*_: object) -> NcclLinks:
        driver = Driver(FakeNccl(World()), HostDevice("gpu"), ctas=4, piece=1 << 20, groups=1, flight=FLIGHT)
        return NcclLinks(NcclThread(driver, NcclLimits(1)), NcclGpu("gpu", "2.29.7", 1 << 20), one_gpu=False)

    monkeypatch.setattr(data_plane, "nccl_links", scripted)
    return Engine("p", tmp_path)


class Fault:
    """A call of a thread that raises so many times."""

    def __init__(self, thread: str, call: Callable[..., Any]) -> None:
        self.thread, self.call = thread, call
        self.left = 0
        self.after = 0
        """Calls that went well."""

    def __call__(self, *args: Any, **more: Any) -> Any:
        if threading.current_thread().name == self.thread:
            if self.left:
                self.left -= 1
                raise OSError(9, "Bad file descriptor")
            self.after += 1
        return self.call(*args, **more)


THREADS = ("xpyd-sender", "xpyd-receiver", "xpyd-control", "xpyd-nccl", "xpyd-crew", "xpyd-hand")


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[Engine, Fault]]]:
    """An engine, and what one of its threads does again and again."""
    where = {"xpyd-control": (zmq.Poller, "poll"), "xpyd-crew": (WorkerGroup, "check"), "xpyd-hand": (Worker, "serve_one")}

    def build(thread: str) -> tuple[Engine, Fault]:
        if thread in where:
            fault = Fault(thread, getattr(*where[thread]))

            def method(*args: Any, **more: Any) -> Any:
                return fault(*args, **more)

            monkeypatch.setattr(*where[thread], method)
        engine = made()
        worker = engine.workers[0]
        if thread == "xpyd-nccl":
            assert worker._plane._nccl is not None
            machine = worker._plane._nccl.hub._machine
            machine.tick = fault = Fault(thread, machine.tick)  # type: ignore[assignment]
        elif thread not in where:
            selector = (worker._publisher if thread == "xpyd-sender" else worker._receiver)._loop._selector
            selector.select = fault = Fault(thread, selector.select)  # type: ignore[assignment]
        engine.step()
        until(lambda: fault.after and engine.scheduler._carrying.crew._ready, Clock())
        return engine, fault

    monkeypatch.setattr(worker_rpc, "LOOK_S", 0.02)
    with making(partial(one_engine_over_nccl, monkeypatch, tmp_path)) as made:
        yield build


def dead(thread: str) -> bool:
    return thread not in [one.name for one in threading.enumerate()]


@pytest.mark.parametrize("thread", THREADS[:4])
@pytest.mark.parametrize("copies", ["at once"], indirect=True)
@pytest.mark.usefixtures("copies")
def test_a_thread_that_meets_an_error_goes_on_or_the_engine_hears_of_it(
        faulty: Callable[[str], tuple[Engine, Fault]], thread: str) -> None:
    engine, fault = faulty(thread)
    fault.after, fault.left = 0, 1
    until(lambda: fault.after, Clock())
    engine.step()
    assert not dead(thread)


@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("copies", ["at once"], indirect=True)
@pytest.mark.usefixtures("copies")
def test_a_thread_that_dies_ends_the_engine_with_its_words_in_the_next_step(
        faulty: Callable[[str], tuple[Engine, Fault]], thread: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(termination_log, "TERMINATION_LOG", log)
    engine, fault = faulty(thread)
    fault.left = 1000
    until(lambda: dead(thread), Clock())
    words = f"thread {thread} ended: OSError: [Errno 9] Bad file descriptor"
    assert log.read_text() == words
    for _ in range(2):
        with pytest.raises(ThreadEnded) as raised:
            engine.step()
        assert termination_log.innermost(raised.value).endswith(words)


@late
def test_a_device_that_has_failed_ends_the_engine_with_its_words(make: Callable[..., Engine]) -> None:
    class Failed:
        def done(self) -> bool:
            return False

        def wait(self, seconds: float) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = make("p")
    engine.workers[0]._completions.add(Failed(), lambda: None)
    until(lambda: dead("xpyd-copies"), Clock())
    with pytest.raises(ThreadEnded, match="thread xpyd-copies ended: RuntimeError: CUDA error: an illegal memory access"):
        engine.step()


@late
def test_devices_whose_caches_are_laid_out_differently_exchange_kv(make: Callable[..., Engine]) -> None:
    p, d = make("p", layout="NHD"), make("d", layout="HND")
    for cache in (cache for caches in p.caches for cache in caches.values()):
        assert cache.stride()[1] < cache.stride()[2]
    one = Transfer(p, d)
    one.compute()
    one.ask_late()
    one.wait_loaded()


@late
@pytest.mark.parametrize("listed", [True, False])
def test_a_patch_of_vllm_exchanges_kv_with_another_where_both_are_listed_as_one(
        make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        listed: bool) -> None:
    d = make("d")
    ours = compat.version()
    patch = f"{ours}.post1"
    monkeypatch.setattr(vllm, "__version__", patch)
    if listed:
        monkeypatch.setitem(compat.KV_ABI, patch, compat.KV_ABI[ours])
    p = make("p")
    one = Transfer(p, d)
    one.compute()
    if listed:
        one.ask_late()
        one.wait_loaded()
    else:
        until(lambda: d.scheduler.match_tokens(one.ours, 0) == (0, False), d)  # decode computes the prompt itself
        d.scheduler.on_allocated(one.ours, (one.target,), 0)
        until(lambda: idle(p) and idle(d), p, d)
        assert p.counts["send/incompatible"] == d.counts["receive/incompatible"] == 1
        assert f"fingerprint: kv_abi: '{ours}' here, '{patch}' there" in caplog.text


def test_mode_put_waits_for_a_forward_that_takes_longer_than_its_patience(
        skip: Callable[[float], None], make: Callable[..., Engine]) -> None:
    patient = {"mode": "put", "load_timeout_s": 600.0, "peer_timeout_s": 600.0}
    p, d = make("p", put_wait_s=30.0, **patient), make("d", **patient)
    one = Transfer(p, d)
    one.ask()
    until(lambda: all(one.scheduler._carrying.crew._ready for one in (p, d)), p, d)  # that has a deadline of its own
    p.devices[0].compute(0.1, partial(skip, 60.0))
    computed = threading.Event()

    def devices_go_on() -> None:
        while not computed.wait(0.001):
            p.clock.step()

    beside = threading.Thread(target=devices_go_on)
    beside.start()
    one.compute()
    computed.set()
    beside.join()
    one.wait_loaded()
    until(lambda: idle(p) and idle(d), p, d)
    assert metrics.PUT_LATE not in p.counts
