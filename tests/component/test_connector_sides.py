"""Both sides of the connector with vLLM's types but without its engine: hooks are called as it would call them.

Real threads and sockets between two engines of one or two ranks; the KV caches are small tensors whose contents name their
place.
"""

from __future__ import annotations

import select
import socket
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from connector_sides import (
    BLOCK,
    BLOCKS,
    KEY,
    LAYERS,
    PATIENCE_S,
    Engine,
    Hooks,
    decode_leg,
    idle,
    making,
    prefill,
    prefill_leg,
    request,
    until,
)
from copies import RUNNERS
from msgspec.structs import replace
from processes import free_ports
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from running_threads import until_none_runs
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.outputs import KVConnectorOutput

from xpyd_sidecar.contract import duty, metrics
from xpyd_sidecar.contract.duty import EngineRole
from xpyd_sidecar.contract.ids import Attempt, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.engine.reports import StepReport
from xpyd_sidecar.engine.scheduler.handed_blocks import prompt_identity
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.stats import PromMetrics, Stats
from xpyd_sidecar.engine.worker.worker_side import WorkerSide
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.keys import Recent

pytestmark = pytest.mark.timeout(300)
PEER_S = PATIENCE_S / 4
"""Of silence, where a peer is to be given up before anything else is."""


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    with making(lambda name, **options: Engine(name, tmp_path, **copies, **options)) as build:
        yield build


def silent(p: Engine, skip: Callable[[float], None]) -> None:
    """Time passes until prefill has given up the one decode engine that it has told something, and little more."""
    control, looks = p.scheduler._control, [0]
    watch = control._watch

    def watched(now: float) -> None:
        watch(now)
        looks[0] += 1

    control._watch = watched  # type: ignore[method-assign]
    until(lambda: control._decodes)
    while control._decodes:  # by its looks, and not by one that is under way
        skip(PEER_S / 4)
        until(lambda after=looks[0] + 2: looks[0] >= after)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("hooks", ["layers", "graph"])
@pytest.mark.parametrize("copies", RUNNERS, indirect=True)
def test_blocks_go_from_rank_to_rank_into_their_places(make: Callable[..., Engine], tensor: int, hooks: Hooks) -> None:
    p, d = make("p", tensor=tensor), make("d", tensor=tensor)
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    assert d.scheduler.match_tokens(ours, 16) == (None, False)
    p.fill([5, 9, 3], prompt=7)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([5, 9, 3],), 0)
    p.step(new=((theirs, [5, 9, 3], 0, 40),), hooks=hooks)
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 16) == (24, True), d)
    d.scheduler.on_allocated(ours,
                             ([30, 11, 12, 13],), 24)  # one block is there already, and one more than the prompt needs
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert d.holds([11, 12], prompt=7, first=1)
    assert not d.caches[0]["layer0"][13].any()
    assert d.scheduler.match_tokens(ours, 0) == (0, False)
    until(lambda: idle(p) and idle(d), p, d)
    size = 2 * LAYERS * 2 * BLOCK * 4 * 4 * tensor
    assert p.counts[metrics.PUSHED_BYTES] == d.counts[metrics.LOADED_BYTES] == size
    assert (p.counts[metrics.PUSHED_TOKENS], d.counts[metrics.LOADED_TOKENS]) == (40, 24)
    assert (p.counts["send/ok"], d.counts["receive/ok"]) == (1, 1)


def test_a_dead_decode_engines_copies_go_without_a_step_and_memory_follows_the_role(
        skip: Callable[[float], None], make: Callable[..., Engine]) -> None:
    p, d = make("p", tensor=2, peer_timeout_s=PEER_S), make("d")
    until(lambda: p.scheduler._carrying.crew._ready, p)  # from now on workers are told between steps
    d.stop()  # it never answers
    prefill(p, request(prefill_leg(uuid.uuid4().hex, d)), [1, 2, 3])
    assert all(worker.store.used_bytes for worker in p.workers)
    silent(p, skip)
    until(lambda: not any(worker.store.used_bytes for worker in p.workers), p.clock)  # no step of p is made meanwhile
    until(lambda: idle(p), p)
    assert p.counts["send/peer_lost"] == 1
    duty.write(p.folder, EngineRole(Role.DECODE, 2))
    until(lambda: not any(worker.store.made for worker in p.workers), p)
    duty.write(p.folder, EngineRole(Role.PREFILL, 3))
    prefill(p, request(prefill_leg(uuid.uuid4().hex, d)), [4, 5, 6])
    until(lambda: all(worker.store.used_bytes for worker in p.workers), p)  # the memory is made on a thread of its own
    silent(p, skip)
    until(lambda: idle(p), p)


def test_chunks_and_a_preemption_between_them(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([1, 2, 3], prompt=4)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([1, 2],), 0)
    p.step(new=((theirs, [1, 2], 0, 20),))
    p.step(preempted=(theirs,), writes=([1, 2], 999))  # its blocks belong to somebody else now
    p.fill([20, 21, 22], prompt=4)
    p.scheduler.on_allocated(theirs, ([20, 21, 22],), 0)
    p.step(new=((theirs, [20, 21, 22], 0, 40),))
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    until(lambda: d.recved, p, d)
    assert d.holds([8, 7, 6], prompt=4, first=0)


def test_different_fingerprints_are_named_and_decode_does_not_wait(make: Callable[..., Engine],
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p", model={"rope": 2}), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer, wait_s=600.0)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    prefill(p, theirs, [1, 2, 3])
    until(lambda: d.scheduler.match_tokens(ours, 0) == (0, False), d)
    d.scheduler.on_allocated(ours, ([1, 2, 3],), 0)
    until(lambda: idle(p) and idle(d), p, d)
    assert "fingerprint: model: " in caplog.text
    assert p.counts["send/incompatible"] == d.counts["receive/incompatible"] == 1


def test_different_tensor_sizes_of_caches_that_cannot_be_cut_are_named(make: Callable[..., Engine],
                                                                       caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p", tensor=2), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer, wait_s=600.0)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    prefill(p, theirs, [1, 2, 3])
    until(lambda: d.scheduler.match_tokens(ours, 0) == (0, False), d)
    assert "tensor sizes differ, and kv cache layer0 cannot be cut by heads" in caplog.text


def test_blocks_without_room_stay_in_the_cache_until_decode_makes_some(make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=1), make("d")  # the least there may be: four blocks
    transfers = [uuid.uuid4().hex for _ in range(5)]
    for prompt, transfer in enumerate(transfers):
        ids = [3 * prompt + 1, 3 * prompt + 2, 3 * prompt + 3]
        p.fill(ids, prompt)
        prefill(p, request(prefill_leg(transfer, d), prompt=prompt), ids, held=prompt > 0)
        assert p.workers[0].store.used_bytes <= p.workers[0].store.bound
    assert p.workers[0]._saving.waiting == 12
    assert len(p.sent) <= 1, "the first alone may have been copied out by now"
    for prompt, transfer in enumerate(transfers):
        ours = request(decode_leg(transfer), prompt=prompt)
        d.scheduler.new_request(ours)
        until(lambda one=ours: d.scheduler.match_tokens(one, 0) == (40, True), d, p)
        d.scheduler.on_allocated(ours, ([29, 30, 31],), 40)
        until(lambda one=ours: one.request_id in d.recved, p, d)
        assert d.failed == []
        assert d.holds([29, 30, 31], prompt, first=0)
    until(lambda: idle(p) and idle(d), p, d)
    assert len(p.sent) == (5 if p.clocked else 4), "on a host the first was copied out before its request ended"


def test_a_prompt_for_a_decode_that_takes_nothing_does_not_begin_and_others_do(make: Callable[..., Engine]) -> None:
    p, d, e = make("p", keep_bytes=1), make("d"), make("e")
    transfers: list[str] = []
    while True:
        n, transfer = len(transfers), uuid.uuid4().hex
        late = request(prefill_leg(transfer, d))
        p.scheduler.new_request(late)
        if p.scheduler.match_tokens(late, 0) == (None, False):
            break
        assert n < 4, "of 8 blocks, those of one decode engine may be 4 times what they leave free"
        prefill(p, late, [3 * n + 1, 3 * n + 2, 3 * n + 3])
        transfers.append(transfer)
    assert len(transfers) > 1
    other = request(prefill_leg(uuid.uuid4().hex, e, instance="e"))
    p.scheduler.new_request(other)
    assert p.scheduler.match_tokens(other, 0) == (0, False)
    p.scheduler.on_request_ended(other)
    for transfer in transfers:
        ours = request(decode_leg(transfer))
        d.scheduler.new_request(ours)
        until(lambda one=ours: d.scheduler.match_tokens(one, 0) == (40, True), d, p)
        d.scheduler.on_allocated(ours, ([29, 30, 31],), 40)
        until(lambda one=ours: one.request_id in d.recved, p, d)
    until(lambda: p.scheduler.match_tokens(late, 0) == (0, False), p, d)
    assert d.failed == []
    assert "send/overflow" not in p.counts


def test_blocks_that_find_no_room_for_long_are_given_up_and_decode_is_told(
        skip: Callable[[float], None], make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=1), make("d")
    p.workers[0]._saving._wait_s = PATIENCE_S / 4  # sooner than what nobody asks for is given up
    prefill(p, request(prefill_leg(uuid.uuid4().hex, d)), [1, 2, 3])
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer, wait_s=600.0)), request(prefill_leg(transfer, d))
    lease = p.workers[0].store.lease(1)  # what is left of the store has another holder
    while lease is not None and (more := p.workers[0].store.lease(256)) is not None:
        lease = more
    prefill(p, theirs, [16, 17, 18], held=True)
    skip(PATIENCE_S / 4)
    until(lambda: p.counts.get("send/overflow"), p)
    d.scheduler.new_request(ours)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (0, False), d)
    d.scheduler.on_allocated(ours, ([1, 2, 3],), 0)
    until(lambda: idle(d), p, d)
    assert d.counts["receive/overflow"] == 1
    until(lambda: theirs.request_id in p.sent, p)


def test_what_waits_for_room_is_lost_where_its_request_is_preempted(make: Callable[..., Engine]) -> None:
    p, d = make("p", keep_bytes=1), make("d")
    prefill(p, request(prefill_leg(uuid.uuid4().hex, d)), [1, 2, 3], held=False)
    theirs = request(prefill_leg(uuid.uuid4().hex, d))
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([4, 5],), 0)
    p.step(new=((theirs, [4, 5], 0, 20),))
    assert p.workers[0]._saving.waiting == 1
    p.step(preempted=(theirs,))
    assert p.workers[0]._saving.waiting == 0
    until(lambda: p.counts.get("send/overflow"), p)


@pytest.mark.parametrize("mode", ["put", "get"])
def test_other_modes_bring_the_same_blocks(make: Callable[..., Engine], mode: str) -> None:
    p, d = make("p", mode=mode), make("d", mode=mode, window_bytes=1)  # a window is two blocks at least
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([5, 9, 3], prompt=7)
    prefill(p, theirs, [5, 9, 3])
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert d.holds([8, 7, 6], prompt=7, first=0)
    until(lambda: idle(p) and idle(d), p, d)
    if mode == "put":  # decode could not ask while prefill's step, on the same thread, was waiting: once, not twice
        assert p.counts[metrics.PUT_LATE] == 1
        assert p.counts[metrics.PUT_WAIT_SECONDS] > 0.2


@pytest.mark.parametrize("mode", ["put_async", "get"])
def test_each_decode_rank_gets_the_blocks_of_the_prefill_rank_that_computed_its_prompt(make: Callable[..., Engine],
                                                                                       mode: str) -> None:
    """Ranks of an engine have one name and one incarnation: nothing but their addresses tells them apart."""
    ps, ds = [[make(name, mode=mode, data=(rank, 2)) for rank in (0, 1)] for name in ("p", "d")]
    assert len({d.peer().incarnation for d in ds}) == 1
    assert len({p.peer().control for p in ps} | {d.peer().control for d in ds}) == 4
    pairs = [(p, d) for p in ps for d in ds]
    loads = []
    for number, (p, d) in enumerate(pairs):
        transfer = uuid.uuid4().hex
        ours = request(decode_leg(transfer), prompt=number + 1)
        d.scheduler.new_request(ours)
        ids = [3 * number + at for at in (1, 2, 3)]
        p.fill(ids, prompt=number + 1)
        prefill(p, request(prefill_leg(transfer, d), prompt=number + 1), ids)
        loads.append((d, ours, [15 + at for at in ids]))
    for d, ours, into in loads:
        until(lambda d=d, ours=ours: d.scheduler.match_tokens(ours, 0) == (40, True), *ps, *ds)  # type: ignore[misc]
        d.scheduler.on_allocated(ours, (into,), 40)
    until(lambda: all(len(d.recved) == 2 for d in ds), *ps, *ds)
    for number, (d, _, into) in enumerate(loads):
        assert d.holds(into, prompt=number + 1, first=0), pairs[number]
    until(lambda: all(map(idle, (*ps, *ds))), *ps, *ds)
    assert [one.counts["send/ok"] for one in ps] == [one.counts["receive/ok"] for one in ds] == [2, 2]
    assert not any(one.failed for one in ds)


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
    assert d.scheduler.match_tokens(ours, 16) == (24, True)
    d.scheduler.on_allocated(ours, ([30, 7, 6],), 24)
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert d.holds([7, 6], prompt=7, first=1)
    until(lambda: idle(p) and idle(d), p, d)
    assert (p.counts["send/ok"], d.counts["receive/ok"]) == (1, 1)


def test_what_came_ahead_of_a_request_that_has_ended_leaves_the_buffer_also_where_prefill_is_gone(
        make: Callable[..., Engine]) -> None:
    """Its request would have been served from there; nobody else is."""
    p, d = make("p"), make("d", buffer_bytes=1 << 20, keep_ttl_s=600.0)
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    prefill(p, theirs, [5, 9, 3])
    p.workers[0].store.bound = 1
    receiver = d.workers[0]._receiver
    until(lambda: d.counts.get(metrics.BUFFERED_BYTES) and not p.workers[0].store.used_bytes, p, d)
    p.workers[0]._publisher.stop()
    until(lambda: not receiver._sources, d)
    assert any(receiver.buffered_bytes)
    d.scheduler.on_request_ended(ours)
    assert d.scheduler.pending(), "its workers have to hear of it"
    until(lambda: not any(receiver.buffered_bytes), d)


def test_the_policy_fail_reports_the_smallest_load_as_failed(make: Callable[..., Engine]) -> None:
    d = make("d", recompute=False)
    ours = request(decode_leg(uuid.uuid4().hex, wait_s=0.1))
    d.scheduler.new_request(ours)
    until(lambda: d.scheduler.match_tokens(ours, 32) == (1, True), d)
    d.scheduler.on_allocated(ours, ([1, 2, 3],), 1)
    until(lambda: d.recved, d)
    assert d.recved == d.failed == [ours.request_id]
    d.scheduler.on_request_ended(ours)
    until(lambda: idle(d), d)
    assert d.counts["receive/deadline"] == 1


def test_a_request_aborted_while_loading_is_reported_once_and_written_no_more(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([1, 2, 3], prompt=4)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([1, 2],), 0)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    d.step()
    d.scheduler.on_request_ended(ours)
    until(lambda: d.recved, d)
    p.step(new=((theirs, [1, 2, 3], 0, 40),))
    p.scheduler.on_request_ended(theirs)
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
    first.scheduler.on_allocated(theirs, ([1, 2, 3],), 0)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
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


def test_a_load_that_one_rank_has_lost_is_waited_for_by_no_other(make: Callable[..., Engine]) -> None:
    """Its source of the other rank lives and brings nothing, since nobody computes."""
    p, d = make("p", tensor=2), make("d", tensor=2, load_timeout_s=600.0)
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([1, 2, 3],), 0)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    p.workers[1].stop()
    until(lambda: d.recved, d)
    assert set(d.failed) == {ours.request_id}
    until(lambda: idle(d), d)
    assert d.counts["receive/peer_lost"] == 1


@pytest.mark.parametrize("ends", ["loaded", "left"])
def test_a_prefill_that_was_never_asked_lets_go_when_another_try_took_its_place(make: Callable[..., Engine],
                                                                                ends: str) -> None:
    """Its data link does not answer, so neither ASK nor the word that a newer try took over comes to it there."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        first = make("p", advertise_data=f"127.0.0.1:{mute.getsockname()[1]}", keep_ttl_s=300.0)
        second, d = make("p2"), make("d", peer_timeout_s=60.0)
        transfer = uuid.uuid4().hex
        ours = request(decode_leg(transfer))
        d.scheduler.new_request(ours)
        prefill(first, request(prefill_leg(transfer, d)), [1, 2, 3])
        until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
        d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
        until(lambda: select.select([mute], [], [], 0)[0], first, d)
        second.fill([4, 5, 6], prompt=4)
        prefill(second, request(prefill_leg(transfer, d, attempt=2)), [4, 5, 6])
        if ends == "loaded":
            until(lambda: d.recved, first, second, d)
            assert d.holds([8, 7, 6], prompt=4, first=0)
        else:
            until(lambda: d.counts.get(metrics.RETRIES), first, second, d)
            d.scheduler.on_request_ended(ours)
        until(lambda: idle(first) and idle(second) and idle(d), first, second, d)
    assert first.counts["send/stale"] == 1


def test_the_ranks_of_an_engine_take_ports_in_a_row(make: Callable[..., Engine]) -> None:
    port = free_ports(2)
    p = make("p", tensor=2, data_port=port)
    assert [worker.address().data.address for worker in p.workers] == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    p = make("behind", tensor=2, advertise_data="10.0.0.9:7000")
    assert [worker.address().data.address for worker in p.workers] == ["10.0.0.9:7000", "10.0.0.9:7001"]


@pytest.mark.parametrize(("options", "refused"), [
    ({"data_port": 65535}, "data_port: cannot listen on 127.0.0.1 port 65536"),
    ({"advertise_data": "10.0.0.9:65535"}, "advertise_data: 10.0.0.9:65535 leaves no port for rank 1")])
def test_a_port_row_beyond_the_last_port_is_refused(tmp_path: Path, options: dict[str, Any], refused: str) -> None:
    settings = ConnectorSettings(KvOptions(**options), InstanceName("p"), "127.0.0.1", KEY, tmp_path)
    with pytest.raises(ConfigError, match=refused):
        WorkerSide(settings, 1, {"layer0": torch.zeros(BLOCKS, 2, BLOCK, 4)}, BLOCKS)
    until_none_runs("xpyd")


def test_ids_that_vllm_does_not_wait_for_are_taken_out(make: Callable[..., Engine]) -> None:
    output = KVConnectorOutput(finished_recving={"never", "heard"}, finished_sending={"of"})
    make("d").scheduler.on_worker_output(output)
    assert not output.finished_recving
    assert not output.finished_sending


@pytest.mark.parametrize("params", [
    {"xpyd": 2, "role": "decode"}, {"do_remote_prefill": True}, {"xpyd": "1"}, {"xpyd": 1}, [1], "x"])
def test_parameters_that_are_not_understood_make_an_ordinary_request(make: Callable[..., Engine], params: Any,
                                                                     caplog: pytest.LogCaptureFixture) -> None:
    d = make("d")
    odd = request(params)
    d.scheduler.new_request(odd)
    assert d.scheduler.match_tokens(odd, 0) == (0, False)
    d.scheduler.on_allocated(odd, ([1, 2, 3],), 0)
    assert d.scheduler.answer(odd) is None
    d.scheduler.on_request_ended(odd)
    assert "is served as an ordinary one" in caplog.text


def test_prompts_given_as_embeddings_are_ordinary_requests(make: Callable[..., Engine]) -> None:
    d = make("d")
    odd = request(decode_leg(uuid.uuid4().hex))
    odd.prompt_token_ids = None
    d.scheduler.new_request(odd)
    assert d.scheduler.match_tokens(odd, 0) == (0, False)


def test_a_decode_engine_that_is_not_there_is_given_up(
        skip: Callable[[float], None], make: Callable[..., Engine]) -> None:
    p, d = make("p", peer_timeout_s=PEER_S), make("d")
    leg = prefill_leg(uuid.uuid4().hex, d)
    d.scheduler.stop()
    prefill(p, request(leg), [1, 2, 3])
    assert p.scheduler.pending()
    silent(p, skip)
    until(lambda: idle(p), p)
    assert p.counts["send/peer_lost"] == 1


def test_an_engine_steps_on_until_its_workers_say_that_nothing_is_held(make: Callable[..., Engine]) -> None:
    """Else its metrics would go on saying so: copies may leave after their transfer has ended."""
    side = make("p").scheduler

    def said(held: int) -> bool:
        report = StepReport(levels={0: {metrics.KEPT_BYTES: held, metrics.NCCL_GROUPS: 1}})
        side.on_worker_output(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=None,
                                              finished_sending=None))
        side.take_stats()
        return side.pending()

    assert said(4096)
    assert said(4096), "also when it was said before"
    assert not said(0)


def test_statistics_add_up_over_intervals_and_pipes() -> None:
    one, two = Stats(), XpydConnector.build_kv_connector_stats({"send/ok": 2, metrics.SENDS_OPEN: 0})
    one.count_transfer("send", "ok")
    one.data[metrics.SENDS_OPEN] = 5
    assert isinstance(one, KVConnectorStats)
    assert one.aggregate(two).to_dict() == {"send/ok": 3, metrics.SENDS_OPEN: 0}
    assert not one.is_empty()
    one.reset()
    assert one.is_empty()


def test_statistics_become_metrics_with_the_labels_that_their_names_carry() -> None:
    registry = CollectorRegistry()
    kinds: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    made = PromMetrics(config, kinds, ["engine"], {0: ["0"]})
    made.observe({f"{metrics.LINKS_REFUSED}:nixl": 2, "link:tcp": 3, "send/ok": 4, metrics.RETRIES: 5}, 0)
    for name, labels, value in (("xpyd_kv_links_refused_total", {"link": "nixl"}, 2), ("xpyd_kv_retries_total", {}, 5),
                                ("xpyd_kv_link_bytes_total", {"link": "tcp"}, 3),
                                ("xpyd_kv_transfers_total", {"side": "send", "outcome": "ok"}, 4)):
        assert registry.get_sample_value(name, {"engine": "0", **labels}) == value


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_version()
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.34\.1 is not supported by this xpyd; use 0\.32\.x or 0\.33\.x"):
        compat.check_version()


def loads(p: Engine, d: Engine, ours: Any, theirs: Any) -> None:
    """Prefill computes ``theirs``, and ``ours`` has its KV; one block of it decode has itself."""
    d.scheduler.new_request(ours)
    prefill(p, theirs, [1, 2, 3])
    until(lambda: d.scheduler.match_tokens(ours, 16) == (24, True), d)
    ours.prefill_stats.set(40, 16, 24)  # as vLLM does before it allocates
    d.scheduler.on_allocated(ours, ([30, 11, 12],), 24)
    until(lambda: d.recved, p, d)


@pytest.mark.parametrize("cached", [0, 16, 32])
def test_a_requests_usage_says_what_prefill_had_cached_and_statistics_stay_decodes(make: Callable[..., Engine],
                                                                                   cached: int) -> None:
    p, d = make("p"), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    theirs.prefill_stats.set(40, cached, 0)
    loads(p, d, ours, theirs)
    stats = ours.prefill_stats
    assert stats.num_cached_tokens == cached
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens, stats.num_computed_tokens) == (16, 24, 0)
    stats.finalize(40)
    assert stats.num_cache_creation_tokens == 40 - cached


def test_of_several_tries_the_last_one_says_what_was_cached(make: Callable[..., Engine]) -> None:
    p, other, d = make("p"), make("o"), make("d")
    transfer = uuid.uuid4().hex
    ours = request(decode_leg(transfer))
    first, second = request(prefill_leg(transfer, d)), request(prefill_leg(transfer, d, attempt=2))
    first.prefill_stats.set(40, 0, 0)
    second.prefill_stats.set(40, 32, 0)
    p.scheduler.new_request(first)
    p.scheduler.on_allocated(first, ([1, 2],), 0)
    p.step(new=((first, [1, 2], 0, 20),))
    p.scheduler.on_request_ended(first)
    until(lambda: idle(p), p, d)
    loads(other, d, ours, second)
    assert ours.prefill_stats.num_cached_tokens == 32


def test_a_prefill_engine_that_does_not_say_it_changes_nothing(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    theirs.prefill_stats = None
    loads(p, d, ours, theirs)
    assert ours.prefill_stats.num_cached_tokens == 40


def test_where_a_load_fails_usage_says_what_decode_had_itself(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d", load_timeout_s=3.0)
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    theirs.prefill_stats.set(40, 32, 0)
    d.scheduler.new_request(ours)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([1, 2, 3],), 0)
    p.step(new=((theirs, [1, 2], 0, 20),))  # the rest never comes
    until(lambda: d.scheduler.match_tokens(ours, 16) == (24, True), d)
    ours.prefill_stats.set(40, 16, 24)
    d.scheduler.on_allocated(ours, ([30, 11, 12],), 24)
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.failed, p, d)
    assert ours.prefill_stats.num_cached_tokens == 16


def test_a_peer_that_speaks_is_not_forgotten_for_those_that_have_greeted_since(make: Callable[..., Engine]) -> None:
    """Each prefill engine that had nothing to say for two minutes greets anew, on another connection."""
    p, d = make("p"), make("d")
    d.scheduler._carrying.greeted = Recent(4)
    transfer, peer = uuid.uuid4().hex, b"p" * 16
    hello = p.scheduler._hearing.ours.hello(d.peer().incarnation)
    hear = d.scheduler._hearing.from_prefill
    hear(peer, hello)
    for at in range(8):
        hear(bytes([at]) * 16, hello)
        hear(peer, messages.Ping(at))
    ours = request(decode_leg(transfer))
    d.scheduler.new_request(ours)
    hear(peer, messages.Announce(TransferId(transfer), Attempt(1), 1, prompt_identity(ours), 41, 40,
                                 (p.workers[0].address().data,)))
    assert d.scheduler.match_tokens(ours, 0) == (40, True)
    d.scheduler.on_request_ended(ours)
    until(lambda: idle(d), d)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_peer_that_greets_again_as_somebody_else_does_not_end_decode_with_what_it_has_announced(
        make: Callable[..., Engine], forgotten: bool) -> None:
    """The orders of a load go by what its peer said of its ranks; ``forgotten``: thousands have greeted in between."""
    p, d = make("p"), make("d")
    transfer, peer = uuid.uuid4().hex, b"p" * 16
    ours = request(decode_leg(transfer))
    d.scheduler.new_request(ours)
    hello = p.scheduler._hearing.ours.hello(d.peer().incarnation)
    rank = messages.ListeningRank(p.workers[0].address().data.address, Incarnation("e" * 32))
    hear = d.scheduler._hearing.from_prefill
    hear(peer, hello)
    hear(peer, messages.Announce(TransferId(transfer), Attempt(1), 1, prompt_identity(ours), 41, 40, (rank,)))
    if forgotten:
        d.scheduler._carrying.greeted.pop(peer)
    hear(peer, replace(hello, expects=Incarnation("f" * 32)))
    assert d.scheduler.match_tokens(ours, 0) == (40, True)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    until(lambda: d.recved, d)
    assert d.failed == [ours.request_id]
    d.scheduler.on_request_ended(ours)
    until(lambda: idle(d), d)
