"""What a GPU shows and a CPU does not: copies that are complete later, hosts that run ahead, steps that last.

Every test says what is right. Those that fail today have the row of docs/development/late-copies.md that says why, and
``tests/unit/test_late_list.py`` counts them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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
from rows import fails

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine import compat, worker_side
from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.engine.links.nccl_driver import Driver
from xpyd_sidecar.engine.links.nccl_taker import NcclGrouping
from xpyd_sidecar.engine.links.nccl_thread import FLIGHT, Hub, Limits
from xpyd_sidecar.engine.links.near import Ways
from xpyd_sidecar.errors import ConfigError

pytestmark = pytest.mark.timeout(60)
LAYER_BLOCK = 2 * BLOCK * 4 * 4
"""Bytes of a block of one layer."""
SOON_S = 0.5
"""For what needs no step and no tick: a thread has only to be scheduled."""
late = pytest.mark.parametrize("copies", ["late"], indirect=True)


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    with making(lambda name, **options: Engine(name, tmp_path, **copies, **options)) as build:
        yield build


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time of all threads on."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])

    def skipped(seconds: float) -> None:
        ahead[0] += seconds

    return skipped


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
        p.scheduler.allocated(self.theirs, self.source, 0)

    def ask(self) -> None:
        """READY comes to prefill before it has computed anything."""
        until(lambda: self.d.scheduler.matched(self.ours, 0) == (self.tokens, True), self.d)
        self.d.scheduler.allocated(self.ours, self.target, self.tokens)
        until(lambda: self.p.workers[0]._sender._machine._early, self.d)

    def compute(self, **more: Any) -> None:
        """The whole prompt in one step."""
        self.p.fill(self.source, self.prompt)
        self.p.step(new=((self.theirs, self.source, 0, self.tokens),), **more)
        self.p.scheduler.ended(self.theirs)

    def ask_late(self) -> None:
        """READY comes when all is computed."""
        until(lambda: self.d.scheduler.matched(self.ours, 0)[0] is not None, self.p, self.d)
        assert self.d.scheduler.matched(self.ours, 0) == (self.tokens, True)
        self.d.scheduler.allocated(self.ours, self.target, self.tokens)

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
    out = memory.copy_out(0, memory.index([3]))
    memory.fence()
    p.fill([3], prompt=5)
    assert set(bytes(out.data)) == {0xA5}
    p.clock.advance(1.0)
    assert out.mark.done()
    assert out.data.cast("B").cast("f").tolist() == [2000.0] * (LAYER_BLOCK // 4)
    assert p.holds([3], prompt=5, first=0)


# --- A: what stops a GPU ---


def test_a_prompt_whose_chunks_keep_coming_may_take_longer_than_one_load_timeout(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p", load_timeout_s=60.0, peer_timeout_s=60.0), make("d", load_timeout_s=4.0, peer_timeout_s=60.0)
    one = Transfer(p, d, tokens=6 * BLOCK)
    one.ask()
    p.fill(one.source, one.prompt)
    for at in range(6):
        run = (one.theirs, one.source if at == 0 else [], at * BLOCK, BLOCK)
        p.step(new=(run,) if at == 0 else (), cached=(run,) if at else ())
        until(lambda upto=at + 1: d.recved or d.holds(one.target[:upto], one.prompt, first=0), p, d)
        skip(1.5)
    p.scheduler.ended(one.theirs)
    one.wait_loaded()


@late
@fails("A2", "keep_bytes is taken when a layer is enqueued, when nothing can leave yet")
def test_a_step_may_bring_more_than_keep_bytes_while_decode_takes_it(make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=2 * 3 * LAYER_BLOCK), make("d")
    one = Transfer(p, d)
    one.ask()
    one.compute()
    one.wait_loaded()


@late
@fails("A5", "chunks come back in poll, so decode takes in one staging of chunks per step")
def test_decode_takes_in_more_while_it_makes_no_step(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "STAGING_BYTES", 1)  # two chunks, the least there may be
    p, d = make("p"), make("d")
    one = Transfer(p, d)
    one.ask()
    one.compute()
    inbox = d.workers[0]._receiver.inbox
    until(lambda: len(inbox) == LAYERS - 1, p)
    d.step()  # both are placed; their marks pass while prefill steps
    until(lambda: inbox, p, deadline_s=SOON_S)
    one.wait_loaded()


@pytest.mark.parametrize("copies", ["at once"], indirect=True)
@fails("A6", "piecewise graphs are asked for, which costs decode its whole ones")
@pytest.mark.usefixtures("copies")
def test_whole_graphs_are_not_forbidden() -> None:
    assert not XpydConnector.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize("copies", ["late", "late v1"], indirect=True)
@fails("A6", "a hook copies although its stream is being captured and has computed nothing")
def test_a_hook_that_sees_a_capturing_stream_leaves_its_layer_to_the_end_of_the_step(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    one = Transfer(p, d)
    one.compute(hooks="capturing")
    one.ask_late()
    one.wait_loaded()


@fails("A7", "a layer's second hook in a step is swallowed, and DBO is not refused")
def test_micro_batches_are_refused_or_come_whole(make: Callable[..., Engine]) -> None:
    parallel = SimpleNamespace(use_ubatching=True, enable_dbo=True, ubatch_size=0)
    try:
        compat.check_model(SimpleNamespace(parallel_config=parallel, speculative_config=None), None)
    except ConfigError:
        return
    p, d = make("p"), make("d")
    one = Transfer(p, d)
    worker, hook = p.workers[0], p.workers[0].save_layer

    def twice(layer: str) -> None:
        for blocks in (one.source[:1], one.source[1:]):
            for block in blocks:
                p.devices[0].compute(LAYER_S, partial(p.caches[0][layer][block].fill_, 7.0))
            hook(layer)

    worker.save_layer = twice
    p.step(new=((one.theirs, one.source, 0, one.tokens),))
    p.scheduler.ended(one.theirs)
    one.ask_late()
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert all(bool((cache[one.target] == 7.0).all()) for cache in d.caches[0].values())


# --- B: anywhere ---


@fails("B1", "copies that do not fit into the pool, which rounds up, get memory beside it")
def test_all_that_the_budget_allows_is_in_the_pool(make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=3 * 4096), make("d")
    pool, beside = p.workers[0]._pool, []
    take = pool.take

    def taken(size: int) -> Any:
        piece = take(size)
        if piece is None:
            beside.append(size)
        return piece

    pool.take = taken  # type: ignore[method-assign]
    for _ in range(2):
        prefill(p, request(prefill_leg(uuid.uuid4().hex, d)), [1, 2, 3])
    assert p.workers[0].budget.used > 0
    assert beside == []


def one_engine_over_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """With a communicator thread, and a scripted NCCL."""
    def choose(*_: object) -> tuple[Ways, NcclGrouping]:
        driver = Driver(FakeNccl(World()), HostDevice("gpu"), ctas=4, piece=1 << 20, groups=1, flight=FLIGHT)
        return Ways("tcp"), NcclGrouping(Hub(driver, Limits(1)), 1)

    monkeypatch.setattr(worker_side, "choose", choose)
    return Engine("p", tmp_path)


class Fault:
    """A call of a thread that raises once."""

    def __init__(self, thread: str, call: Callable[..., Any]) -> None:
        self.thread, self.call = thread, call
        self.armed = False
        self.after = 0

    def __call__(self, *args: Any) -> Any:
        if self.armed and threading.current_thread().name == self.thread:
            self.armed = False
            raise OSError(9, "Bad file descriptor")
        self.after += threading.current_thread().name == self.thread
        return self.call(*args)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread", ["xpyd-sender", "xpyd-receiver", "xpyd-control", "xpyd-nccl"])
@pytest.mark.parametrize("copies", ["at once"], indirect=True)
@pytest.mark.usefixtures("copies")
@fails("B4", "a thread of the connector ends, and the engine goes on without it", pytest.fail.Exception)
def test_a_thread_that_meets_an_error_goes_on_or_the_engine_hears_of_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    polled = Fault(thread, zmq.Poller.poll)

    def poll(*args: Any) -> Any:
        return polled(*args)

    monkeypatch.setattr(zmq.Poller, "poll", poll)
    with making(partial(one_engine_over_nccl, monkeypatch, tmp_path)) as make:
        engine = make()
        worker = engine.workers[0]
        if thread == "xpyd-control":
            fault = polled
        elif thread == "xpyd-nccl":
            assert worker._groups is not None
            machine = worker._groups._hub._machine
            machine.tick = fault = Fault(thread, machine.tick)  # type: ignore[assignment]
        else:
            selector = (worker._sender if thread == "xpyd-sender" else worker._receiver)._loop._selector
            selector.select = fault = Fault(thread, selector.select)  # type: ignore[assignment]
        engine.step()
        (running,) = [one for one in threading.enumerate() if one.name == thread]
        fault.after, fault.armed = 0, True
        until(lambda: not fault.armed and (fault.after or not running.is_alive()), Clock())
        if not running.is_alive():
            with pytest.raises(Exception, match=thread):
                engine.step()


@pytest.mark.parametrize("differs", [
    pytest.param("layout", marks=fails("B6", "the layout is compared, which refuses GPUs whose copies fit")),
    pytest.param("patch of vLLM", marks=fails("B7", "vLLM's exact version is compared: 0.32.0 refuses 0.32.1"))])
@late
def test_engines_whose_copies_fit_are_not_refused(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
                                                  differs: str) -> None:
    d = make("d")
    if differs == "layout":
        if XpydConnector.get_required_kvcache_layout(SimpleNamespace()) is not None:
            return  # vLLM gives both the same
        monkeypatch.setattr(compat, "kv_layout", lambda _: "NHD")
    else:
        monkeypatch.setattr(compat, "version", lambda: "0.32.1")
    one = Transfer(make("p"), d)
    one.compute()
    one.ask_late()
    one.wait_loaded()


@late
@fails("B8", "put waits from the end of the host's half of a step, which a GPU has not begun")
def test_mode_put_waits_for_a_forward_that_takes_longer_than_its_patience(make: Callable[..., Engine]) -> None:
    p, d = make("p", mode="put", put_wait_s=0.1), make("d", mode="put")
    one = Transfer(p, d)
    one.ask()
    worker, finish = p.workers[0], p.workers[0].finish_saves
    gpu = threading.Timer(0.4, p.clock.advance, (1.0,))  # the forward ends while the host waits

    def finishing() -> None:
        gpu.start()
        finish()

    worker.finish_saves = finishing  # type: ignore[method-assign]
    one.compute()
    gpu.join()
    worker.finish_saves = finish  # type: ignore[method-assign]
    one.wait_loaded()
    until(lambda: idle(p) and idle(d), p, d)
    assert metrics.PUT_LATE not in p.counts
